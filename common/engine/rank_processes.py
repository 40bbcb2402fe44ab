"""The other ranks of this node as processes, seen from the first rank or from a node that has no service. Knows no torch.

One child is started, imports everything once and forks the ranks. It tells of the first rank that ends before its time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import common
from common.config import child_environment
from common.engine.settings import EngineSettings

logger = logging.getLogger(__name__)

NOTICE_S = 10.0
"""How long the news of a dead rank may take longer than the failure of a collective."""
END_S = 10.0
"""What ranks get to end by themselves."""


class RankProcesses:
    """Ranks that live until their first rank tells them to end, or until the pipe that this process holds is closed."""

    def __init__(
        self, settings: EngineSettings, ranks: Sequence[int], *, address: str, num_threads: int
    ) -> None:
        """`num_threads` is what libraries start with; ranks compute with as many as the first one says."""
        self._reason: str | None = None
        self._has_news = threading.Event()
        self._is_ending = False
        self._process: subprocess.Popen[str] | None = None
        if not ranks:
            return
        environment = child_environment(num_threads)
        environment["PYTHONPATH"] = str(Path(common.__file__).parent.parent)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "common.engine.rank_host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            # A terminal's interrupt is for the first rank, which lets requests finish and tells the others.
            start_new_session=True,
        )
        order = {
            "settings": settings.to_json(),
            "ranks": list(ranks),
            "address": address,
            "log_level": logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower(),
        }
        assert self._process.stdin is not None
        # One that has ended already is heard of as any other.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        threading.Thread(target=self._listen, name="ranks", daemon=True).start()

    def why_lost_now(self) -> str | None:
        """Why the first rank that was lost has ended; None when all live as far as is known."""
        return self._reason

    def why_lost(self) -> str | None:
        """The same after a collective has failed: waits a little for the news."""
        if self._process is not None:
            self._has_news.wait(NOTICE_S)
        return self._reason

    def wait_ended(self) -> None:
        """Wait until all ranks have ended, which they were told to; kill those that do not."""
        if self._process is None:
            return
        self._is_ending = True
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            logger.warning("ranks did not end within %s s and are killed", END_S)
            self.kill()

    def wait(self) -> int:
        """Wait until the ranks have ended, however long they live; the exit code."""
        return 0 if self._process is None else self._process.wait()

    def kill(self) -> None:
        """End all ranks now: their host does so when this end of its pipe is closed."""
        if self._process is not None and self._process.stdin is not None:
            self._is_ending = True
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                logger.warning("the host of ranks did not end within %s s and is killed", END_S)
                self._process.kill()

    def _listen(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            self._hear(json.loads(line)["reason"])
        if code := self._process.wait():
            self._hear(f"the process that starts this node's ranks ended with exit code {code}")
        self._has_news.set()

    def _hear(self, reason: str) -> None:
        """Only the first is news, and none is once the ranks are to end."""
        if self._reason is None and not self._is_ending:
            self._reason = reason
            # Whoever runs steps, or waits for the ranks, fails with it and says so.
            logger.debug("%s", reason)
            self._has_news.set()
