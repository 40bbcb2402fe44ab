from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.sampling.noise import Purpose, gumbel, uniform
from common.sampling.params import SamplingRows
from common.sampling.sampler import probabilities, sample
from common.spec_decode.verify import NO_TOKEN, VerificationResult, verify
from common.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
NO_REJECTION = torch.zeros(1, dtype=torch.bool)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """R requests as verify takes them."""

    logits: Tensor
    draft_ids: Tensor
    num_draft: Tensor
    params: list[SamplingParams]
    positions: list[int]
    rejection: Tensor
    draft_probs: Tensor | None

    @classmethod
    def make(
        cls, params: list[SamplingParams], rejection: list[bool], max_draft: int, seed: int
    ) -> Batch:
        """Drafts and distributions at random, the drafts often the likely tokens."""
        generator = torch.Generator().manual_seed(seed)
        num_requests, vocab_size = len(params), 6
        logits = torch.randn(num_requests, max_draft + 1, vocab_size, generator=generator) * 2.0
        draft_probs = (
            logits[:, :-1] + torch.randn(num_requests, max_draft, vocab_size, generator=generator)
        ).softmax(-1)
        return cls(
            logits=logits,
            draft_ids=draft_probs.argmax(-1),
            num_draft=torch.randint(0, max_draft + 1, (num_requests,), generator=generator),
            params=params,
            positions=torch.randint(1, 1000, (num_requests,), generator=generator).tolist(),
            rejection=torch.tensor(rejection),
            draft_probs=draft_probs,
        )

    def verify(self) -> VerificationResult:
        width = self.logits.shape[1]
        positions = torch.tensor(self.positions)[:, None] + torch.arange(width)
        rows = SamplingRows.of(self.params, self.positions, "cpu").repeat(width)
        return verify(
            logits=self.logits,
            draft_ids=self.draft_ids,
            num_draft=self.num_draft,
            rows=rows.at(positions.flatten()),
            rejection=self.rejection,
            draft_probs=self.draft_probs,
        )

    def alone(self, request: int) -> Batch:
        only = slice(request, request + 1)
        return Batch(
            logits=self.logits[only],
            draft_ids=self.draft_ids[only],
            num_draft=self.num_draft[only],
            params=self.params[only],
            positions=self.positions[only],
            rejection=self.rejection[only],
            draft_probs=None if self.draft_probs is None else self.draft_probs[only],
        )


def _emitted(result: VerificationResult, request: int = 0) -> list[int]:
    ids: list[int] = result.token_ids[request].tolist()
    count = int(result.num_accepted[request]) + 1
    assert ids[count:] == [NO_TOKEN] * (len(ids) - count)
    return ids[:count]


def _emitted_by_definition(batch: Batch, request: int) -> list[int]:
    """One request, one row at a time."""
    params = batch.params[request]
    uses_rejection = bool(batch.rejection[request]) and not params.is_greedy
    emitted: list[int] = []
    for column in range(int(batch.num_draft[request]) + 1):
        row = SamplingRows.of([params], [batch.positions[request] + column], "cpu")
        logits = batch.logits[request, column][None]
        is_bonus = column == int(batch.num_draft[request])
        draft = -1 if is_bonus else int(batch.draft_ids[request, column])
        if not uses_rejection:
            emitted.append(int(sample(logits, row)))
            if emitted[-1] != draft:
                break
            continue
        p = probabilities(logits, row)[0]
        if not is_bonus:
            assert batch.draft_probs is not None
            q = batch.draft_probs[request, column]
            u = uniform(seeds=row.seed, positions=row.position, purpose=Purpose.ACCEPT)
            if float(u) * float(q[draft]) < float(p[draft]):
                emitted.append(draft)
                continue
            p = (p - q).clamp(min=0.0)
        noise = gumbel(
            seeds=row.seed, positions=row.position, purpose=Purpose.RESIDUAL, vocab_size=len(p)
        )
        emitted.append(int((p.log() + noise[0]).argmax()))
        break
    return emitted


PARAMS = st.one_of(
    st.just(GREEDY),
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.5, 1.0]),
        top_k=st.sampled_from([0, 3]),
        top_p=st.sampled_from([1.0, 0.8]),
        seed=st.integers(0, 2**63 - 1),
    ),
)


