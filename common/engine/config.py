"""How an engine is sized."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes and limits of one engine."""

    draft_length: int
    """Drafts per proposal; 0 turns speculation off."""
    max_step_rows: int
    """Rows of one target forward over all requests."""
    max_context_length: int
    """Longest prompt plus completion."""
    max_uncommitted_rounds: int = 2
    """Rounds that a request may run ahead of its router's commits."""

    def __post_init__(self) -> None:
        if self.draft_length < 0:
            raise ConfigError(f"draft_length is {self.draft_length}; give 0 or more")
        if self.max_step_rows < self.draft_length + 1:
            raise ConfigError(
                f"max_step_rows is {self.max_step_rows}; one proposal needs draft_length + 1 = "
                f"{self.draft_length + 1} rows"
            )
        if self.max_uncommitted_rounds < 1:
            raise ConfigError("max_uncommitted_rounds must be at least 1")
