"""What goes with every call of either client. Knows metadata and ids; sends nothing."""

from __future__ import annotations

import uuid

REQUEST_ID_KEY = "x-request-id"
Metadata = tuple[tuple[str, str], ...]


def new_request_id() -> str:
    return uuid.uuid4().hex


def call_metadata(request_id: str, api_key: str | None, traceparent: str | None = None) -> Metadata:
    """The request's id for logs of calls whose messages carry none; the key and the caller's trace where there are any."""
    metadata: Metadata = ((REQUEST_ID_KEY, request_id),)
    if api_key is not None:
        metadata += (("authorization", f"Bearer {api_key}"),)
    if traceparent is not None:
        metadata += (("traceparent", traceparent),)
    return metadata
