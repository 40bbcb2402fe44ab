"""Training of the drafter against a frozen, already rounded target."""

import json
import logging
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_tiny import export, on_policy
from tools.train_tiny.config import SHIPPED, TinyConfig, TrainConfig
from tools.train_tiny.drafter import Drafter, draft_loss
from tools.train_tiny.on_policy import DrafterRows
from tools.train_tiny.optim import Optimizer, trainable, wall_schedule
from tools.train_tiny.train_target import warm_start
from tools.train_tiny.weights import WeightMaker, Weights

log = logging.getLogger(__name__)
ANCHORS = 64
ON_POLICY_SHARE = 0.5
BIAS_STEP = 0.005
EASY_ANCHOR_WEIGHT = 0.15


class DrafterTrainer:
    """Owns drafter weights, optimiser and clock; resumes from its state file."""

    def __init__(self, run: TrainConfig, target: Weights, rows: DrafterRows) -> None:
        self.run, self.config = run, TinyConfig.from_json(SHIPPED)
        self.target, self.rows = target, rows
        self.model = Drafter(self.config, max_length=run.row_length + 16, compiled=True)
        self.state_path = run.work / "drafter_state.pt"
        fresh = WeightMaker(self.config, run.seed + 1).drafter()
        self.weights = trainable(warm_start(target, fresh, self.config))
        self.optimizer = Optimizer(weights=self.weights)
        self.generator = torch.Generator().manual_seed(run.seed)
        self.used_s = 0.0
        if self.state_path.exists():
            self._load()

    def train(self) -> Weights:
        budget_s = self.run.drafter_minutes * 60
        last_log_s = last_save_s = self.used_s
        report = LengthReport()
        while self.used_s < budget_s:
            start, used = time.monotonic(), self.used_s / budget_s
            loads = self._accumulate(used, report)
            factor = wall_schedule(used, self.optimizer.step_id, constant_share=0.30)
            self._balance(loads, factor)
            self.optimizer.step(factor)
            self.used_s += min(time.monotonic() - start, 6.0)
            if self.used_s - last_log_s > 20:
                log.info(
                    "step %d used %.0f s lr %.3f %s",
                    self.optimizer.step_id,
                    self.used_s,
                    factor,
                    json.dumps(report.summary()),
                )
                last_log_s, report = self.used_s, LengthReport()
            if self.used_s - last_save_s > self.run.save_every_s:
                self._save()
                last_save_s = self.used_s
        self._save()
        return export.round_to_shipped(self.weights)

    def _accumulate(self, used: float, report: "LengthReport") -> list[Tensor]:
        batch = self._draw()
        block, rank = self.config.dspark_block_size, f"mtp.{self.config.n_mtp_layers - 1}"
        rows, anchors = batch.row_ids, batch.anchors
        with torch.autocast("cpu", torch.bfloat16):
            output = self.model.forward(
                self.weights,
                self.target["embed.weight"],
                self.rows.taps[rows],
                anchors,
                self.rows.tokens[rows].gather(1, anchors),
            )
        span = (anchors.unsqueeze(-1) + torch.arange(block)).flatten(1)  # [B, A K]
        previous = self.rows.tokens[rows].gather(1, span).view(-1)
        width = self.rows.hidden.shape[-1]
        wanted = self.rows.hidden[rows].gather(1, span.unsqueeze(-1).expand(-1, -1, width))
        memory = F.embedding(previous, self.weights[f"{rank}.markov_head.markov_w1.weight"])
        decay = torch.exp(-torch.arange(block) / block)
        weights = (batch.is_valid.float() * decay).view(-1)
        weights = weights / weights.sum().clamp(min=1)
        loss, distance = draft_loss(
            output.hidden.float(),
            memory,
            self.weights[f"{rank}.markov_head.markov_w2.weight"],
            self.target["head.weight"],
            wanted.reshape(-1, width),
            weights,
            entropy_share(used),
        )
        proj = self.weights[f"{rank}.confidence_head.proj.weight"]
        confidence = F.linear(torch.cat([output.x.float(), memory], -1), proj).squeeze(1)
        certainty = F.binary_cross_entropy_with_logits(confidence, 1 - distance, reduction="none")
        torch.autograd.backward(loss.sum() + (certainty * weights).sum())
        report.add(1 - distance.view(batch.is_valid.shape), batch.is_valid, self.rows.is_code[rows])
        num = self.config.n_routed_experts
        return [torch.bincount(ids.reshape(-1), minlength=num).float() for ids in output.expert_ids]

    def _draw(self) -> "AnchorBatch":
        """Rows, and anchors that favour tokens the target was unsure of: rounds begin at those."""
        num_rows, num_own = len(self.rows.tokens), self.rows.num_on_policy
        count = self.run.batch_rows
        num_from_own = round(count * ON_POLICY_SHARE)
        own = torch.randint(num_own, (num_from_own,), generator=self.generator)
        size = (count - num_from_own,)
        other = torch.randint(num_own, num_rows, size, generator=self.generator)
        row_ids = torch.cat([own, other])
        block = self.config.dspark_block_size
        taught = self.rows.is_taught[row_ids]
        last = taught.shape[1] - 1 - block
        chance = (EASY_ANCHOR_WEIGHT + self.rows.surprise[row_ids]) * taught.roll(-1, 1)
        chance = chance[:, : last + 1] + 1e-9
        chance[:, 0] = 0
        anchors = torch.multinomial(chance, ANCHORS, replacement=True, generator=self.generator)
        ahead = anchors.unsqueeze(-1) + 1 + torch.arange(block)
        is_valid = taught.gather(1, ahead.flatten(1)).view(ahead.shape).cumprod(-1).bool()
        return AnchorBatch(row_ids=row_ids, anchors=anchors, is_valid=is_valid)

    def _balance(self, loads: list[Tensor], factor: float) -> None:
        for i, load in enumerate(loads):
            bias = self.weights[f"mtp.{i}.ffn.gate.bias"]
            bias += BIAS_STEP * factor * torch.sign(load.mean() - load)

    def _save(self) -> None:
        state = {
            "weights": {k: v.detach() for k, v in self.weights.items()},
            "optimizer": self.optimizer.state,
            "step_id": self.optimizer.step_id,
            "used_s": self.used_s,
        }
        fresh = self.state_path.with_suffix(".new")
        torch.save(state, fresh)
        fresh.replace(self.state_path)
        log.info("saved at step %d", self.optimizer.step_id)

    def _load(self) -> None:
        state = torch.load(self.state_path)
        self.weights = trainable(state["weights"])
        self.optimizer = Optimizer(
            weights=self.weights, step_id=state["step_id"], state=state["optimizer"]
        )
        self.used_s = state["used_s"]
        self.generator.manual_seed(self.run.seed + state["step_id"])


