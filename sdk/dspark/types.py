"""What requests carry and results hold. Knows plain values only; never a message or a channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verification = Literal["auto", "rejection", "coupled"]
FinishReason = Literal["stop", "length", "abort", "unspecified"]
WorkerRole = Literal["unspecified", "prefill", "decode"]
WorkerState = Literal["unspecified", "ready", "draining", "unreachable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn; what is None takes the server's default, which `model_info` reports."""

    temperature: float | None = None
    """Below 1e-5 the draw is greedy."""
    top_k: int | None = None
    """Tokens kept; 0 keeps all."""
    top_p: float | None = None
    """Probability mass kept, in (0, 1]; the token that crosses it is kept."""
    seed: int | None = None
    """Makes the result a function of prompt and seed; below 2**63."""
    logprobs: int | None = None
    """Alternatives reported per token, at most 20; None reports no log-probabilities."""
    verification: Verification = "auto"
    """How drafts of a sampled request are checked; both ways are exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopParams:
    """When generation ends."""

    max_tokens: int | None = None
    """None: as many as the model's context leaves."""
    min_tokens: int | None = None
    """No stop condition ends the request before this many tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end the request; they are not part of the result."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise TypeError(f"stop is a tuple of texts; write ({self.stop!r},)")


DEFAULT_SAMPLING = SamplingParams()
DEFAULT_STOP = StopParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    """One alternative at a position."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """The natural log-probability of a generated token at temperature 1."""

    token_id: int
    logprob: float
    top: tuple[TopLogprob, ...] = ()
    """The most likely alternatives, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens that a request used."""

    prompt_tokens: int
    completion_tokens: int
    """A stop token included."""
    rounds: int
    """Verification rounds; the first token's is not counted."""
    draft_tokens: int
    accepted_tokens: int

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per verification round, the target's own included; 0 without rounds."""
        return 1 + self.accepted_tokens / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where a request's time went, in seconds on the server's clock."""

    queue_s: float
    prefill_s: float
    handoff_s: float
    """Runs beside the first token, so it is not part of time_to_first_token_s."""
    time_to_first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way a request took through the workers."""

    prefill_worker: str
    """Empty when the decode worker computed the prompt itself."""
    decode_worker: str
    transfer_engine: str
    """Empty when there was no hand-off."""
    replacements: int
    """How often the request was placed again after a worker failed."""
    drafter_fallback: str
    """Non-empty when drafting began without the prompt's drafter state, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished request."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """One per token when they were asked for, else empty."""
    finish_reason: FinishReason
    matched_stop: str | None
    """The stop string that ended the request."""
    matched_token_id: int | None
    """The stop token that ended the request."""
    usage: Usage
    timings: Timings
    route: Route


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEvent:
    """One committed round of a streamed request; what it holds never changes later."""

    token_ids: tuple[int, ...]
    text: str
    """May be empty while a character or a possible stop string is incomplete."""
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The served model and its limits."""

    model: str
    max_context_length: int
    """Prompt plus completion, in tokens."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int
    draft_length: int
    """Tokens drafted per round; 0 when nothing is drafted."""
    fingerprint: str
    default_sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMesh:
    """How the ranks of a worker are arranged."""

    dp: int
    """Data parallel groups, which have requests and cache of their own."""
    tp: int
    """Ranks of each group."""
    ep: int
    """Ranks that routed experts are spread over; 1 where every group has all experts."""
    num_ranks: int
    device: str
    """Kind of device that they compute on: cpu, cuda or npu."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryClaim:
    """Memory of one owner; every buffer has exactly one."""

    owner: str
    kind: str
    """weights, pages, rings, drafter or workspace on the device; host is a copy in the node's memory."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What one rank of a worker holds for as long as it lives."""

    rank: int
    device: str
    """As the rank's own node calls it, such as `cuda:3`."""
    claims: tuple[MemoryClaim, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker has last said of itself."""

    role: str
    version: str
    uptime_s: float
    num_pages: int
    num_free_pages: int
    num_slots: int
    """Requests that it may hold at once."""
    num_free_slots: int
    mesh: WorkerMesh
    memory: tuple[RankMemory, ...]
    """Of its ranks, in their order."""
    details: dict[str, str]
    """Figures by name; for people, not for programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """The state of the server that answered."""

    version: str
    role: str
    uptime_s: float
    queued_requests: int
    running_requests: int
    details: dict[str, str]
    """Figures and settings by name; for people, not for programs."""
    workers: dict[str, WorkerInfo]
    """By host:port; those that the server has heard of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker as the router sees it."""

    address: str
    role: WorkerRole
    state: WorkerState
    generation: str
    """Changes when the worker restarts."""
    running_requests: int
    pending_tokens: int
