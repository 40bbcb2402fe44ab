"""The model's configuration under its official keys. Knows config.json; never the weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import CheckpointError

SUPPORTED_RATIOS = (0, 4, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """YaRN of the compressed layers."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of one checkpoint, named as in its config.json."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    swiglu_limit: float
    num_hash_layers: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    """One per target layer; what the drafter's layers add to the list is cut off."""
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    max_position_embeddings: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    dspark_block_size: int
    """Drafts per round that the drafter was trained for; 0 when there is no drafter."""
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    num_drafter_layers: int

    def __post_init__(self) -> None:
        for name, value, divisor_name, divisor in (
            ("num_attention_heads", self.num_attention_heads, "o_groups", self.o_groups),
            ("qk_rope_head_dim", self.qk_rope_head_dim, "2", 2),
        ):
            if value % divisor:
                raise CheckpointError(
                    f"config.json: {name} ({value}) must be a multiple of {divisor_name} ({divisor})"
                )
        wrong = sorted(set(self.compress_ratios) - set(SUPPORTED_RATIOS))
        if wrong:
            raise CheckpointError(
                f"config.json: compress_ratios has {wrong}; supported are {SUPPORTED_RATIOS}"
            )
        if any(i >= self.num_hidden_layers for i in self.dspark_target_layer_ids):
            raise CheckpointError(
                f"config.json: dspark_target_layer_ids {self.dspark_target_layer_ids} name layers "
                f"beyond num_hidden_layers ({self.num_hidden_layers})"
            )

    def layers_with_ratio(self, ratio: int) -> tuple[int, ...]:
        return tuple(i for i, r in enumerate(self.compress_ratios) if r == ratio)

    @property
    def has_drafter(self) -> bool:
        return self.num_drafter_layers > 0

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ModelConfig:
        """Read official keys; raises CheckpointError that names a missing or unsupported one."""
        try:
            return cls._parse(values)
        except KeyError as error:
            raise CheckpointError(f"config.json lacks {error.args[0]!r}") from error

    @classmethod
    def load(cls, checkpoint_dir: Path) -> ModelConfig:
        path = checkpoint_dir / "config.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        return cls.from_json(values)

    @classmethod
    def _parse(cls, v: dict[str, Any]) -> ModelConfig:
        if v["model_type"] != "deepseek_v4":
            raise CheckpointError(
                f"config.json: model_type is {v['model_type']!r}; this server runs 'deepseek_v4'"
            )
        for key, expected in (("scoring_func", "sqrtsoftplus"), ("num_key_value_heads", 1)):
            if v.get(key, expected) != expected:
                raise CheckpointError(
                    f"config.json: {key} is {v[key]!r}; only {expected!r} is supported"
                )
        layers = int(v["num_hidden_layers"])
        ratios = tuple(int(r) for r in v["compress_ratios"])
        if len(ratios) < layers:
            raise CheckpointError(
                f"config.json: compress_ratios has {len(ratios)} entries for {layers} layers"
            )
        taps = tuple(int(i) for i in v.get("dspark_target_layer_ids", ()))
        scaling = v.get("rope_scaling") or v["rope_parameters"]
        eos = v["eos_token_id"]
        return cls(
            vocab_size=v["vocab_size"],
            hidden_size=v["hidden_size"],
            moe_intermediate_size=v["moe_intermediate_size"],
            num_hidden_layers=layers,
            num_attention_heads=v["num_attention_heads"],
            head_dim=v["head_dim"],
            qk_rope_head_dim=v["qk_rope_head_dim"],
            q_lora_rank=v["q_lora_rank"],
            o_groups=v["o_groups"],
            o_lora_rank=v["o_lora_rank"],
            n_routed_experts=v["n_routed_experts"],
            num_experts_per_tok=v["num_experts_per_tok"],
            n_shared_experts=v["n_shared_experts"],
            routed_scaling_factor=v["routed_scaling_factor"],
            norm_topk_prob=v.get("norm_topk_prob", True),
            swiglu_limit=v["swiglu_limit"],
            num_hash_layers=v["num_hash_layers"],
            sliding_window=v["sliding_window"],
            compress_ratios=ratios[:layers],
            index_n_heads=v["index_n_heads"],
            index_head_dim=v["index_head_dim"],
            index_topk=v["index_topk"],
            hc_mult=v["hc_mult"],
            hc_sinkhorn_iters=v["hc_sinkhorn_iters"],
            hc_eps=v["hc_eps"],
            rms_norm_eps=v["rms_norm_eps"],
            rope_theta=v["rope_theta"],
            compress_rope_theta=v["compress_rope_theta"],
            rope_scaling=RopeScaling(
                factor=scaling["factor"],
                original_max_position_embeddings=scaling["original_max_position_embeddings"],
                beta_fast=scaling["beta_fast"],
                beta_slow=scaling["beta_slow"],
            ),
            max_position_embeddings=v["max_position_embeddings"],
            bos_token_id=v["bos_token_id"],
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
            dspark_block_size=v.get("dspark_block_size", 0),
            dspark_noise_token_id=v.get("dspark_noise_token_id", 0),
            dspark_target_layer_ids=taps,
            dspark_markov_rank=v.get("dspark_markov_rank", 0),
            num_drafter_layers=len(taps) and int(v.get("n_mtp_layers", len(taps))),
        )
