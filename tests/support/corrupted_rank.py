"""A host of ranks, one of which loses a bit of its cache: stands in for `common.engine.rank_host`. Knows where and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import torch

from common.engine import rank_host
from common.engine.clock import PhaseClock
from common.engine.mesh_rank import MeshRank
from common.engine.outputs import RequestOutput
from common.engine.runner import StepRows
from common.engine.scheduler import ScheduledRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Bit:
    """Where one is lost, in whose memory, and after how many steps."""

    rank: int
    region: str
    layer: int
    block: int
    row: int
    num_steps: int


def host_that_corrupts(bit: Bit, python: str, script: Path) -> str:
    """Write a program that ranks are started with in place of `python`, and give its path."""
    lines = (
        f"#!{python}",
        "from tests.support.corrupted_rank import Bit, main",
        f"main(Bit(**{asdict(bit)!r}))",
    )
    script.write_text("\n".join(lines), encoding="utf-8")
    script.chmod(0o700)
    return str(script)


def main(bit: Bit) -> NoReturn:
    """Be the host, whose ranks are forked with the fault in them."""
    run, num_steps = MeshRank.run, 0

    def run_and_lose(
        rank: MeshRank, step: Sequence[ScheduledRequest], rows: StepRows, clock: PhaseClock
    ) -> list[RequestOutput | None]:
        nonlocal num_steps
        if rank.comm.shard.rank == bit.rank and num_steps == bit.num_steps:
            buffer = rank.runner.pool.buffers[bit.region]
            buffer.tensor[bit.layer, bit.block, bit.row].view(torch.uint8)[0] ^= 1
        num_steps += 1
        return run(rank, step, rows, clock)

    MeshRank.run = run_and_lose  # type: ignore[method-assign, assignment]
    rank_host.main()
