"""What the ranks of a mesh give to one another, counted, beside the least that its parts need. Knows engines; times nothing.

The reference topology, DP4 x TP4 EP16, as sixteen processes on this machine. Bytes are those that the first rank gives
away, so a busy machine changes none of them. A row passes `tp.sum` twice and the experts once in every layer, target's or
drafter's; the least for a row and layer is, with D numbers of `size` bytes:

* for the sums: two sublayers, each a reduce-scatter and a gather, 2 * 2 (tp - 1) / tp * D * size. A ring does it with that.
* for the experts: a row goes to those ranks of other groups that have one of its k experts, and each of them returns one
  partial sum, which the group's own sum completes. With experts chosen evenly these are, of the `ep - tp` ranks that have
  E / ep experts each, m = (ep - tp) (1 - C(E - E / ep, k) / C(E, k)). The tp ranks of a group share the giving of its rows,
  m / tp * D * size each, and a rank answers m / (ep - tp) of the rows of other groups with D * size. Ids and weights, 8 k
  bytes at most, are left out.

What is counted beyond that is the price of gathering rows in whole groups: every rank of a group has its rows, gives them to
its counterpart in every other group, and gets a summand back from each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from pathlib import Path

import torch

from benchmarks.prompts import load_prompts
from benchmarks.suite import tokens_of
from common.engine.build_rank import BuiltRank
from common.engine.clock import PhaseClock
from common.engine.engine import Engine
from common.engine.memory import Memory, RequestMemory
from common.engine.mesh_ranks import MeshRanks
from common.engine.mesh_start import start_mesh
from common.engine.outputs import RequestOutput
from common.engine.ranks import GroupSteps
from common.engine.request import Request, Role, StepListener
from common.engine.runner import Runner, StepRows
from common.engine.settings import EngineSettings
from common.kv_cache.pool import CachePool
from common.model.config import ModelConfig
from common.parallel.mesh import MeshShape
from common.tokenizer import Tokenizer
from common.types import RequestId, SamplingParams

MESH = MeshShape(dp=4, tp=4, ep=16)
NUM_TOKENS = 64
ITEM_BYTES = 4
"""Of the numbers that travel here: float32."""
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Prompts that run at the same time, the first of them in the first group."""

    name: str
    prompts: list[list[int]]


@dataclass(slots=True)
class RowLayers:
    """Rows that groups brought to steps, once for every layer of target or drafter that they passed."""

    first: int = 0
    """Of the first group."""
    others: int = 0


def run_collectives(checkpoint_dir: Path, say: Callable[[str], None]) -> dict[str, float]:
    """Bytes per row and layer, and per token, of prefill and decode: groups alike, unlike, and all but one idle."""
    torch.set_num_threads(1)
    settings = EngineSettings(
        checkpoint_dir=checkpoint_dir, mesh=MESH, num_slots=MESH.dp, max_context_length=1024
    )
    started = start_mesh(settings)
    say(f"{MESH.num_ranks} ranks of {MESH} are here")
    mesh = CountedMesh(started.ranks, started.first)
    figures: dict[str, float] = {}
    try:
        for scenario in _scenarios(checkpoint_dir):
            for phase, measured in mesh.run(scenario).items():
                figures |= {f"mesh.{scenario.name}.{phase}.{k}": v for k, v in measured.items()}
                shown = ", ".join(f"{key} {value:.2f}" for key, value in measured.items())
                say(f"{scenario.name}, {phase}: {shown}")
    finally:
        mesh.engine.close()
    return figures


