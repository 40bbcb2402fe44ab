"""From what a router and a prefill worker said to a request for the engine. Knows both; holds no state."""

from __future__ import annotations

from common.engine.request import Draft, Request, Role
from common.errors import ContextLengthExceeded, ContractMismatch, InvalidRequest
from common.rpc.worker_info import WorkerIdentity
from common.transfer.handoff import HandoffResult
from common.types import Proposal, RequestContext
from services.decode.reservations import Reservation


def require_servable(identity: WorkerIdentity, *, max_length: int, model_fingerprint: str) -> None:
    """Raise ContractMismatch or ContextLengthExceeded when this worker could never run such a request."""
    if model_fingerprint and model_fingerprint != identity.model_fingerprint:
        raise ContractMismatch(
            f"model_fingerprint is {identity.model_fingerprint} at decode but {model_fingerprint} at the router",
            metadata={"field": "model_fingerprint"},
        )
    if max_length > identity.max_context_length:
        raise ContextLengthExceeded(
            f"the request may reach {max_length} tokens; this worker takes {identity.max_context_length}",
            metadata={"limit": str(identity.max_context_length)},
        )


def require_agreement(context: RequestContext, reservation: Reservation) -> None:
    """Raise InvalidRequest when a context is not the one that room was reserved for."""
    if context.length != reservation.num_tokens:
        raise InvalidRequest(
            f"the context has {context.length} tokens; {reservation.num_tokens} were reserved for"
        )
    if context.max_length > reservation.max_length:
        raise InvalidRequest(
            f"the context may reach {context.max_length} tokens; {reservation.max_length} were reserved for"
        )


def prompt_request(context: RequestContext, reservation: Reservation) -> Request:
    """A request whose prompt is computed here."""
    return Request(
        request_id=context.request_id,
        epoch=context.epoch,
        role=Role.GENERATE,
        tokens=context.tokens,
        max_length=context.max_length,
        sampling=context.sampling,
        slot=reservation.memory.slot,
        block_table=reservation.memory.take_all(),
        group=reservation.memory.group,
    )


def adopted_request(
    context: RequestContext,
    reservation: Reservation,
    result: HandoffResult,
    *,
    num_computed: int,
    draft_length: int,
) -> Request:
    """A request that goes on from handed-over state of its first `num_computed` positions; `draft_length` is our own.

    State from a lease is older than the context: what was committed since is computed here, as any chunk of tokens.
    """
    tokens = context.tokens
    if num_computed == len(tokens):
        tokens.append(result.first_token_id)
    # The sender may draft more than we verify: our rings have room for our own draft length.
    proposal = Proposal(
        token_ids=result.proposal.token_ids[:draft_length],
        confidences=result.proposal.confidences[:draft_length],
    )
    is_next = tokens[num_computed:] == [result.first_token_id]
    is_drafted = is_next and result.has_drafter_state and len(proposal.token_ids) > 0
    return Request(
        request_id=context.request_id,
        epoch=context.epoch,
        role=Role.GENERATE,
        tokens=tokens,
        num_computed=num_computed,
        max_length=context.max_length,
        sampling=context.sampling,
        slot=reservation.memory.slot,
        block_table=reservation.memory.block_table,
        group=reservation.memory.group,
        draft=Draft(proposal=proposal) if is_drafted else None,
        drafter_valid_from=0 if result.has_drafter_state else num_computed,
    )
