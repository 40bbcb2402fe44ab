"""The engine by itself, without services: where a step's time goes. Knows an engine's phases; opens no port."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.prompts import load_prompts
from benchmarks.suite import tokens_of
from common.engine.build import LoadedEngine, build_engine
from common.engine.memory import Memory
from common.engine.request import Request, Role
from common.engine.settings import EngineSettings
from common.tokenizer import Tokenizer
from common.types import RequestId, SamplingParams

NUM_TOKENS = 96
GREEDY = SamplingParams(temperature=0.0)


def run_engine(checkpoint_dir: Path, say: Callable[[str], None]) -> dict[str, float]:
    """Tokens per second and milliseconds by phase, for one thread, after the prompts were computed."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_folder(checkpoint_dir)
    prompts = [tokens_of(tokenizer, p) for p in load_prompts() if p.is_unseen]
    figures: dict[str, float] = {}
    for speculate in (False, True):
        loaded = build_engine(EngineSettings(checkpoint_dir=checkpoint_dir, speculate=speculate))
        _run(loaded, prompts[:4], 16)
        for concurrency in (1, 4, 16):
            step = len(prompts) // concurrency
            name = f"engine.c{concurrency}.{'dspark' if speculate else 'target'}"
            measured = _run(loaded, prompts[::step][:concurrency], NUM_TOKENS)
            figures |= {f"{name}.{key}": value for key, value in measured.items()}
            say(f"{name}: " + ", ".join(f"{k} {v:.2f}" for k, v in measured.items()))
    return figures


def _run(loaded: LoadedEngine, prompts: list[list[int]], num_tokens: int) -> dict[str, float]:
    engine = loaded.engine
    memory = Memory(num_pages=loaded.num_pages, num_slots=loaded.num_slots)
    requests = [_request(memory, i, prompt, num_tokens) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    while any(request.round == 0 for request in requests):
        engine.step()
    begin_tokens = sum(len(request.tokens) for request in requests)
    phases: Counter[str] = Counter()
    num_steps = num_rounds = 0
    begin = time.perf_counter()
    while True:
        for request in requests:
            engine.commit(request.request_id, request.round)
        if not engine.has_work:
            break
        step = engine.step()
        phases.update(step.phase_seconds)
        num_rounds += len(step.rounds)
        num_steps += 1
    seconds = time.perf_counter() - begin
    for request in requests:
        engine.remove(request.request_id)
    num_generated = sum(len(request.tokens) for request in requests) - begin_tokens
    return {
        "tokens_per_s": num_generated / seconds,
        "accepted_length": num_generated / num_rounds,
        **{f"{phase}_ms": total / num_steps * 1000 for phase, total in phases.items()},
    }


def _request(memory: Memory, index: int, prompt: list[int], num_tokens: int) -> Request:
    room = memory.reserve(len(prompt) + num_tokens)
    return Request(
        request_id=RequestId(str(index)),
        epoch=0,
        role=Role.GENERATE,
        tokens=list(prompt),
        max_length=len(prompt) + num_tokens,
        sampling=GREEDY,
        slot=room.slot,
        block_table=room.take_all(),
    )
