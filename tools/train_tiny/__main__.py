"""Command line of the training: every stage alone, or all in order."""

import argparse
import logging
import os
import sys
import tempfile
from pathlib import Path

import torch

from tools.train_tiny.config import SHIPPED, TrainConfig

ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "8000000000",
    "MALLOC_TRIM_THRESHOLD_": "16000000000",
    "MALLOC_TOP_PAD_": "268435456",
    "THP_MEM_ALLOC_ENABLE": "1",
    "OMP_WAIT_POLICY": "passive",
}
"""Keeps freed memory in the process; returning it to the system each step costs a third of it."""
STAGES = ("data", "target", "rows", "drafter", "calibrate", "evaluate")
EXTRA_STAGES = ("random", "publish")
"""Checkpoints of lesser quality for tests: untrained, or as far as the target has come."""


def main() -> None:
    arguments = parse()
    if os.environ.get("MALLOC_TOP_PAD_") != ALLOCATOR["MALLOC_TOP_PAD_"]:
        command = [sys.executable, "-m", "tools.train_tiny", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | ALLOCATOR)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(arguments.threads)
    run = TrainConfig(
        work=arguments.work,
        out=arguments.out,
        target_minutes=arguments.minutes * 0.65,
        drafter_minutes=arguments.minutes * 0.30,
        num_on_policy_rows=arguments.rows,
        seed=arguments.seed,
    )
    run.work.mkdir(parents=True, exist_ok=True)
    for stage in STAGES if arguments.stage == "all" else (arguments.stage,):
        run_stage(stage, run)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.train_tiny", description=__doc__)
    parser.add_argument("stage", choices=("all", *STAGES, *EXTRA_STAGES))
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    default_work = Path(tempfile.gettempdir()) / "train_tiny"
    parser.add_argument("--work", type=Path, default=default_work, help="intermediate files")
    parser.add_argument("--minutes", type=float, default=85, help="wall time of all training")
    parser.add_argument("--rows", type=int, default=960, help="rows that the target writes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def run_stage(stage: str, run: TrainConfig) -> None:
    """Imports are local: a stage compiles and loads only what it needs."""
    if stage == "data":
        from tools.train_tiny import dataset

        vocab_size = SHIPPED["vocab_size"]
        assert isinstance(vocab_size, int)
        learned = dataset.build(run.work / "data", vocab_size, run.seed)
        run.out.mkdir(parents=True, exist_ok=True)
        learned.save(str(run.out / "tokenizer.json"))
    elif stage == "random":
        from tools.train_tiny.train_target import random_checkpoint

        random_checkpoint(run.out, run.seed)
    elif stage == "target":
        from tools.train_tiny.train_target import TargetTrainer

        TargetTrainer(run).train()
        run_stage("publish", run)
    elif stage == "publish":
        from tools.train_tiny.train_target import publish

        logging.info("wrote %d bytes", publish(run))
    elif stage == "rows":
        from tools.train_tiny import on_policy

        on_policy.prepare(run)
    elif stage == "drafter":
        from tools.train_tiny import train_drafter

        train_drafter.train(run)
    elif stage == "calibrate":
        from tools.train_tiny.calibrate import calibrate

        calibrate(run)
    elif stage == "evaluate":
        from tools.train_tiny.evaluate import evaluate

        evaluate(run)


if __name__ == "__main__":
    main()
