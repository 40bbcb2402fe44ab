"""What a client asks for and what it gets back, whichever door it came through (gRPC now, HTTP beside it)."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from common.errors import InvalidRequest
from common.tokenizer import ChatMessage
from common.types import RequestId, SamplingParams, TokenLogprob
from services.router.commits import Finish

MAX_REQUEST_ID_CHARS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """Plain text to be continued."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """Token ids, taken as they are."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation that the assistant answers."""

    messages: tuple[ChatMessage, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


def new_request_id() -> RequestId:
    """An id for a request whose client chose none."""
    return RequestId(uuid.uuid4().hex)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A continuation that a client asks for, before it is checked against the model."""

    prompt: Prompt
    request_id: RequestId = field(default_factory=new_request_id)
    model: str = ""
    """Empty: whichever is served."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Its seed counts only if `has_seed`."""
    has_seed: bool = False
    max_tokens: int | None = None
    """None: whatever the model's context leaves."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    traceparent: str = ""
    """The trace that the client's call belongs to; empty when it says nothing of one."""

    @property
    def operation(self) -> str:
        """What kind of request it is, as the conventions of OpenTelemetry name it."""
        return "chat" if isinstance(self.prompt, ChatPrompt) else "text_completion"

    def __post_init__(self) -> None:
        request_id = self.request_id
        if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS or not _is_plain(request_id):
            raise InvalidRequest(
                f"request_id has {len(request_id)} characters; "
                f"give 1 to {MAX_REQUEST_ID_CHARS} printable ASCII ones"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens that a request used."""

    prompt_tokens: int
    completion_tokens: int
    rounds: int
    draft_tokens: int
    accepted_tokens: int

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per verification round, the target's own included; 0 when there was none."""
        return 0.0 if self.rounds == 0 else 1.0 + self.accepted_tokens / self.rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where a request's time went. Stages that a request skipped are 0."""

    queue_s: float
    prefill_s: float
    handoff_s: float
    time_to_first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way a request took; of a request that was placed again, the last one."""

    prefill_worker: str = ""
    decode_worker: str = ""
    transfer_engine: str = ""
    replacements: int = 0
    drafter_fallback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """How a request ended."""

    finish: Finish
    usage: Usage
    timings: Timings
    route: Route


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Newly committed tokens of a request; the last one carries the completion."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    completion: Completion | None = None


def _is_plain(text: str) -> bool:
    """Fit for logs and for metadata, which takes no other characters."""
    return text.isascii() and text.isprintable()
