"""A request inside the engine: its tokens and how many of them are computed. Knows positions; no tensors but q.

There is no prefill phase and no decode phase: `num_computed` catches up with `len(tokens)`, by chunks while the prompt
is long and by verified blocks after that.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

import torch

from common.types import Proposal, RequestId, SamplingParams, TokenLogprob


class Role(enum.Enum):
    """How far the engine takes a request."""

    UNTIL_FIRST_TOKEN = "until_first_token"
    """Compute the prompt, sample the first token, draft the first proposal, stop. For a hand-off."""
    GENERATE = "generate"
    """Go on until `remove`."""


@dataclass(slots=True, kw_only=True)
class Draft:
    """A proposal waiting to be verified."""

    proposal: Proposal
    probs: torch.Tensor | None = None
    """Distribution that each token was drawn from, `[drafts, vocab]`; None when verification must be coupled."""


@dataclass(slots=True, kw_only=True)
class Request:
    """Owned by the engine from `add` to `remove`; slot and pages belong to whoever added it."""

    request_id: RequestId
    epoch: int
    role: Role
    tokens: list[int]
    """Prompt, then everything verified. Drafts are not part of it."""
    num_computed: int = 0
    """Positions whose cache rows are written and valid. At most `len(tokens) - 1` once a token was sampled."""
    max_length: int
    """The engine never lets `tokens` grow beyond this."""
    sampling: SamplingParams
    slot: int
    block_table: list[int]
    """Pages that cover `max_length` positions."""
    group: int = 0
    """Data parallel group that holds the slot and the pages."""
    draft: Draft | None = None
    round: int = 0
    """Rounds verified so far."""
    acknowledged_round: int = 0
    """Last round that the router committed."""
    drafter_valid_from: int = 0
    """First position whose drafter row exists; above 0 after a hand-off without drafter rows."""
    timings: RequestTimings = field(default_factory=lambda: RequestTimings())
    num_adopted: int = field(init=False)
    """Positions that were computed elsewhere."""

    def __post_init__(self) -> None:
        self.num_adopted = self.num_computed

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def computes_prompt(self) -> bool:
        """Whether what comes next is a prompt, or what was committed since a state was kept, and not a newest token."""
        return self.round == 0 and (
            self.num_adopted == 0 or len(self.tokens) > self.num_adopted + 1
        )

    @property
    def room(self) -> int:
        """Tokens that may still be generated."""
        return self.max_length - len(self.tokens)


@dataclass(slots=True)
class RequestTimings:
    """Seconds on the worker's monotonic clock."""

    first_scheduled: float = 0.0
    first_token: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What one step did for one request that got new tokens."""

    request: Request
    round: int
    """Counts up from 1."""
    base: int
    """Length that `token_ids` extend."""
    token_ids: tuple[int, ...]
    num_draft: int
    num_accepted: int
    confidences: tuple[float, ...]
    """Of the drafts that were looked at."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token when asked for."""
    num_offered: int = 0
    """Drafts that waited to be verified; the schedule may have had room for fewer."""
    ends_prompt: bool = False
    """The step computed the end of a prompt: its token is the first one, and no verification's."""


class StepListener(Protocol):
    """Told on the engine's thread what a step has done before it ends. Requests are still as they were before the step."""

    def computed(self, request: Request, num_computed: int) -> None:
        """The rows of its first so many positions are written."""

    def sampled(self, request: Request, token_id: int, logprob: TokenLogprob | None) -> None:
        """Its next token is known; what may follow it is still to be drafted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did."""

    rounds: tuple[RoundResult, ...]
    progressed: tuple[Request, ...]
    """Requests whose `num_computed` moved without a new token: prompt chunks."""
    num_prompt_tokens: int = 0
    """Of the rows, those that computed prompts."""
    num_rows: int
    seconds: float
    phase_seconds: dict[str, float]
    """Parts of `seconds` by phase: schedule, forward, verify, draft, commit."""
