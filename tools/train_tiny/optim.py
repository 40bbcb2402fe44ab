"""Muon for matrices, Adam for everything else, both over plain dicts of tensors."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tools.train_tiny.weights import Weights, is_frozen

MUON_LR = 0.02
ADAM_LR = 3e-3
ADAM_NAMES = ("embed.", "head.", "gate.weight", "weights_proj", "markov_head", "confidence_head")


def uses_muon(name: str, tensor: Tensor) -> bool:
    is_matrix = tensor.dim() >= 2 and not name.endswith("ape") and "hc_" not in name
    return is_matrix and not any(part in name for part in ADAM_NAMES)


@dataclass(slots=True, kw_only=True)
class Optimizer:
    """Updates `weights` in place from their `.grad`; its state can be saved and loaded."""

    weights: Weights
    muon_lr: float = MUON_LR
    adam_lr: float = ADAM_LR
    momentum: float = 0.95
    step_id: int = 0
    state: Weights = field(default_factory=dict)

    def step(self, factor: float) -> None:
        """One update at `factor` times the peak learning rates; clears the gradients."""
        self.step_id += 1
        with torch.no_grad():
            trained = {k: w for k, w in self.weights.items() if w.grad is not None}
            self._muon({k: w for k, w in trained.items() if uses_muon(k, w)}, factor)
            self._adam({k: w for k, w in trained.items() if not uses_muon(k, w)}, factor)
        for weight in self.weights.values():
            weight.grad = None

    def _muon(self, group: Weights, factor: float) -> None:
        by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        for name, weight in group.items():
            assert weight.grad is not None
            average = self._slot(f"{name}/momentum", weight)
            average.lerp_(weight.grad, 1 - self.momentum)
            update = torch.lerp(weight.grad, average, self.momentum)
            for w, u in _matrices(name, weight, update):
                by_shape.setdefault(tuple(w.shape[-2:]), []).append((w, u))
        for (rows, columns), pairs in by_shape.items():
            stack = torch.cat([u.reshape(-1, rows, columns) for _, u in pairs])
            stack = orthogonalise(stack).mul_(
                -factor * self.muon_lr * max(1, rows / columns) ** 0.5
            )
            first = 0
            for weight, update in pairs:
                num = update.numel() // (rows * columns)
                weight.add_(stack[first : first + num].view_as(weight))
                first += num

    def _adam(self, group: Weights, factor: float) -> None:
        if not group:
            return
        names = list(group)
        grads: list[Tensor] = []
        for weight in group.values():
            assert weight.grad is not None
            grads.append(weight.grad)
        norm = torch.stack([g.norm() for g in grads]).norm()
        torch._foreach_mul_(grads, float(1 / norm.clamp(min=1.0)))
        first = [self._slot(f"{name}/first", group[name]) for name in names]
        second = [self._slot(f"{name}/second", group[name]) for name in names]
        torch._foreach_lerp_(first, grads, 0.1)
        torch._foreach_mul_(second, 0.98)
        torch._foreach_addcmul_(second, grads, grads, 0.02)
        bias = (1 - 0.9**self.step_id) / (1 - 0.98**self.step_id) ** 0.5
        scale = torch._foreach_sqrt(second)
        torch._foreach_add_(scale, 1e-10)
        rates = [-factor * self.adam_lr * (0.3 if "hc_" in name else 1.0) / bias for name in names]
        update = torch._foreach_div(first, scale)
        torch._foreach_mul_(update, rates)
        torch._foreach_add_([group[name] for name in names], update)

    def _slot(self, name: str, like: Tensor) -> Tensor:
        if name not in self.state:
            self.state[name] = torch.zeros_like(like, requires_grad=False)
        return self.state[name]


def trainable(weights: Weights) -> Weights:
    """Fresh leaves that require gradients, except what is frozen."""
    return {
        name: tensor.detach().clone().requires_grad_(not is_frozen(name))
        for name, tensor in weights.items()
    }


def _matrices(name: str, weight: Tensor, update: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Fused matrices apart: gate and up are two maps."""
    if name.endswith("w13"):
        return list(zip(weight.chunk(2, 1), update.chunk(2, 1), strict=True))
    return [(weight, update)]


def orthogonalise(x: Tensor) -> Tensor:
    """Five Newton-Schulz steps of a quintic: singular values of [n, rows, columns] go near one."""
    x = x.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if is_tall else x).float()


def wall_schedule(used: float, step_id: int, *, constant_share: float) -> float:
    """Learning-rate factor by the share of wall time used: warm-up, constant, linear to 2 %."""
    warm_up = min(1.0, (step_id + 1) / 100)
    decay = min(1.0, (1 - used) / (1 - constant_share))
    return warm_up * max(0.02, decay)