def minimum_bytes(config: ModelConfig, mesh: MeshShape, rows: RowLayers) -> float:
    """What the first rank has to give away at least; the module says why."""
    row_bytes = config.hidden_size * ITEM_BYTES
    experts, top_k = config.n_routed_experts, config.num_experts_per_tok
    elsewhere = experts - experts // mesh.ep
    num_outside = mesh.ep - mesh.tp
    num_chosen = num_outside * (1 - comb(elsewhere, top_k) / comb(experts, top_k))
    sums = 2 * 2 * (mesh.tp - 1) / mesh.tp * rows.first
    given = num_chosen / mesh.tp * rows.first
    answered = num_chosen / num_outside * rows.others
    return (sums + given + answered) * row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What the first rank gave away in some steps, and what it was for."""

    config: ModelConfig
    mesh: MeshShape
    sent: dict[str, int]
    """Bytes by kind, those of sampling left out."""
    vocabulary: int
    """Bytes of sampling."""
    rows: RowLayers

    def by_row(self) -> dict[str, float]:
        """Per row of the first group and layer."""
        first, total, least = self.rows.first, sum(self.sent.values()), self._least()
        return {
            **{f"{kind}_bytes_per_row_layer": n / first for kind, n in self.sent.items()},
            "bytes_per_row_layer": total / first,
            "minimum_bytes_per_row_layer": least / first,
            "over_minimum": total / least,
            "vocabulary_bytes": self.vocabulary,
        }

    def by_token(self, num_tokens: int) -> dict[str, float]:
        """Per token that the first group has written and layer of target and drafter.

        Rows of drafts are passed for tokens, too, whether or not they become one.
        """
        layers = self.config.num_hidden_layers + self.config.num_drafter_layers
        return {
            "bytes_per_token_layer": sum(self.sent.values()) / num_tokens / layers,
            "minimum_bytes_per_token_layer": self._least() / num_tokens / layers,
        }

    def _least(self) -> float:
        return minimum_bytes(self.config, self.mesh, self.rows)


def _scenarios(checkpoint_dir: Path) -> tuple[Scenario, ...]:
    tokenizer = Tokenizer.from_folder(checkpoint_dir)
    prompts = [tokens_of(tokenizer, prompt) for prompt in load_prompts() if prompt.is_unseen]
    unlike = prompts[:: len(prompts) // MESH.dp][: MESH.dp]
    return (
        Scenario(name="alike", prompts=unlike[:1] * MESH.dp),
        Scenario(name="unlike", prompts=unlike),
        Scenario(name="one_busy", prompts=unlike[:1]),
    )


class CountedMesh:
    """An engine on a mesh, and what its first rank has given away."""

    def __init__(self, ranks: MeshRanks, built: BuiltRank) -> None:
        self._model = built.runner.model
        self._counted = CountedRanks(ranks, built.runner)
        self.engine = Engine(self._counted, built.sizes.engine_config)
        self._memory = Memory(
            num_pages=built.sizes.num_pages, num_slots=built.sizes.num_slots, num_groups=MESH.dp
        )

    def run(self, scenario: Scenario) -> dict[str, dict[str, float]]:
        """Figures by phase."""
        held = [self._add(i, prompt) for i, prompt in enumerate(scenario.prompts)]
        requests = [request for request, _ in held]
        first = requests[0]
        prefill = self._measured(lambda: all(request.round for request in requests))
        before = len(first.tokens)
        decode = self._measured(lambda: not any(request.room for request in requests))
        by_token = decode.by_token(len(first.tokens) - before)
        for request, room in held:
            self.engine.remove(request.request_id)
            room.release()
        return {"prefill": prefill.by_row(), "decode": decode.by_row() | by_token}

    def _add(self, index: int, prompt: list[int]) -> tuple[Request, RequestMemory]:
        room = self._memory.reserve(len(prompt) + NUM_TOKENS)
        assert room.group == index
        request = Request(
            request_id=RequestId(str(index)),
            epoch=0,
            role=Role.GENERATE,
            tokens=list(prompt),
            max_length=len(prompt) + NUM_TOKENS,
            sampling=GREEDY,
            slot=room.slot,
            block_table=room.take_all(),
            group=room.group,
        )
        self.engine.add(request)
        return request, room

    def _measured(self, is_over: Callable[[], bool]) -> Counted:
        """Steps until it is over, and what passed in them."""
        before = self._model.comm.sent_bytes()
        rows = self._counted.rows = RowLayers()
        while not is_over():
            for result in self.engine.step().rounds:
                self.engine.commit(result.request.request_id, result.round)
        sent = {
            kind: count - before.get(kind, 0)
            for kind, count in self._model.comm.sent_bytes().items()
        }
        vocabulary = sent.pop("tp.gather", 0)
        return Counted(
            config=self._model.config, sent=sent, vocabulary=vocabulary, mesh=MESH, rows=rows
        )


class CountedRanks:
    """Ranks that count what the groups bring."""

    def __init__(self, inner: MeshRanks, runner: Runner) -> None:
        self._inner = inner
        self._draft_length = runner.draft_length
        self._config = runner.model.config
        self.num_groups = inner.num_groups
        self.rows = RowLayers()

    @property
    def pool(self) -> CachePool:
        return self._inner.pool

    def add(self, request: Request) -> None:
        self._inner.add(request)

    def remove(self, request_id: RequestId) -> None:
        self._inner.remove(request_id)

    def run(
        self, steps: GroupSteps, clock: PhaseClock, listener: StepListener | None
    ) -> list[list[RequestOutput | None]]:
        rows = StepRows.of(steps, self._draft_length)
        first, *others = (
            target * self._config.num_hidden_layers + drafts * self._config.num_drafter_layers
            for target, drafts in zip(rows.target, rows.drafts, strict=True)
        )
        self.rows.first += first
        self.rows.others += sum(others)
        return self._inner.run(steps, clock, listener)

    def keep_alive(self) -> None:
        self._inner.keep_alive()

    def close(self) -> None:
        self._inner.close()
