"""Child processes that run one service each. Knows how they start, report, die and are ended; not what they serve.

A child reports its start over a pipe of its own. Its standard input is a pipe that this process never writes to: when
this process is gone, however it went, the child reads the end and stops, so no child is ever left behind.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from typing import BinaryIO

from services.cli.events import Failed, Ready, Report, from_line
from services.cli.failures import EXIT_CONFIG, EXIT_OTHER, Failure, death_of

MAX_REPORT_BYTES = 1 << 20


class Child:
    """One service in a process of its own, from `start` until it was waited for."""

    def __init__(self, name: str, process: Process, reports: BinaryIO, report: Report) -> None:
        self.name = name
        self._process = process
        self._report = report
        self._failed: Failed | None = None
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The address that it serves at; never set when it dies before."""
        self._reports = asyncio.create_task(self._read_reports(reports))

    @classmethod
    async def start(
        cls, name: str, arguments: Sequence[str], environment: dict[str, str], report: Report
    ) -> Child:
        """Start `dspark` with `arguments`; `report` is given its events and must not block."""
        reading, writing = os.pipe()
        reports = os.fdopen(reading, "rb")
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "services.cli", *arguments, "--status-fd", str(writing)),
                stdin=PIPE,
                pass_fds=(writing,),
                env=environment,
                # Ctrl-C at the terminal is for the parent, which stops its children in order. Not a session of its own:
                # Linux shares processors by session, so that one worker's engine would go before another's event loop.
                process_group=0,
            )
        except OSError:
            reports.close()
            raise
        finally:
            os.close(writing)
        return cls(name, process, reports, report)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def death(self) -> Failure:
        """Wait until the process is gone; what it last said of itself is the cause, else how it ended."""
        exit_status = await self._process.wait()
        await self._reports
        who = f"{self.name} (process {self.pid})"
        if self._failed is not None:
            return Failure(f"{who} failed: {self._failed.cause}", exit_code=self._failed.exit_code)
        code = exit_status if exit_status >= EXIT_CONFIG else EXIT_OTHER
        return Failure(f"{who} {death_of(exit_status)}", exit_code=code)

    async def stop(self, grace_s: float) -> None:
        """Ask the process to finish its requests, end it when it has not after `grace_s`, and wait for it."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), grace_s)
            except TimeoutError:
                self.kill()
        await self._process.wait()
        await self._reports

    def kill(self) -> None:
        """End the process at once."""
        if self._process.returncode is None:
            self._process.kill()

    async def _read_reports(self, reports: BinaryIO) -> None:
        reader = asyncio.StreamReader(limit=MAX_REPORT_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), reports
        )
        while line := await reader.readline():
            event = from_line(line)
            if isinstance(event, Failed):
                self._failed = event
            if isinstance(event, Ready) and not self.ready.done():
                self.ready.set_result(event.address)
            self._report(event)
        transport.close()
