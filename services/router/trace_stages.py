"""The stages of a request one after the other, for its trace. Knows stages and a clock; not what happens in them.

`stage_clock` adds seconds up for metrics, the client's pauses between rounds apart; here each stage is one piece from
when to when.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from services.router.commits import Round
from services.router.events import Admitted, Event, FirstToken


class Stage(enum.Enum):
    """Parts of a request's life, in the order in which one that runs well passes them."""

    TOKENIZE = "tokenize"
    """Checked against the model and turned into token ids."""
    QUEUE = "queue"
    """Waits for its turn and for room."""
    RESERVE = "reserve"
    """A decode worker is asked for room."""
    PREFILL = "prefill"
    """From its place to its first token."""
    KV_TRANSFER = "kv_transfer"
    """From the first token, which the client has then, to decode's word that all state is there."""
    DECODE_WAIT = "decode_wait"
    """Waits for its first verified round."""
    DECODE = "decode"
    FINISH = "finish"
    """From the last token to the end: text that was held back, and workers let go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """A stage that is over, in seconds of the clock."""

    stage: Stage
    began: float
    ended: float


class TraceStages:
    """Every instant of one request, from `began` to `end`, belongs to exactly one stage, so they add up to the whole.

    A request that is placed again waits, reserves and goes on from there once more.
    """

    def __init__(self, clock: Callable[[], float], *, began: float) -> None:
        self._clock = clock
        self._stage = Stage.TOKENIZE
        self._began = began
        self.passed: list[Passed] = []
        """In order; complete after `end`."""

    def enter(self, stage: Stage) -> None:
        """The stage before is over; nothing happens when it is this one."""
        if stage is not self._stage:
            self._close()
            self._stage = stage

    def placed(self, *, is_from_lease: bool) -> None:
        """Workers have the request; with a lease there is nothing to compute before the hand-off."""
        self.enter(Stage.KV_TRANSFER if is_from_lease else Stage.PREFILL)

    def saw(self, event: Event, *, has_handoff: bool) -> None:
        """A worker reported. Without a hand-off the first round ends the prefill."""
        match event:
            case FirstToken() if self._stage is Stage.PREFILL:
                self.enter(Stage.KV_TRANSFER)
            case Admitted() if has_handoff and self._stage in (Stage.PREFILL, Stage.KV_TRANSFER):
                self.enter(Stage.KV_TRANSFER)
                self.enter(Stage.DECODE_WAIT)
            case Round():
                self.enter(Stage.DECODE)
            case _:
                pass

    def end(self) -> None:
        """The request is over."""
        self._close()

    def _close(self) -> None:
        now = self._clock()
        self.passed.append(Passed(stage=self._stage, began=self._began, ended=now))
        self._began = now
