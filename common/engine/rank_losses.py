"""Why a rank was lost: who leaves it where, and who finds it there. Knows errors and the ranks' store; no processes.

The cause is what a rank has failed with by itself, which it leaves in the store before its connections close, or that it
was killed, which its node's host leaves there. Whatever else fails in a collective fails because of that and leaves nothing.
"""

from __future__ import annotations

import contextlib
import socket
import time
import traceback
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from common.engine.rank_processes import RankProcesses

FAILED = "failed"
"""Where the store has the first cause, in one line."""
ELSEWHERE = "a rank on another node is gone; its node's log says why"
NEWS_S = 5.0
"""How long a cause may take to come from another node, after a collective has failed here."""
CONNECT_S = 5.0
POLL_S = 0.02


class Losses:
    """What the first rank can find out. `processes` are its node's other ranks, which hear of one another by themselves."""

    def __init__(self, processes: RankProcesses, store: TCPStore, *, num_nodes: int) -> None:
        self._processes = processes
        self._store = store
        self._num_nodes = num_nodes

    def why_now(self) -> str | None:
        """The cause as far as it is known; None when no rank is known to be gone."""
        return self._cause() or self._processes.why_lost_now()

    def why(self, error: RuntimeError) -> str | None:
        """What has led to an error of the first rank's: waits a little for the news. None when no other rank has.

        Causes of all nodes are in the store; what this node's host has to say besides is who else has noticed.
        """
        if self._num_nodes == 1:
            return self._processes.why_lost()
        deadline = time.monotonic() + NEWS_S
        while (cause := self._cause()) is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        cause = cause or self._processes.why_lost_now()
        return ELSEWHERE if cause is None and failed_with_another(error) else cause

    def _cause(self) -> str | None:
        return self._store.get(FAILED).decode() if self._store.check([FAILED]) else None


def failed_with_another(error: BaseException) -> bool:
    """Whether a collective or a meeting has failed, which is the doing of a rank that is gone or does not come.

    Whoever does not find the store has a wrong address, as far as it knows, and nobody else to blame.
    """
    # Gloo raises nothing more special than RuntimeError, and its words are for people.
    modules = (frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__))
    return isinstance(error, dist.DistStoreError) or (
        isinstance(error, RuntimeError) and any(name.startswith(dist.__name__) for name in modules)
    )


def leave_cause(store: TCPStore, cause: str) -> None:
    """Tell the first rank, unless it was told of another one before or is gone itself."""
    with contextlib.suppress(RuntimeError):
        store.compare_set(FAILED, "", cause)


def leave_cause_at(address: str, cause: str) -> None:
    """The same from a process that has not met the ranks."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, RuntimeError):
        # Of a store that is gone torch's own client tells in two pages.
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        leave_cause(TCPStore(host, int(port), timeout=timedelta(seconds=CONNECT_S)), cause)
