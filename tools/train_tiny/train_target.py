"""Training of the target: a loop over random rows whose schedule is the wall clock."""

import json
import logging
import time
from pathlib import Path

import numpy as np
import torch

from tools.train_tiny import export
from tools.train_tiny.config import SHIPPED, TinyConfig, TrainConfig
from tools.train_tiny.dataset import EARLY_SHARES, LATE_SHARES, Dataset, Rows
from tools.train_tiny.model import Target, head_loss
from tools.train_tiny.optim import Optimizer, trainable, wall_schedule
from tools.train_tiny.weights import WeightMaker, Weights, block_of

log = logging.getLogger(__name__)
INDEX_LOSS_WEIGHT = 0.3
BIAS_STEP = 0.01


class TargetTrainer:
    """Owns the weights, the optimiser and the clock; everything it knows survives in one file."""

    def __init__(self, run: TrainConfig) -> None:
        self.run, self.config = run, TinyConfig.from_json(SHIPPED)
        self.rows = Dataset(run.work / "data")
        self.model = Target(self.config, max_length=run.row_length, compiled=True)
        self.state_path = run.work / "target_state.pt"
        self.weights = trainable(WeightMaker(self.config, run.seed).target())
        self.optimizer = Optimizer(weights=self.weights)
        self.rng = np.random.default_rng(run.seed)
        self.used_s, self.num_tokens = 0.0, 0
        if self.state_path.exists():
            self._load()

    def train(self) -> Weights:
        budget_s = self.run.target_minutes * 60
        last_save_s = last_log_s = self.used_s
        means = LossMeans()
        while self.used_s < budget_s:
            start = time.monotonic()
            shares = EARLY_SHARES if self.used_s < 0.25 * budget_s else LATE_SHARES
            batch = self.rows.draw(self.rng, self.run.batch_rows, self.run.row_length, shares)
            self._accumulate(batch, means)
            factor = wall_schedule(
                self.used_s / budget_s, self.optimizer.step_id, constant_share=0.35
            )
            self._balance(factor)
            self.optimizer.step(factor)
            self.num_tokens += batch.weights.numel()
            took_s = time.monotonic() - start
            # The first steps compile: that time is no training and must not eat the schedule.
            self.used_s += min(took_s, 6.0)
            if self.used_s - last_log_s > 20:
                self._report(means, factor, took_s)
                last_log_s, means = self.used_s, LossMeans()
            if self.used_s - last_save_s > self.run.save_every_s:
                self._save()
                last_save_s = self.used_s
        self._save()
        return export.round_to_shipped(self.weights)

    def _accumulate(self, batch: Rows, means: "LossMeans") -> None:
        self.loads = [
            torch.zeros(self.config.n_routed_experts) for _ in range(self.config.num_hidden_layers)
        ]
        total_weight = batch.weights.sum()
        size = self.run.micro_rows
        for first in range(0, self.run.batch_rows, size):
            tokens = batch.tokens[first : first + size]
            with torch.autocast("cpu", torch.bfloat16):
                output = self.model.forward(self.weights, tokens[:, :-1])
            weights = batch.weights[first : first + size].reshape(-1)
            labels = tokens[:, 1:].reshape(-1)
            losses = head_loss(
                output.hidden, self.weights["head.weight"], labels, weights / total_weight
            )
            share = size / self.run.batch_rows
            index_loss = INDEX_LOSS_WEIGHT * share * output.index_loss
            torch.autograd.backward(losses.sum() + index_loss)
            means.add(losses.detach(), weights, batch.domains[first : first + size])
            means.index.append(float(output.index_loss.detach()))
            for load, ids in zip(self.loads, output.expert_ids, strict=True):
                load += torch.bincount(ids.reshape(-1), minlength=load.numel())

    def _balance(self, factor: float) -> None:
        """Experts with too much load become less likely: the bias moves, no loss does it."""
        for i in range(self.config.num_hash_layers, self.config.num_hidden_layers):
            load = self.loads[i]
            bias = self.weights[f"layers.{i}.ffn.gate.bias"]
            bias += BIAS_STEP * factor * torch.sign(load.mean() - load)

    def _report(self, means: "LossMeans", factor: float, took_s: float) -> None:
        ratio = max(float(load.max() / load.mean()) for load in self.loads[2:])
        log.info(
            "step %d used %.0f s tokens %.2f M lr %.3f step %.2f s load %.2f %s",
            self.optimizer.step_id,
            self.used_s,
            self.num_tokens / 1e6,
            factor,
            took_s,
            ratio,
            json.dumps(means.summary()),
        )

    def _save(self) -> None:
        state = {
            "weights": {k: v.detach() for k, v in self.weights.items()},
            "optimizer": self.optimizer.state,
            "step_id": self.optimizer.step_id,
            "used_s": self.used_s,
            "num_tokens": self.num_tokens,
            "rng": self.rng.bit_generator.state,
        }
        fresh = self.state_path.with_suffix(".new")
        torch.save(state, fresh)
        fresh.replace(self.state_path)
        log.info("saved at step %d", self.optimizer.step_id)

    def _load(self) -> None:
        state = torch.load(self.state_path, weights_only=False)
        self.weights = trainable(state["weights"])
        self.optimizer = Optimizer(
            weights=self.weights, step_id=state["step_id"], state=state["optimizer"]
        )
        self.used_s, self.num_tokens = state["used_s"], state["num_tokens"]
        self.rng.bit_generator.state = state["rng"]
        log.info("resumed at step %d, %.0f s", self.optimizer.step_id, self.used_s)


