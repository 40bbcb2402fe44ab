"""The rows of a step whose logits are verified. Knows requests and their drafts; knows no logits.

Letters: T rows, R requests, r some of them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.engine.request import Request
from common.engine.scheduler import ScheduledRequest
from common.engine.tensors import ints
from common.sampling.params import SamplingRows
from common.types import SamplingParams, Verification


class VerifyBlock:
    """The rows of all sampling requests: those of their drafts, and one more for the token behind them."""

    def __init__(self, step: list[ScheduledRequest], device: torch.device) -> None:
        self.step = step
        self.device = device
        self.num_draft = [scheduled.num_draft for scheduled in step]
        self.width = max(self.num_draft) + 1
        """Columns of a block that is padded to the widest proposal."""
        self.rows = [(i, j) for i, count in enumerate(self.num_draft) for j in range(count + 1)]
        """Request and column of each of the T rows of logits."""
        self.rejection = [_is_rejection(scheduled) for scheduled in step]
        """Which requests are verified by rejection in this round."""
        self.reporting = [i for i, each in enumerate(step) if _sampling(each).logprobs is not None]
        """Requests whose clients want log-probabilities."""
        self.reported = [t for t, (i, _) in enumerate(self.rows) if i in self.reporting]
        """Their rows."""

    def padded_index(self) -> torch.Tensor:
        """`[R * width]`: a row for every place of the padded block; a request's last one is repeated."""
        begin, index = 0, []
        for count in self.num_draft:
            index += [begin + min(j, count) for j in range(self.width)]
            begin += count + 1
        return self.ints(index)

    def places(self, rows: Sequence[int]) -> torch.Tensor:
        """Where the chosen rows are in the padded block, which is read row by row."""
        return self.ints([i * self.width + j for i, j in (self.rows[t] for t in rows)])

    def sampling_rows(self, rows: Sequence[int]) -> SamplingRows:
        """How the chosen rows are drawn."""
        chosen = [(self.step[i].request, j) for i, j in (self.rows[t] for t in rows)]
        positions = self.ints([len(request.tokens) + j for request, j in chosen])
        return SamplingRows.of([request.sampling for request, _ in chosen], positions, self.device)

    def padded_sampling_rows(self, members: Sequence[int]) -> SamplingRows:
        """`[r * width]`: how every place of the chosen requests is drawn."""
        requests = [self.step[i].request for i in members]
        starts = self.ints([len(request.tokens) for request in requests])
        columns = torch.arange(self.width, device=self.device)
        rows = SamplingRows.of([request.sampling for request in requests], starts, self.device)
        return rows.repeat(self.width).at((starts.unsqueeze(1) + columns).flatten())

    def draft_ids(self, members: Sequence[int]) -> torch.Tensor:
        """`[r, width - 1]`, filled up with zeros."""
        ids = []
        for scheduled in (self.step[i] for i in members):
            draft = scheduled.request.draft
            chosen = draft.proposal.token_ids[: scheduled.num_draft] if draft is not None else ()
            ids.append([*chosen, *[0] * (self.width - 1 - len(chosen))])
        return torch.tensor(ids, dtype=torch.int64, device=self.device)

    def draft_probs(self, members: Sequence[int]) -> torch.Tensor | None:
        """`[r, width - 1, V]`, zero for requests that are not verified by rejection; None where none is."""
        probs = None
        for k, i in enumerate(members):
            count, draft = self.num_draft[i], self.step[i].request.draft
            if not self.rejection[i] or not count or draft is None or draft.probs is None:
                continue
            if probs is None:
                shape = (len(members), self.width - 1, draft.probs.shape[-1])
                probs = torch.zeros(shape, device=self.device)
            probs[k, :count] = draft.probs[:count]
        return probs

    def ints(self, values: Sequence[int]) -> torch.Tensor:
        """On the block's device."""
        return ints(values, self.device)


def uses_rejection(sampling: SamplingParams) -> bool:
    return not sampling.is_greedy and sampling.verification is Verification.REJECTION


def _sampling(scheduled: ScheduledRequest) -> SamplingParams:
    return scheduled.request.sampling


def _is_rejection(scheduled: ScheduledRequest) -> bool:
    request: Request = scheduled.request
    if not uses_rejection(request.sampling):
        return False
    # A proposal that came without distributions (first round after a hand-off) is verified coupled.
    return scheduled.num_draft == 0 or (
        request.draft is not None and request.draft.probs is not None
    )
