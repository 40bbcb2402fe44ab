"""Whose names metrics can be shown under besides their own. Knows the choice only, so that settings load quickly."""

from __future__ import annotations

from typing import Literal

Compat = Literal["none", "vllm"]
