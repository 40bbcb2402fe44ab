"""What is counted about speculation. Knows names and how rounds are grouped; never sees a request."""

from __future__ import annotations

from common.telemetry.metrics.families import Families

ROUNDS_SINCE_HANDOFF = ("1", "2", "3", "4-7", "8+")
SKIP_REASONS = ("no_proposal", "not_scheduled")
ACCEPTED_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64)


def rounds_since_handoff(round_number: int) -> str:
    """The group of a round; the first one after a hand-off is 1."""
    if round_number <= 3:
        return str(round_number)
    return "4-7" if round_number <= 7 else "8+"


class SpecDecodeMetrics:
    """Drafts and what became of them, on one worker. Positions count from 1; they are known once the engine is."""

    def __init__(self, families: Families) -> None:
        self.drafts = families.counter(
            "dspark_spec_drafts_total", "Rounds in which at least one draft was verified."
        )
        self.draft_tokens = families.counter(
            "dspark_spec_draft_tokens_total", "Drafted tokens that were verified."
        )
        self.accepted_tokens = families.counter(
            "dspark_spec_accepted_tokens_total", "Drafted tokens that were accepted."
        )
        self.draft_tokens_per_position = families.counters(
            "dspark_spec_draft_tokens_per_position_total",
            "Drafted tokens that were verified, by their position in the draft.",
            position=None,
        )
        self.accepted_tokens_per_position = families.counters(
            "dspark_spec_accepted_tokens_per_position_total",
            "Drafted tokens that were accepted, by their position in the draft.",
            position=None,
        )
        self.predicted_tokens_per_position = families.counters(
            "dspark_spec_predicted_tokens_per_position_total",
            "Accepted tokens that the drafter's calibrated confidence promised, by position: the sum of the "
            "probabilities that a draft and all before it are accepted. Equal to the accepted ones when calibrated.",
            position=None,
        )
        self.accepted_length = families.histograms(
            "dspark_spec_accepted_length",
            "Tokens that a round brought: accepted drafts and the target's own one. By rounds since the hand-off, for "
            "lost drafter state shows in the first of them only.",
            ACCEPTED_LENGTHS,
            rounds_since_handoff=ROUNDS_SINCE_HANDOFF,
        )
        self.verify_window = families.histogram(
            "dspark_spec_verify_window_tokens",
            "Rows that a round verified: its newest token and the drafts that the schedule left it.",
            ACCEPTED_LENGTHS,
        )
        self.draft_skipped = families.counters(
            "dspark_spec_draft_skipped_total",
            "Rounds without drafts: none was proposed, or the schedule or the context had no room for any.",
            reason=SKIP_REASONS,
        )
        self.cut_tokens = families.counter(
            "dspark_spec_cut_tokens_total",
            "Drafted tokens that the schedule did not verify.",
        )
        self.drafter_fallbacks = families.counter(
            "dspark_spec_drafter_fallbacks_total",
            "Requests that began without the prompt's drafter state, and draft only after their own first tokens.",
        )

    def know_draft_length(self, draft_length: int) -> None:
        """Begin to count every position at zero."""
        for position in range(1, draft_length + 1):
            for counters in (
                self.draft_tokens_per_position,
                self.accepted_tokens_per_position,
                self.predicted_tokens_per_position,
            ):
                counters.labels(position=str(position))