class AnchorBatch:
    """Row ids [B], anchors [B, A], and which block positions [B, A, K] count."""

    __slots__ = ("anchors", "is_valid", "row_ids")

    def __init__(self, *, row_ids: Tensor, anchors: Tensor, is_valid: Tensor) -> None:
        self.row_ids, self.anchors, self.is_valid = row_ids, anchors, is_valid


class LengthReport:
    """Expected accepted length at temperature 1 with true prefixes, whole blocks only, by domain."""

    def __init__(self) -> None:
        self.sums = {"code": [0.0, 0], "chat": [0.0, 0]}

    def add(self, acceptance: Tensor, is_valid: Tensor, is_code: Tensor) -> None:
        lengths = 1 + acceptance.cumprod(-1).sum(-1)
        whole = is_valid.all(-1)
        for name, rows in (("code", is_code), ("chat", ~is_code)):
            chosen = lengths[rows][whole[rows]]
            self.sums[name][0] += float(chosen.sum())
            self.sums[name][1] += chosen.numel()

    def summary(self) -> dict[str, float]:
        return {name: round(total / max(num, 1), 3) for name, (total, num) in self.sums.items()}


def entropy_share(used: float) -> float:
    """Cross-entropy leads while the drafter learns to walk, then a tenth of it keeps the tails."""
    return 0.1 + 0.4 * max(0.0, 1 - used / 0.25)


def train(run: TrainConfig) -> Weights:
    """The whole stage: needs the target of the checkpoint folder and the saved rows."""
    target = {k: v for k, v in export.read(run.out).items() if not k.startswith("mtp.")}
    rows = on_policy.load(run.work / "rows.pt")
    drafter = DrafterTrainer(run, target, rows).train()
    export.write(run.out, target | drafter)
    return drafter
