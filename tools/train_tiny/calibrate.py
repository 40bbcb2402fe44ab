"""Confidence temperatures: sequential temperature scaling on prompts kept for nothing else."""

import json
import logging
from pathlib import Path

import numpy as np

from tools.train_tiny import export, metrics, prompts, tokenizer
from tools.train_tiny.config import SHIPPED, TinyConfig, TrainConfig
from tools.train_tiny.speculate import Round, speculate

log = logging.getLogger(__name__)
GRID = np.logspace(-1, 1, 41)
FILE_NAME = "confidence_temperatures.json"


def fit(rounds: list[Round], block: int) -> list[float]:
    """One temperature per position, left to right, each minimising the error of the prefix."""
    temperatures = np.ones(block)
    happened, judged = metrics.outcomes(rounds, block)
    for k in range(block):
        rows = judged[:, k]
        errors = []
        for temperature in GRID:
            temperatures[k] = temperature
            predicted = metrics.survival(rounds, temperatures)[rows, k]
            errors.append(metrics.calibration_error(predicted, happened[rows, k]))
        temperatures[k] = GRID[int(np.argmin(errors))]
    return [round(float(t), 4) for t in temperatures]


def collect(run: TrainConfig, part: str, num_chats: int, num_code: int) -> list[Round]:
    """Rounds of one part of the held-out prompts, both domains at both temperatures."""
    config, weights = TinyConfig.from_json(SHIPPED), export.read(run.out)
    learned = tokenizer.load(run.out)
    turns = prompts.chat_turns(part, num_chats, run.seed)
    sets = [[tokenizer.encode_prompt(learned, turn.question) for turn in turns]]
    for domain in ("library", "tests", "templates"):
        sets.append(
            prompts.code_prompts(run.work / "data", learned, domain, part, num_code, run.seed)
        )
    rounds: list[Round] = []
    for temperature in (0.0, 1.0):
        for chosen in filter(None, sets):
            rounds += speculate(
                weights, config, chosen, temperature=temperature, max_new=96, seed=run.seed
            ).rounds
    return rounds


def calibrate(run: TrainConfig) -> Path:
    """Fit on the calibration part and write the temperatures next to the checkpoint."""
    rounds = collect(run, "calibrate", num_chats=64, num_code=12)
    block = TinyConfig.from_json(SHIPPED).dspark_block_size
    temperatures = fit(rounds, block)
    log.info("%d rounds, temperatures %s", len(rounds), temperatures)
    path = run.out / FILE_NAME
    path.write_text(json.dumps({"temperatures": temperatures}) + "\n")
    return path
