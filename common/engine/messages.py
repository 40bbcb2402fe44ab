"""What the first rank tells the others before a step, and what they answer. Plain JSON: nothing is unpickled.

Requests are named by their group's own pages and slots here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from common.engine.outputs import RequestOutput
from common.engine.request import Draft, Request, Role
from common.engine.runner import StepRows
from common.types import Proposal, RequestId, SamplingParams, TokenLogprob, Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One request's part of a step."""

    request_id: RequestId
    num_tokens: int
    num_draft: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMessage:
    """Everything that happened since the last step, and the step."""

    changes: tuple[Request | RequestId, ...] = ()
    """Requests that came, and names of those that went, in order."""
    rows: StepRows = field(default_factory=lambda: StepRows(target=(), drafts=()))
    steps: tuple[tuple[PlannedRun, ...], ...] = ()
    """For each data parallel group; empty when nothing runs."""
    is_last: bool = False

    def to_bytes(self) -> bytes:
        return _pack(
            {
                "changes": [
                    _request_to_json(change) if isinstance(change, Request) else change
                    for change in self.changes
                ],
                "target": self.rows.target,
                "drafts": self.rows.drafts,
                "steps": [
                    [(run.request_id, run.num_tokens, run.num_draft) for run in step]
                    for step in self.steps
                ],
                "is_last": self.is_last,
            }
        )

    @classmethod
    def from_bytes(cls, payload: bytes) -> StepMessage:
        value = json.loads(payload)
        return cls(
            changes=tuple(
                RequestId(change) if isinstance(change, str) else _request_from_json(change)
                for change in value["changes"]
            ),
            rows=StepRows(target=tuple(value["target"]), drafts=tuple(value["drafts"])),
            steps=tuple(
                tuple(
                    PlannedRun(
                        request_id=RequestId(name), num_tokens=num_tokens, num_draft=num_draft
                    )
                    for name, num_tokens, num_draft in step
                )
                for step in value["steps"]
            ),
            is_last=value["is_last"],
        )


def outputs_to_bytes(outputs: Sequence[RequestOutput | None]) -> bytes:
    """Distributions of drafts stay where they are: only the ranks that drew from them need them."""
    return _pack([None if output is None else asdict(_bare(output)) for output in outputs])


def outputs_from_bytes(payload: bytes) -> list[RequestOutput | None]:
    return [None if value is None else _output_from_json(value) for value in json.loads(payload)]


def _pack(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _bare(output: RequestOutput) -> RequestOutput:
    draft = None if output.draft is None else Draft(proposal=output.draft.proposal)
    return RequestOutput(
        token_ids=output.token_ids,
        num_accepted=output.num_accepted,
        logprobs=output.logprobs,
        draft=draft,
    )


def _output_from_json(value: dict[str, Any]) -> RequestOutput:
    return RequestOutput(
        token_ids=tuple(value["token_ids"]),
        num_accepted=value["num_accepted"],
        logprobs=tuple(
            TokenLogprob(
                token_id=each["token_id"],
                logprob=each["logprob"],
                top=tuple((token_id, logprob) for token_id, logprob in each["top"]),
            )
            for each in value["logprobs"]
        ),
        draft=_draft_from_json(value["draft"] and value["draft"]["proposal"]),
    )


def _request_to_json(request: Request) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "epoch": request.epoch,
        "role": request.role.value,
        "tokens": request.tokens,
        "num_computed": request.num_computed,
        "max_length": request.max_length,
        "sampling": asdict(request.sampling)
        | {"verification": request.sampling.verification.value},
        "slot": request.slot,
        "block_table": request.block_table,
        "group": request.group,
        "draft": asdict(request.draft.proposal) if request.draft else None,
        "drafter_valid_from": request.drafter_valid_from,
    }


def _request_from_json(value: dict[str, Any]) -> Request:
    sampling = value["sampling"]
    fields = value | {
        "request_id": RequestId(value["request_id"]),
        "role": Role(value["role"]),
        "sampling": SamplingParams(
            **sampling | {"verification": Verification(sampling["verification"])}
        ),
        "draft": _draft_from_json(value["draft"]),
    }
    return Request(**fields)


def _draft_from_json(value: dict[str, Any] | None) -> Draft | None:
    if value is None:
        return None
    return Draft(
        proposal=Proposal(
            token_ids=tuple(value["token_ids"]), confidences=tuple(value["confidences"])
        )
    )
