"""Parameters of target and drafter under the checkpoint's names, experts stacked.

A block's parameters live in one flat dict without the `layers.{i}.` or `mtp.{i}.` prefix.
"""

import math

import torch
from torch import Tensor

from tools.train_tiny.config import TinyConfig

Weights = dict[str, Tensor]


class WeightMaker:
    """Draws initial values; one generator, so a seed fixes every tensor."""

    def __init__(self, config: TinyConfig, seed: int) -> None:
        self.config = config
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int, gain: float = 1.0) -> Tensor:
        scale = gain / math.sqrt(shape[-1])
        return torch.randn(*shape, generator=self.generator) * scale

    def target(self) -> Weights:
        """Every tensor of the target, named `layers.{i}.…` and so on."""
        c = self.config
        weights = {
            "embed.weight": torch.randn(c.vocab_size, c.hidden_size, generator=self.generator)
            * 0.5,
            "head.weight": self.matrix(c.vocab_size, c.hidden_size),
            "norm.weight": torch.ones(c.hidden_size),
            **self.hyper_head(),
        }
        for i in range(c.num_hidden_layers):
            block = self.block(i, ratio=c.compress_ratios[i], is_hash=i < c.num_hash_layers)
            weights |= {f"layers.{i}.{name}": value for name, value in block.items()}
        return weights

    def drafter(self) -> Weights:
        """Every tensor of the drafter, named `mtp.{i}.…`."""
        c = self.config
        weights: Weights = {}
        for i in range(c.n_mtp_layers):
            block = self.block(c.num_hidden_layers + i, ratio=0, is_hash=False)
            weights |= {f"mtp.{i}.{name}": value for name, value in block.items()}
        taps = len(c.dspark_target_layer_ids) * c.hidden_size
        last = f"mtp.{c.n_mtp_layers - 1}"
        rank = c.dspark_markov_rank
        weights |= {
            "mtp.0.main_proj.weight": self.matrix(c.hidden_size, taps),
            "mtp.0.main_norm.weight": torch.ones(c.hidden_size),
            f"{last}.norm.weight": torch.ones(c.hidden_size),
            f"{last}.markov_head.markov_w1.weight": self.matrix(c.vocab_size, rank),
            f"{last}.markov_head.markov_w2.weight": self.matrix(c.vocab_size, rank, gain=0.1),
            f"{last}.confidence_head.proj.weight": self.matrix(1, c.hidden_size + rank, gain=0.1),
        }
        return weights | {f"{last}.{name}": value for name, value in self.hyper_head().items()}

    def block(self, index: int, *, ratio: int, is_hash: bool) -> Weights:
        c = self.config
        weights = {
            "attn_norm.weight": torch.ones(c.hidden_size),
            "ffn_norm.weight": torch.ones(c.hidden_size),
            **{f"attn.{name}": value for name, value in self.attention(ratio).items()},
            **{f"ffn.{name}": value for name, value in self.experts(is_hash).items()},
        }
        for half, part in enumerate(("attn", "ffn")):
            weights |= self.hyper(part, favoured=(2 * index + half) % c.hc_mult)
        return weights

    def attention(self, ratio: int) -> Weights:
        c = self.config
        inner = c.num_attention_heads * c.head_dim
        weights = {
            "attn_sink": torch.zeros(c.num_attention_heads),
            "wq_a.weight": self.matrix(c.q_lora_rank, c.hidden_size),
            "q_norm.weight": torch.ones(c.q_lora_rank),
            "wq_b.weight": self.matrix(inner, c.q_lora_rank),
            "wkv.weight": self.matrix(c.head_dim, c.hidden_size),
            "kv_norm.weight": torch.ones(c.head_dim),
            "wo_a.weight": self.matrix(c.o_groups * c.o_lora_rank, inner // c.o_groups),
            "wo_b.weight": self.matrix(c.hidden_size, c.o_groups * c.o_lora_rank, gain=0.3),
        }
        if ratio:
            weights |= self.compressor("compressor", ratio, c.head_dim)
        if ratio == 4:
            inner = c.index_n_heads * c.index_head_dim
            weights |= {
                "indexer.wq_b.weight": self.matrix(inner, c.q_lora_rank),
                "indexer.weights_proj.weight": self.matrix(c.index_n_heads, c.hidden_size),
                **self.compressor("indexer.compressor", ratio, c.index_head_dim),
            }
        return weights

    def compressor(self, name: str, ratio: int, width: int) -> Weights:
        wide = 2 * width if ratio == 4 else width
        return {
            f"{name}.ape": torch.zeros(ratio, wide),
            f"{name}.wkv.weight": self.matrix(wide, self.config.hidden_size),
            f"{name}.wgate.weight": self.matrix(wide, self.config.hidden_size, gain=0.3),
            f"{name}.norm.weight": torch.ones(width),
        }

    def experts(self, is_hash: bool) -> Weights:
        c = self.config
        num, wide, narrow = c.n_routed_experts, c.hidden_size, c.moe_intermediate_size
        weights = {
            "gate.weight": self.matrix(num, wide),
            "experts.w13": self.matrix(num, 2 * narrow, wide),
            "experts.w2": self.matrix(num, wide, narrow, gain=0.3),
            "shared_experts.w1.weight": self.matrix(narrow, wide),
            "shared_experts.w3.weight": self.matrix(narrow, wide),
            "shared_experts.w2.weight": self.matrix(wide, narrow, gain=0.3),
        }
        if is_hash:
            weights["gate.tid2eid"] = self.hash_table()
        else:
            weights["gate.bias"] = torch.zeros(num)
        return weights

    def hash_table(self) -> Tensor:
        """Distinct experts per token id, every expert equally often in each column."""
        c = self.config
        first = torch.randperm(c.vocab_size, generator=self.generator) % c.n_routed_experts
        step = torch.randperm(c.vocab_size, generator=self.generator) % (c.n_routed_experts - 1)
        second = (first + 1 + step) % c.n_routed_experts
        assert c.num_experts_per_tok == 2, f"{c.num_experts_per_tok=}"
        return torch.stack([first, second], 1)

    def hyper(self, part: str, favoured: int) -> Weights:
        """A block starts out reading mostly one stream, writing all, and mixing hardly at all."""
        n = self.config.hc_mult
        pre = torch.full((n,), -1.0)
        pre[favoured] = 1.0
        fn = torch.randn(n * (2 + n), n * self.config.hidden_size, generator=self.generator) * 0.01
        return {
            f"hc_{part}_fn": fn,
            f"hc_{part}_base": torch.cat([pre, torch.zeros(n), 4 * torch.eye(n).flatten()]),
            f"hc_{part}_scale": torch.ones(3),
        }

    def hyper_head(self) -> Weights:
        n = self.config.hc_mult
        fn = torch.randn(n, n * self.config.hidden_size, generator=self.generator) * 0.01
        return {
            "hc_head_fn": fn,
            "hc_head_base": torch.full((n,), -1.0),
            "hc_head_scale": torch.ones(1),
        }


def block_of(weights: Weights, prefix: str) -> Weights:
    """The tensors under `prefix.`, without it."""
    start = prefix + "."
    return {k[len(start) :]: v for k, v in weights.items() if k.startswith(start)}


def is_frozen(name: str) -> bool:
    """Not trained by gradient: hash tables, and router biases, which balance the load."""
    return name.endswith(("gate.tid2eid", "gate.bias"))
