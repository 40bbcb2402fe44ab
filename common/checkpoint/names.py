"""Stored names and official ones. Knows headers; reads nothing and needs no torch."""

from __future__ import annotations

from common.checkpoint.headers import Headers
from common.checkpoint.storage import companions
from common.checkpoint.tensors import CONFIDENCE_HEAD, CONFIDENCE_HEAD_ALIAS


def official_names(headers: Headers) -> dict[str, str]:
    """Official name to the stored one; scales are left out."""
    scales = {
        companion for name in headers if name.endswith("weight") for companion in companions(name)
    }
    names = {}
    for name in headers:
        if name in scales:
            continue
        official = name
        if name.endswith(CONFIDENCE_HEAD_ALIAS):
            official = name.removesuffix(CONFIDENCE_HEAD_ALIAS) + CONFIDENCE_HEAD
        names[official] = name
    return names
