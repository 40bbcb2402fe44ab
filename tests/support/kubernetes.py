"""What Kubernetes would say to a manifest, by the schemas of kubernetes-validate. Knows versions; asks no cluster."""

from __future__ import annotations

import functools
from typing import Any

import kubernetes_validate
from kubernetes_validate import utils

# The library reads half a megabyte of definitions for every manifest.
utils.schema_contents = functools.cache(utils.schema_contents)


def complaints(manifest: dict[str, Any], version: str) -> list[str]:
    """Fields that are unknown, misspelt or of the wrong type; empty when it is taken."""
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []
