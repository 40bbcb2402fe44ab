"""The rows of a step whose logits are verified, padded to the widest proposal. Knows requests and their drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.engine.request import Request
from common.engine.scheduler import ScheduledRequest
from common.parallel.vocabulary import Vocabulary
from common.sampling.params import SamplingRows
from common.spec_decode.verify import NO_TOKEN, VerificationResult, verify, verify_drawn
from common.types import SamplingParams, Verification


class VerifyBlock:
    """The rows of all sampling requests, padded to the widest proposal."""

    def __init__(self, step: list[ScheduledRequest], device: torch.device) -> None:
        self.step = step
        num_draft = [scheduled.num_draft for scheduled in step]
        self.width = max(num_draft) + 1
        self.is_uniform = min(num_draft) == max(num_draft)
        self._device = device
        self._num_draft = torch.tensor(num_draft, device=device)
        begins = (
            torch.tensor([0, *(n + 1 for n in num_draft[:-1])]).cumsum(0).to(device).unsqueeze(1)
        )
        columns = torch.arange(self.width, device=device)
        self.row_index = (begins + torch.minimum(columns, self._num_draft.unsqueeze(1))).flatten()

    def verify(self, logits: torch.Tensor, vocabulary: Vocabulary) -> VerificationResult:
        """Check all proposals against `logits [R, width, P]`, this rank's part of the vocabulary."""
        if vocabulary.is_whole:
            return self._verify_by_rule(range(len(self.step)), logits)
        # Greedy requests need no more than the largest logits; only the others' rows are gathered whole.
        by_kind = members_by_kind([scheduled.request for scheduled in self.step])
        shape = (len(self.step), self.width)
        token_ids = torch.full(shape, NO_TOKEN, device=self._device)
        num_accepted = torch.zeros(len(self.step), dtype=torch.int64, device=self._device)
        for is_greedy, members in by_kind:
            mine = logits[members]
            if is_greedy:
                result = verify_drawn(
                    target_ids=vocabulary.argmax(mine),
                    draft_ids=self._draft_ids(members),
                    num_draft=self._num_draft[members],
                )
            else:
                result = self._verify_by_rule(members, vocabulary.whole(mine))
            token_ids[members] = result.token_ids
            num_accepted[members] = result.num_accepted
        return VerificationResult(token_ids=token_ids, num_accepted=num_accepted)

    def _verify_by_rule(self, members: Sequence[int], logits: torch.Tensor) -> VerificationResult:
        """Each of the chosen requests by its own rule; `logits [r, width, V]` are theirs."""
        requests = [self.step[i].request for i in members]
        columns = torch.arange(self.width, device=self._device)
        starts = torch.tensor([len(request.tokens) for request in requests], device=self._device)
        rows = SamplingRows.of([request.sampling for request in requests], starts, self._device)
        rejection = [self._is_rejection(self.step[i]) for i in members]
        return verify(
            logits=logits,
            draft_ids=self._draft_ids(members),
            num_draft=self._num_draft[list(members)],
            rows=rows.repeat(self.width).at((starts.unsqueeze(1) + columns).flatten()),
            rejection=torch.tensor(rejection, device=self._device),
            draft_probs=self._draft_probs(members, rejection),
        )

    @staticmethod
    def _is_rejection(scheduled: ScheduledRequest) -> bool:
        request = scheduled.request
        if not uses_rejection(request.sampling):
            return False
        # A proposal that came without distributions (first round after a hand-off) is verified coupled.
        return scheduled.num_draft == 0 or (
            request.draft is not None and request.draft.probs is not None
        )

    def _draft_ids(self, members: Sequence[int]) -> torch.Tensor:
        ids = []
        for scheduled in (self.step[i] for i in members):
            draft = scheduled.request.draft
            chosen = draft.proposal.token_ids[: scheduled.num_draft] if draft is not None else ()
            ids.append([*chosen, *[0] * (self.width - 1 - len(chosen))])
        return torch.tensor(ids, dtype=torch.int64, device=self._device)

    def _draft_probs(self, members: Sequence[int], rejection: list[bool]) -> torch.Tensor | None:
        """`[r, width - 1, vocab]`, zero for requests that are not verified by rejection."""
        probs = None
        for i, scheduled in enumerate(self.step[member] for member in members):
            draft = scheduled.request.draft
            if not rejection[i] or not scheduled.num_draft or draft is None or draft.probs is None:
                continue
            if probs is None:
                shape = (len(members), self.width - 1, draft.probs.shape[-1])
                probs = torch.zeros(shape, device=self._device)
            probs[i, : scheduled.num_draft] = draft.probs[: scheduled.num_draft]
        return probs


def members_by_kind(requests: Sequence[Request]) -> list[tuple[bool, list[int]]]:
    """Indices of the greedy requests, with True, and of the others, with False; a kind that is not there is left out."""
    kinds = [
        (is_greedy, [i for i, r in enumerate(requests) if r.sampling.is_greedy is is_greedy])
        for is_greedy in (True, False)
    ]
    return [(is_greedy, members) for is_greedy, members in kinds if members]


def uses_rejection(sampling: SamplingParams) -> bool:
    return not sampling.is_greedy and sampling.verification is Verification.REJECTION
