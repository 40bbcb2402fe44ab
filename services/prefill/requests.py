"""What can be asked of a prefill worker, and a context as a request for its engine. Holds no state."""

from __future__ import annotations

from common.engine.memory import RequestMemory
from common.engine.request import Request, Role
from common.errors import (
    ContextLengthExceeded,
    DuplicateRequest,
    InvalidRequest,
    RequestNotFound,
)
from common.rpc.worker_info import WorkerIdentity
from common.types import RequestContext
from services.prefill.leases import FinishedState


def require_possible(identity: WorkerIdentity, context: RequestContext) -> None:
    """Raise InvalidRequest or ContextLengthExceeded when this worker could never compute a context."""
    if not 0 < context.length < context.max_length:
        raise InvalidRequest(
            f"a context of {context.length} tokens that may reach {context.max_length} leaves nothing to compute"
        )
    if context.max_length > identity.max_context_length:
        raise ContextLengthExceeded(
            f"the request may reach {context.max_length} tokens; this worker takes {identity.max_context_length}",
            metadata={"limit": str(identity.max_context_length)},
        )


def require_newer(context: RequestContext, *, known_epoch: int) -> None:
    """Raise RequestNotFound or DuplicateRequest unless a context replaces the one that is here."""
    if context.epoch < known_epoch:
        raise RequestNotFound(
            f"request {context.request_id!r} is in epoch {known_epoch}, not {context.epoch}"
        )
    if context.epoch == known_epoch:
        raise DuplicateRequest(f"request {context.request_id!r} is computed here already")


def require_continuation(context: RequestContext, state: FinishedState) -> None:
    """Raise InvalidRequest unless a context begins with the tokens of a finished state."""
    num_tokens = len(state.tokens)
    if tuple(context.tokens[:num_tokens]) != state.tokens:
        raise InvalidRequest(
            f"the context of {context.length} tokens does not begin with the {num_tokens} tokens of the lease"
        )


def prompt_request(context: RequestContext, memory: RequestMemory, *, max_length: int) -> Request:
    """A request that the engine takes to its first token."""
    return Request(
        request_id=context.request_id,
        epoch=context.epoch,
        role=Role.UNTIL_FIRST_TOKEN,
        tokens=context.tokens,
        max_length=max_length,
        sampling=context.sampling,
        slot=memory.slot,
        block_table=memory.block_table,
        group=memory.group,
    )