class LossMeans:
    """Weighted mean loss per domain since the last report."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}
        self.index: list[float] = []

    def add(self, losses: torch.Tensor, weights: torch.Tensor, domains: list[str]) -> None:
        losses, weights = losses.view(len(domains), -1), weights.view(len(domains), -1)
        weights = (weights == 1).float()  # of a chat, the answers only
        for loss, weight, domain in zip(losses, weights, domains, strict=True):
            total = self.sums.setdefault(domain, [0.0, 0.0])
            total[0] += float((loss * weight).sum())
            total[1] += float(weight.sum())

    def summary(self) -> dict[str, float]:
        means = {k: round(a / max(b, 1), 3) for k, (a, b) in sorted(self.sums.items())}
        return means | {"index": round(sum(self.index) / max(len(self.index), 1), 3)}


def random_checkpoint(folder: Path, seed: int) -> int:
    """An untrained checkpoint of the shipped shape, for tests of everything but quality."""
    maker = WeightMaker(TinyConfig.from_json(SHIPPED), seed)
    return export.write(folder, maker.target() | maker.drafter())


def publish(run: TrainConfig) -> int:
    """Write the target as it stands, with a warm-started drafter, as a checkpoint."""
    config = TinyConfig.from_json(SHIPPED)
    state = torch.load(run.work / "target_state.pt", weights_only=False)
    target = export.round_to_shipped(state["weights"])
    drafter = WeightMaker(config, run.seed + 1).drafter()
    return export.write(run.out, target | warm_start(target, drafter, config))


def warm_start(target: Weights, drafter: Weights, config: TinyConfig) -> Weights:
    """A drafter whose stages begin as the target's last layers, its head as the target's head."""
    started = dict(drafter)
    last = f"mtp.{config.n_mtp_layers - 1}"
    for stage in range(config.n_mtp_layers):
        layer = config.num_hidden_layers - config.n_mtp_layers + stage
        for name, tensor in block_of(target, f"layers.{layer}").items():
            if f"mtp.{stage}.{name}" in drafter:
                started[f"mtp.{stage}.{name}"] = tensor.clone()
    for name in ("norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"):
        started[f"{last}.{name}"] = target[name].clone()
    return started
