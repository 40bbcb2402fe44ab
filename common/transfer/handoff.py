"""The nouns of a hand-off: its key, its contract, what it negotiates and what ends it. Knows no message and no memory."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ContractMismatch
from common.kv_cache.layout import CacheLayout
from common.transfer.manifest import ManifestEntry
from common.types import Proposal, RequestId, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffKey:
    """Names one hand-off; a repeated message is recognised by it."""

    request_id: RequestId
    epoch: int
    reservation_id: str
    prefill_generation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheContract:
    """What two processes must agree on before rows move between them."""

    model_fingerprint: str
    layout: CacheLayout
    drafter_fingerprint: str = ""
    """Empty without a drafter."""

    def require_continuable(self, other: CacheContract, *, ours: str, theirs: str) -> str:
        """Why the drafter's rows have to stay behind, because drafters differ; empty when they travel like all others.

        Raises ContractMismatch that names the first field of the target's that differs and both values.
        """
        if self.model_fingerprint != other.model_fingerprint:
            raise ContractMismatch(
                f"model fingerprint is {self.model_fingerprint} at {ours} but {other.model_fingerprint} at {theirs}",
                metadata={"field": "model_fingerprint"},
            )
        self.layout.target.require_equal(other.layout.target, ours=ours, theirs=theirs)
        return self._drafter_difference(other, ours=ours, theirs=theirs)

    def _drafter_difference(self, other: CacheContract, *, ours: str, theirs: str) -> str:
        mine, others = self.layout.drafter, other.layout.drafter
        if not mine.regions and not others.regions:
            return ""
        if not mine.regions or not others.regions:
            return f"{theirs if mine.regions else ours} has no drafter"
        try:
            mine.require_equal(others, ours=ours, theirs=theirs)
        except ContractMismatch as difference:
            return difference.message
        if self.drafter_fingerprint != other.drafter_fingerprint:
            return (
                f"drafter fingerprint is {self.drafter_fingerprint} at {ours} but "
                f"{other.drafter_fingerprint} at {theirs}"
            )
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffOffer:
    """A sender's opening. The two have met before, so it says only what this request brings."""

    num_tokens: int
    """Positions that will be handed over."""
    decode_generation: str
    """The receiver's, as it was met."""
    transfer_engine: str
    """The engine that was chosen then."""
    sender_address: str = ""
    """Where the sender can be asked to stop; empty when nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTerms:
    """A receiver's answer: where to write."""

    page_ids: tuple[int, ...]
    """In position order."""
    slot: int
    generation: str
    """The receiver's; changes when it restarts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffResult:
    """What ends a hand-off: an account of the rows, and the state that is not rows."""

    manifest: tuple[ManifestEntry, ...]
    digests: tuple[bytes, ...]
    """Of every region's rows, in layout order."""
    first_token_id: int
    """At position `num_tokens`."""
    first_logprob: TokenLogprob | None
    proposal: Proposal
    """To be verified coupled."""
    has_drafter_state: bool
    """False when the drafter's rows did not travel; the receiver then rebuilds them."""
