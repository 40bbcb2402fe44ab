"""The nouns that cross room borders. Knows token ids and positions; never sees a tensor or a message."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NewType

from common.errors import InvalidRequest

RequestId = NewType("RequestId", str)

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this draw greedily."""

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256


class Verification(enum.Enum):
    """How drafts of a sampled request are checked against the target."""

    AUTO = "auto"
    REJECTION = "rejection"
    COUPLED = "coupled"


class FinishReason(enum.Enum):
    """Why a request ended well. A failed request raises instead."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn."""

    temperature: float = 1.0
    top_k: int = 0
    """Tokens kept; 0 keeps all."""
    top_p: float = 1.0
    """The smallest set whose probability reaches this is kept, the crossing token included."""
    seed: int = 0
    """Below 2**63. The router draws one for requests that bring none."""
    logprobs: int | None = None
    """Alternatives to report per token; None reports nothing, 0 only the token's own."""
    verification: Verification = Verification.COUPLED
    """Never AUTO past the router, which knows whether the seed was the caller's."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise InvalidRequest(
                f"temperature is {self.temperature}; give a value between 0 and 100"
            )
        if self.top_k < 0:
            raise InvalidRequest(f"top_k is {self.top_k}; give 0 (all tokens) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p is {self.top_p}; give a value in (0, 1]")
        if not 0 <= self.seed < 2**63:
            raise InvalidRequest(f"seed is {self.seed}; give a value from 0 to 2**63 - 1")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidRequest(f"logprobs is {self.logprobs}; at most {MAX_TOP_LOGPROBS}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def is_filtered(self) -> bool:
        """Whether tokens are drawn from less than the vocabulary."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopParams:
    """When generation ends."""

    max_tokens: int
    """The router resolves an absent bound to what the context leaves."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {self.max_tokens}; give at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}; give 0 to max_tokens ({self.max_tokens})"
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"{len(self.stop)} stop strings; at most {MAX_STOP_STRINGS}")
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequest(
                    f"a stop string has {len(text)} characters; give 1 to {MAX_STOP_STRING_CHARS}"
                )


@dataclass(slots=True, kw_only=True)
class RequestContext:
    """The whole truth of a request: enough to continue it on any pair of workers."""

    request_id: RequestId
    epoch: int
    prompt: tuple[int, ...]
    committed: list[int] = field(default_factory=list)
    sampling: SamplingParams
    stop: StopParams

    @property
    def length(self) -> int:
        """Tokens whose identity is settled: prompt and committed."""
        return len(self.prompt) + len(self.committed)

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.committed]

    @property
    def max_length(self) -> int:
        """Length that the request may reach."""
        return len(self.prompt) + self.stop.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of a generated token at temperature 1, with alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Drafted tokens that follow a request's last token."""

    token_ids: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    """Conditional acceptance probability per draft, as the drafter sees it."""
