"""An engine without a wire: what every service must agree with. Runs requests to their token limit, and no further."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.engine.build import build_engine
from common.engine.memory import Memory, RequestMemory
from common.engine.request import Request, Role
from common.engine.settings import EngineSettings
from common.types import RequestId, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request: a prompt, and how many tokens are wanted."""

    prompt: tuple[int, ...]
    num_tokens: int
    sampling: SamplingParams = GREEDY


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a job gave."""

    token_ids: tuple[int, ...]
    rounds: tuple[int, ...]
    """Tokens of each round; the first one, without drafts, is the prompt's."""


class Solo:
    """A single process that computes prompts and generates."""

    def __init__(
        self, checkpoint_dir: Path, *, speculate: bool, num_slots: int = 16, **settings: Any
    ) -> None:
        self.loaded = build_engine(
            EngineSettings(
                checkpoint_dir=checkpoint_dir,
                speculate=speculate,
                num_slots=num_slots,
                **settings,
            )
        )
        self._engine = self.loaded.engine
        self._memory = Memory(
            num_pages=self.loaded.num_pages,
            num_slots=num_slots,
            num_groups=self._engine.num_groups,
        )
        self._names = (RequestId(f"solo-{i}") for i in itertools.count())

    def alone(self, jobs: Sequence[Job]) -> list[Output]:
        """Each job by itself, so that none can influence another."""
        return [self.together([job])[0] for job in jobs]

    def together(self, jobs: Sequence[Job]) -> list[Output]:
        """All jobs in one continuous batch, as many at once as there are slots."""
        waiting = deque(enumerate(jobs))
        running: dict[RequestId, _Running] = {}
        outputs: dict[int, Output] = {}
        while waiting or running:
            while waiting and self._memory.num_free_slots:
                index, job = waiting.popleft()
                begun = self._begin(index, job)
                running[begun.request.request_id] = begun
            for result in self._engine.step().rounds:
                ended = running[result.request.request_id]
                ended.rounds.append(len(result.token_ids))
                self._engine.commit(result.request.request_id, result.round)
                if not result.request.room:
                    outputs[ended.index] = self._end(ended)
                    del running[result.request.request_id]
        self._memory.check_integrity()
        return [outputs[i] for i in range(len(jobs))]

    def _begin(self, index: int, job: Job) -> _Running:
        max_length = len(job.prompt) + job.num_tokens
        memory = self._memory.reserve(max_length)
        request = Request(
            request_id=next(self._names),
            epoch=0,
            role=Role.GENERATE,
            tokens=list(job.prompt),
            max_length=max_length,
            sampling=job.sampling,
            slot=memory.slot,
            block_table=memory.take_all(),
            group=memory.group,
        )
        self._engine.add(request)
        return _Running(index, len(job.prompt), request, memory, [])

    def _end(self, ended: _Running) -> Output:
        self._engine.remove(ended.request.request_id)
        ended.memory.release()
        token_ids = tuple(ended.request.tokens[ended.num_prompt :])
        return Output(token_ids=token_ids, rounds=tuple(ended.rounds))


@dataclass(slots=True)
class _Running:
    index: int
    num_prompt: int
    request: Request
    memory: RequestMemory
    rounds: list[int]


def borders(output: Output) -> Iterator[int]:
    """Token counts at which the rounds of an output end."""
    return itertools.accumulate(output.rounds)
