"""The decode worker's engine loop. Knows the engine and the crossing; never sees the wire."""

from __future__ import annotations

from common.engine.crossing import Crossing, Steps
from common.engine.request import StepReport


def run_decode_loop(engine: Steps, crossing: Crossing[StepReport]) -> None:
    """Step while there is work, take commands between steps, sleep when there is neither."""
    while True:
        commands = crossing.take_commands(wait=not engine.has_work, idle=engine.keep_alive)
        if commands is None:
            return
        for command in commands:
            command(engine)
        if engine.has_work:
            crossing.emit(engine.step())