@given(
    requests=st.lists(st.tuples(PARAMS, st.booleans()), min_size=1, max_size=6),
    max_draft=st.integers(0, 5),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_a_mixed_batch_gains_what_each_request_gains_by_definition(
    requests: list[tuple[SamplingParams, bool]], max_draft: int, seed: int
) -> None:
    batch = Batch.make([p for p, _ in requests], [r for _, r in requests], max_draft, seed)
    result = batch.verify()
    for request in range(len(requests)):
        emitted = _emitted(result, request)
        assert emitted == _emitted_by_definition(batch, request)
        assert emitted == _emitted(batch.alone(request).verify())


@pytest.mark.parametrize("num_draft", [1, 5, 7])
def test_greedy_accepts_every_prefix_length_and_no_more(num_draft: int) -> None:
    best = torch.arange(num_draft + 1) + 2
    logits = torch.nn.functional.one_hot(best, 16).float()[None]
    for num_right in range(num_draft + 1):
        # Drafts after the first wrong one are right again, and must not count.
        drafts = best[:-1].clone()
        drafts[num_right : num_right + 1] = 0
        batch = Batch(
            logits=logits,
            draft_ids=drafts[None],
            num_draft=torch.tensor([num_draft]),
            params=[GREEDY],
            positions=[3],
            rejection=NO_REJECTION,
            draft_probs=None,
        )
        result = batch.verify()
        assert int(result.num_accepted) == num_right
        assert _emitted(result) == best[: num_right + 1].tolist()


@given(
    drafts=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    num_draft=st.integers(0, 4),
    seed=st.integers(0, 2**63 - 1),
)
@settings(max_examples=100, deadline=None)
def test_coupled_tokens_are_those_of_plain_sampling_whatever_the_drafts(
    drafts: list[int], num_draft: int, seed: int
) -> None:
    params = SamplingParams(seed=seed)
    logits = torch.randn(1, 5, 6, generator=torch.Generator().manual_seed(2))
    batch = Batch(
        logits=logits,
        draft_ids=torch.tensor([drafts]),
        num_draft=torch.tensor([num_draft]),
        params=[params],
        positions=[50],
        rejection=NO_REJECTION,
        draft_probs=None,
    )
    plain = sample(logits[0], SamplingRows.of([params] * 5, range(50, 55), "cpu")).tolist()
    emitted = _emitted(batch.verify())
    assert emitted == plain[: len(emitted)]
    assert emitted[:-1] == drafts[: len(emitted) - 1]
    assert len(emitted) == num_draft + 1 or emitted[-1] != drafts[len(emitted) - 1]


@pytest.mark.parametrize("is_rejection", [False, True])
def test_padding_is_ignored(is_rejection: bool) -> None:
    """Drafts, logits and distributions past a request's own drafts hold leftovers, even NaN and ids that do not exist."""
    params = [SamplingParams(seed=seed) for seed in range(40)]
    clean = Batch.make(params, [is_rejection] * 40, 4, seed=8)
    assert clean.draft_probs is not None
    is_padding = torch.arange(4) >= clean.num_draft[:, None]
    logits = clean.logits.clone()
    logits[:, 1:][is_padding] = torch.nan
    dirty = Batch(
        logits=logits,
        draft_ids=clean.draft_ids.masked_fill(is_padding, -7),
        num_draft=clean.num_draft,
        params=params,
        positions=clean.positions,
        rejection=clean.rejection,
        draft_probs=clean.draft_probs.masked_fill(is_padding[..., None], torch.nan),
    )
    assert torch.equal(clean.verify().token_ids, dirty.verify().token_ids)


def test_rejection_never_emits_what_the_filters_exclude() -> None:
    """Every draft has probability 1 at the drafter and 0 at the filtered target."""
    params = [SamplingParams(top_k=2, seed=seed) for seed in range(200)]
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0]).expand(200, 2, 4)
    batch = Batch(
        logits=logits,
        draft_ids=torch.full((200, 1), 3),
        num_draft=torch.ones(200, dtype=torch.int64),
        params=params,
        positions=[9] * 200,
        rejection=torch.ones(200, dtype=torch.bool),
        draft_probs=torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(200, 1, 4),
    )
    result = batch.verify()
    assert result.num_accepted.tolist() == [0] * 200
    assert set(result.token_ids[:, 0].tolist()) == {0, 1}


def test_rejection_of_a_drafter_that_equals_the_target_accepts_all() -> None:
    params = [SamplingParams(seed=seed) for seed in range(300)]
    base = Batch.make(params, [True] * 300, 3, seed=1)
    batch = Batch(
        logits=base.logits,
        draft_ids=base.draft_ids,
        num_draft=base.num_draft,
        params=params,
        positions=base.positions,
        rejection=base.rejection,
        draft_probs=base.logits[:, :-1].softmax(-1),
    )
    assert torch.equal(batch.verify().num_accepted, base.num_draft)


def test_greedy_requests_need_no_draft_distributions() -> None:
    batch = Batch.make([GREEDY] * 5, [True] * 5, 3, seed=4)
    without = Batch.make([GREEDY] * 5, [False] * 5, 3, seed=4)
    assert torch.equal(batch.verify().token_ids, without.verify().token_ids)
