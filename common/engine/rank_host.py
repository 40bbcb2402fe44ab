"""A process that imports everything once and forks ranks: `python -m common.engine.rank_host`, ordered on standard input.

Tells on standard output, one JSON line, of the first rank that ends before its time, and kills the others then; where a
mesh has several nodes, the first of them is told, too. When its standard input is closed, whoever started it is gone or
done with it, and it ends with all ranks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from common.engine.mesh_start import run_follower
from common.engine.rank_losses import ELSEWHERE, failed_with_another, leave_cause_at
from common.engine.settings import EngineSettings
from common.parallel.shard import Shard
from common.telemetry.logging import configure_logging

logger = logging.getLogger(__name__)

OK, FAILED = 0, 1

SETTLE_S = 1.0
"""How long the end of the rank that pulled others along may be seen after theirs."""
PIPE_BYTES = 4096
"""What a pipe takes in one piece."""
REASON_LENGTH = 1000
"""Characters, so that a line fits such a piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Of a rank, before its time."""

    rank: int
    how: str
    is_cause: bool = True
    """False where it has only lost another one."""


def main() -> NoReturn:
    """Fork, then watch until all ranks have ended."""
    order = json.loads(sys.stdin.readline())
    settings = EngineSettings.from_json(order["settings"])
    ranks: dict[int, int] = {}
    reasons, to_reasons = os.pipe()
    for rank in order["ranks"]:
        pid = os.fork()
        if pid == 0:
            _be_rank(settings, order, rank, to_reasons)
        ranks[pid] = rank
    threading.Thread(target=_follow_parent, args=(tuple(ranks),), daemon=True).start()
    _watch(settings, order["address"], ranks, reasons)


def _be_rank(settings: EngineSettings, order: dict[str, Any], rank: int, reasons: int) -> NoReturn:
    """A forked child from here to its end; nothing of the host's own may run in it."""
    code = FAILED
    try:
        configure_logging(level=order["log_level"], format="auto", role=f"rank {rank}")
        num_local = settings.mesh.num_ranks // settings.rendezvous.num_nodes
        run_follower(settings, rank=rank, local_rank=rank % num_local, address=order["address"])
        code = OK
    except Exception as error:
        # One write, so that lines of several processes do not mix.
        line = json.dumps(asdict(_end_by(error, rank)), ensure_ascii=False) + "\n"
        os.write(reasons, line.encode())
        logger.debug("rank %d failed", rank, exc_info=True)
    finally:
        os._exit(code)


def _end_by(error: Exception, rank: int) -> End:
    reason = str(error).partition("\n")[0][:REASON_LENGTH]
    if failed_with_another(error):
        return End(rank=rank, how=f"lost another rank: {reason}", is_cause=False)
    return End(rank=rank, how=f"failed: {reason}")


def _watch(settings: EngineSettings, address: str, ranks: dict[int, int], reasons: int) -> NoReturn:
    """Wait for all ranks; when one ends before its time, find out which was first, tell, and end the others."""
    left = dict(ranks)
    while left:
        pid, status = os.wait()
        rank = left.pop(pid)
        if status:
            ended = {rank: status}
            if not os.WIFSIGNALED(status):
                ended |= _settle(left)
            _tell(settings, address, first_to_end(ended, reasons))
            _kill(left)
            for _ in left:
                os.wait()
            os._exit(FAILED)
    os._exit(OK)


def _settle(left: dict[int, int]) -> dict[int, int]:
    """Ranks that end within a moment of the first, with their status: peers of one that was killed may be seen before it."""
    ended: dict[int, int] = {}
    deadline = time.monotonic() + SETTLE_S
    while left and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ended[left.pop(pid)] = status
        else:
            time.sleep(SETTLE_S / 50)
    return ended


def first_to_end(ended: dict[int, int], reasons: int) -> End:
    """The rank that pulled the others along, and how it ended.

    One that was killed comes before those that failed. Of these the first to end is the first that said why: several that
    have ended are reaped in any order.
    """
    for rank, status in ended.items():
        if os.WIFSIGNALED(status):
            return End(rank=rank, how=_how_it_was_killed(status))
    os.set_blocking(reasons, False)
    said: list[End] = []
    with contextlib.suppress(BlockingIOError):
        lines = os.read(reasons, 16 * PIPE_BYTES).splitlines()
        said = [End(**json.loads(line)) for line in lines]
    if said:
        return next((end for end in said if end.is_cause), said[0])
    rank, status = next(iter(ended.items()))
    return End(rank=rank, how=f"ended with exit code {os.waitstatus_to_exitcode(status)}")


def _how_it_was_killed(status: int) -> str:
    number = os.WTERMSIG(status)
    hint = {
        signal.SIGKILL: "; the system does this when memory runs out",
        signal.SIGILL: "; this processor lacks an instruction that a library was built for",
    }.get(signal.Signals(number), "")
    return f"was killed by {signal.Signals(number).name}{hint}"


def _follow_parent(pids: Iterable[int]) -> None:
    """End with whoever started this: it holds the other end of standard input and writes nothing more to it."""
    sys.stdin.read()
    _kill(pids)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _tell(settings: EngineSettings, address: str, end: End) -> None:
    is_one_of_many = settings.rendezvous.num_nodes > 1
    who = Shard(mesh=settings.mesh, rank=end.rank)
    reason = ELSEWHERE if is_one_of_many and not end.is_cause else f"{who} {end.how}"
    # Whoever started this may be what the ranks have lost.
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps({"reason": reason}), flush=True)
    if is_one_of_many and end.is_cause:
        leave_cause_at(address, reason)


if __name__ == "__main__":
    main()
