"""The proposals that an engine carries are those of the slow reference, whatever was accepted before.

Shifted anchors, positions or contexts never show in text, and a batch that is wrong in the same way as a solo run does
not show them either: only the reference does.
"""

from __future__ import annotations

import pytest
import torch

from common.engine.request import Draft, Request
from common.model.config import ModelConfig
from common.types import Proposal
from tests.support.engine_bench import EngineBench, Wanted, random_tokens, small_model
from tests.support.slow_drafter import SlowDrafter
from tests.support.target_bench import Rows, TargetBench
from tests.support.tiny_checkpoint import random_tensors

SEED = 11
MODEL = small_model(drafter=True, seed=SEED)
CONFIG: ModelConfig = MODEL.config
SLOW = SlowDrafter(CONFIG, random_tensors(CONFIG, SEED))
DRAFT_LENGTH = 5


def check_proposal(request: Request) -> None:
    """The request's taps are computed anew, in one step, on a cache that nothing else has touched."""
    assert request.draft is not None
    tokens = request.tokens
    taps = TargetBench(MODEL, num_slots=1).run(Rows(0, 0, tokens[:-1]))[0].taps
    expected = SLOW.draft(taps, tokens[-1], DRAFT_LENGTH)
    proposal = request.draft.proposal
    assert list(proposal.token_ids) == expected.token_ids
    confidences = torch.sigmoid(expected.confidence_logits).tolist()
    assert proposal.confidences == pytest.approx(confidences, abs=1e-4)


def force(request: Request, truth: list[int], num_accepted: int) -> None:
    """Exchange the proposal for one of which exactly `num_accepted` drafts are right."""
    length = len(request.tokens)
    ids = truth[length : length + num_accepted]
    ids += [(token + 1) % CONFIG.vocab_size for token in truth[length + num_accepted :]]
    sure = (1.0,) * DRAFT_LENGTH
    request.draft = Draft(proposal=Proposal(token_ids=tuple(ids[:DRAFT_LENGTH]), confidences=sure))


def test_after_every_accepted_length_the_next_proposal_is_the_references() -> None:
    """Two requests at different lengths, one inside its first window and one far beyond it, share every step."""
    wanted = [
        Wanted(prompt=random_tokens(length, seed=length), max_length=length + 60)
        for length in (9, 126)
    ]
    plain = EngineBench(MODEL, draft_length=0).run(*wanted)
    truths = [[*w.prompt, *output.tokens] for w, output in zip(wanted, plain, strict=True)]
    bench = EngineBench(MODEL, draft_length=DRAFT_LENGTH, garbage=True)
    requests = [bench.add(w) for w in wanted]
    bench.step()
    for turn in range(DRAFT_LENGTH + 1):
        for i, request in enumerate(requests):
            check_proposal(request)
            force(request, truths[i], (turn + 3 * i) % (DRAFT_LENGTH + 1))
        report = bench.step()
        assert [r.num_accepted for r in report.rounds] == [
            (turn + 3 * i) % (DRAFT_LENGTH + 1) for i in range(len(requests))
        ]
    for request in requests:
        check_proposal(request)


@pytest.mark.parametrize("max_step_rows", [7, 64])
def test_the_first_proposal_does_not_depend_on_how_the_prompt_was_cut(max_step_rows: int) -> None:
    bench = EngineBench(MODEL, draft_length=DRAFT_LENGTH, max_step_rows=max_step_rows)
    request = bench.add(Wanted(prompt=random_tokens(133, seed=1), max_length=200))
    while request.round == 0:
        bench.step()
    check_proposal(request)
