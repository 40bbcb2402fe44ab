from __future__ import annotations

import torch
from torch import Tensor

from common.parallel.collectives import Axis
from common.sampling.noise import Purpose, gumbel
from common.sampling.params import SamplingRows
from common.sampling.sampler import probabilities, sample
from common.spec_decode.draft_sampling import DraftResult, markov_draft
from common.types import SamplingParams
from tests.support.vocabularies import vocabulary_of

VOCAB_SIZE, NUM_DRAFT, RANK = 40, 5, 3
GREEDY = SamplingParams(temperature=0.0)
FILTERED = SamplingParams(temperature=0.7, top_k=9, top_p=0.9, seed=77)

_generator = torch.Generator().manual_seed(0)
BASE = torch.randn(4, NUM_DRAFT, VOCAB_SIZE, generator=_generator)
W1 = torch.randn(VOCAB_SIZE, RANK, generator=_generator)
W2 = torch.randn(VOCAB_SIZE, RANK, generator=_generator)
ANCHORS = torch.tensor([3, 1, 4, 1])
POSITIONS = torch.tensor([10, 20, 30, 40])[:, None] + torch.arange(NUM_DRAFT)


def _bias(ids: Tensor) -> tuple[Tensor, Tensor]:
    return W1[ids] @ W2.T, W1[ids]


def _draft(
    params: list[SamplingParams], coupled: list[bool], want_probs: bool = False
) -> DraftResult:
    rows = SamplingRows.of(params, [0] * len(params), "cpu").repeat(NUM_DRAFT)
    return markov_draft(
        base_logits=BASE[: len(params)],
        anchor_ids=ANCHORS[: len(params)],
        markov_bias=_bias,
        rows=rows.at(POSITIONS[: len(params)].flatten()),
        coupled=torch.tensor(coupled),
        want_probs=want_probs,
        top_k=[each.top_k for each in params],
        vocabulary=vocabulary_of(BASE.shape[-1], Axis("tp")),
    )


def _conditioned_logits(result: DraftResult, request: int) -> Tensor:
    """Logits [G, V] given the drafts that were drawn."""
    before = torch.cat([ANCHORS[request : request + 1], result.token_ids[request, :-1]])
    return BASE[request] + _bias(before)[0]


def test_greedy_drafts_follow_one_another() -> None:
    result = _draft([GREEDY] * 4, [False] * 4)
    for request in range(4):
        expected = _conditioned_logits(result, request).argmax(-1)
        assert torch.equal(result.token_ids[request], expected)


def test_embeddings_are_those_of_the_token_before_each_draft() -> None:
    result = _draft([GREEDY] * 4, [False] * 4)
    before = torch.cat([ANCHORS[:, None], result.token_ids[:, :-1]], 1)
    assert torch.equal(result.embeddings, W1[before])


def test_a_coupled_draft_is_the_draw_that_the_target_would_make_from_its_logits() -> None:
    result = _draft([FILTERED] * 4, [True] * 4)
    for request in range(4):
        rows = SamplingRows.of([FILTERED] * NUM_DRAFT, POSITIONS[request], "cpu")
        expected = sample(_conditioned_logits(result, request), rows)
        assert torch.equal(result.token_ids[request], expected)


def test_a_draft_for_rejection_has_noise_of_its_own_in_every_proposal() -> None:
    plain = SamplingParams(seed=5)
    result = _draft([plain] * 4, [False] * 4)
    for k in range(NUM_DRAFT):
        noise = gumbel(
            seeds=torch.full((4,), 5),
            positions=POSITIONS[:, k],
            purpose=Purpose.DRAFT,
            vocab_size=VOCAB_SIZE,
            depth=k,
        )
        logits = torch.stack([_conditioned_logits(result, request)[k] for request in range(4)])
        assert torch.equal(result.token_ids[:, k], (logits + noise).argmax(-1))


def test_probs_are_what_each_draft_was_drawn_from() -> None:
    params = [FILTERED, GREEDY, SamplingParams(seed=2), FILTERED]
    result = _draft(params, [False, False, True, True], want_probs=True)
    assert result.probs is not None
    for request in range(4):
        rows = SamplingRows.of([params[request]] * NUM_DRAFT, range(NUM_DRAFT), "cpu")
        expected = probabilities(_conditioned_logits(result, request), rows)
        torch.testing.assert_close(result.probs[request], expected)
        drawn = result.probs[request].gather(1, result.token_ids[request][:, None])
        assert bool((drawn > 0.0).all())


def test_a_request_drafts_the_same_in_any_batch() -> None:
    params = [FILTERED, GREEDY, SamplingParams(seed=2), FILTERED]
    coupled = [False, False, True, True]
    assert torch.equal(
        _draft(params, coupled).token_ids[:1], _draft(params[:1], coupled[:1]).token_ids
    )


def test_probs_are_not_made_where_nobody_wants_them() -> None:
    assert _draft([FILTERED], [True]).probs is None
