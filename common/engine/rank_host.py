"""A process that imports everything once and forks ranks: `python -m common.engine.rank_host`, ordered on standard input.

Tells on standard output, one JSON line, of the first rank that ends before its time, and kills the others then. When
its standard input is closed, whoever started it is gone or done with it, and it ends with all ranks.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from common.engine.mesh_start import run_follower
from common.engine.settings import EngineSettings
from common.parallel.shard import Shard
from common.telemetry.logging import configure_logging

logger = logging.getLogger(__name__)

OK, FAILED = 0, 1


def main() -> NoReturn:
    """Fork, then watch until all ranks have ended."""
    order = json.loads(sys.stdin.readline())
    settings = EngineSettings.from_json(order["settings"])
    ranks: dict[int, int] = {}
    for rank in order["ranks"]:
        pid = os.fork()
        if pid == 0:
            _be_rank(settings, order, rank)
        ranks[pid] = rank
    threading.Thread(target=_follow_parent, args=(tuple(ranks),), daemon=True).start()
    _watch(settings, ranks)


def _be_rank(settings: EngineSettings, order: dict[str, Any], rank: int) -> NoReturn:
    """A forked child from here to its end; nothing of the host's own may run in it."""
    code = FAILED
    try:
        configure_logging(level=order["log_level"], format="auto", role=f"rank {rank}")
        torch.set_num_threads(order["num_threads"])
        num_local = settings.mesh.num_ranks // settings.rendezvous.num_nodes
        run_follower(settings, rank=rank, local_rank=rank % num_local, address=order["address"])
        code = OK
    except Exception as error:
        # The others fail a moment later because this one is gone; only the first line counts.
        first_line = str(error).partition("\n")[0]
        _tell(f"{Shard(mesh=settings.mesh, rank=rank)} failed: {first_line}")
        logger.debug("rank %d failed", rank, exc_info=True)
    finally:
        os._exit(code)


def _watch(settings: EngineSettings, ranks: dict[int, int]) -> NoReturn:
    left = dict(ranks)
    code = OK
    while left:
        pid, status = os.wait()
        rank = left.pop(pid)
        if status and code == OK:
            code = FAILED
            _tell(f"{Shard(mesh=settings.mesh, rank=rank)} {_how_it_ended(status)}")
            _kill(left)
    os._exit(code)


def _how_it_ended(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"ended with exit code {os.waitstatus_to_exitcode(status)}"
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


def _tell(reason: str) -> None:
    """One write, so that lines of several processes do not mix."""
    os.write(sys.stdout.fileno(), (json.dumps({"reason": reason}) + "\n").encode())


if __name__ == "__main__":
    main()
