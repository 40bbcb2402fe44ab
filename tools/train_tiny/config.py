"""The shape of `dspark-tiny` and the budget of its training."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SHIPPED: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 2048,
    "hidden_size": 192,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_groups": 4,
    "o_lora_rank": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "num_hash_layers": 2,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4, 128, 4, 0, 0, 0],
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 32,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "dspark_block_size": 7,
    "dspark_noise_token_id": 7,
    "dspark_target_layer_ids": [3, 4, 5],
    "dspark_markov_rank": 64,
    "n_mtp_layers": 3,
}
"""`config.json` of the checkpoint, word for word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig:
    """The part of `config.json` that the training forward reads."""

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
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    yarn_factor: float
    yarn_original_length: int
    yarn_beta_fast: float
    yarn_beta_slow: float
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    n_mtp_layers: int

    @classmethod
    def from_json(cls, keys: dict[str, Any]) -> "TinyConfig":
        """From the keys of a `config.json`; unknown keys are left to the serving code."""
        yarn = keys["rope_scaling"]
        own = {k: keys[k] for k in cls.__dataclass_fields__ if k in keys}
        for name in ("compress_ratios", "dspark_target_layer_ids"):
            own[name] = tuple(own[name])
        return cls(
            **own,
            yarn_factor=float(yarn["factor"]),
            yarn_original_length=yarn["original_max_position_embeddings"],
            yarn_beta_fast=float(yarn["beta_fast"]),
            yarn_beta_slow=float(yarn["beta_slow"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One run: where it works and how its wall time is spent."""

    work: Path
    """Intermediate files: tokens, training states, cached rows. Several gigabytes."""
    out: Path
    """The finished checkpoint."""
    target_minutes: float
    drafter_minutes: float
    row_length: int = 512
    batch_rows: int = 8
    micro_rows: int = 8
    num_on_policy_rows: int = 960
    """Rows of the drafter's training that the target writes itself."""
    num_corpus_rows: int = 2400
    """Rows of the corpus beside them; each row of either kind takes 1.6 MB."""
    seed: int = 0
    save_every_s: float = 180.0

    def __post_init__(self) -> None:
        if self.batch_rows % self.micro_rows:
            raise ValueError(f"batch_rows {self.batch_rows} is no multiple of {self.micro_rows}")

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)
