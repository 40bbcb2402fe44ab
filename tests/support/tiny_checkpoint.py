"""Random small checkpoints in official names: every tensor that a model has, none of them zero or one by accident."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from common.model.config import ModelConfig

Tensors = dict[str, torch.Tensor]
Shapes = Iterator[tuple[str, tuple[int, ...]]]

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 256,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "num_hash_layers": 1,
    "sliding_window": 16,
    "compress_ratios": [0, 4, 128, 4],
    # With few index heads ReLU makes exact ties, and which of equals is chosen is anybody's.
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 8,
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
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "dspark_block_size": 5,
    "dspark_noise_token_id": 255,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": 16,
    "n_mtp_layers": 3,
}

LOGIT_SCALE = 5.0
"""About the largest logit of a random checkpoint."""


def config_json(**changes: Any) -> dict[str, Any]:
    """Official keys of a small model; `changes` replace some, and layer counts follow `compress_ratios`."""
    values = {**CONFIG, **changes}
    ratios = values["compress_ratios"]
    values["num_hidden_layers"] = len(ratios)
    if "dspark_target_layer_ids" not in changes:
        values["dspark_target_layer_ids"] = list(range(len(ratios)))[-3:]
    return values


def without_drafter(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "dspark_target_layer_ids": [], "dspark_block_size": 0}


def random_tensors(config: ModelConfig, seed: int) -> Tensors:
    """All tensors of target and drafter, float32, scaled so that activations stay near one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: _random(name, shape, config, generator) for name, shape in tensor_shapes(config)
    }
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Every official name with its shape, from the reference's tables and not from the code under test."""
    vocab, hidden = config.vocab_size, config.hidden_size
    yield from (
        ("embed.weight", (vocab, hidden)),
        ("head.weight", (vocab, hidden)),
        ("norm.weight", (hidden,)),
    )
    yield from _head_shapes("hc_head", config)
    for i, ratio in enumerate(config.compress_ratios):
        yield from _block_shapes(f"layers.{i}", config, is_hash=i < config.num_hash_layers)
        if ratio:
            coff = 2 if ratio == 4 else 1
            yield from _compressor_shapes(
                f"layers.{i}.attn.compressor", config, ratio, coff, config.head_dim
            )
        if ratio == 4:
            index_width = config.index_n_heads * config.index_head_dim
            yield f"layers.{i}.attn.indexer.wq_b.weight", (index_width, config.q_lora_rank)
            yield f"layers.{i}.attn.indexer.weights_proj.weight", (config.index_n_heads, hidden)
            yield from _compressor_shapes(
                f"layers.{i}.attn.indexer.compressor", config, 4, 2, config.index_head_dim
            )
    for i in range(config.num_drafter_layers):
        yield from _block_shapes(f"mtp.{i}", config, is_hash=False)
    if config.has_drafter:
        last, rank = f"mtp.{config.num_drafter_layers - 1}", config.dspark_markov_rank
        num_taps = len(config.dspark_target_layer_ids)
        yield "mtp.0.main_proj.weight", (hidden, num_taps * hidden)
        yield "mtp.0.main_norm.weight", (hidden,)
        yield f"{last}.norm.weight", (hidden,)
        yield from _head_shapes(f"{last}.hc_head", config)
        yield f"{last}.markov_head.markov_w1.weight", (vocab, rank)
        yield f"{last}.markov_head.markov_w2.weight", (vocab, rank)
        yield f"{last}.confidence_head.proj.weight", (1, hidden + rank)


def save_checkpoint(
    folder: Path, values: dict[str, Any], tensors: Tensors, *, num_shards: int = 1
) -> Path:
    """Write config.json and safetensors, with an index when there are several shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        members = names[shard::num_shards]
        save_file({name: tensors[name] for name in members}, folder / file_name)
        weight_map |= dict.fromkeys(members, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def _block_shapes(prefix: str, config: ModelConfig, *, is_hash: bool) -> Shapes:
    hidden, heads, d = config.hidden_size, config.num_attention_heads, config.head_dim
    groups, rank, streams = config.o_groups, config.o_lora_rank, config.hc_mult
    experts, width = config.n_routed_experts, config.moe_intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "attn.attn_sink": (heads,),
        "attn.wq_a.weight": (config.q_lora_rank, hidden),
        "attn.q_norm.weight": (config.q_lora_rank,),
        "attn.wq_b.weight": (heads * d, config.q_lora_rank),
        "attn.wkv.weight": (d, hidden),
        "attn.kv_norm.weight": (d,),
        "attn.wo_a.weight": (groups * rank, heads * d // groups),
        "attn.wo_b.weight": (hidden, groups * rank),
        "attn_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
        "ffn.gate.weight": (experts, hidden),
    }
    if is_hash:
        shapes["ffn.gate.tid2eid"] = (config.vocab_size, config.num_experts_per_tok)
    else:
        shapes["ffn.gate.bias"] = (experts,)
    for sublayer in ("attn", "ffn"):
        shapes[f"hc_{sublayer}_fn"] = ((2 + streams) * streams, streams * hidden)
        shapes[f"hc_{sublayer}_base"] = ((2 + streams) * streams,)
        shapes[f"hc_{sublayer}_scale"] = (3,)
    for expert in ("shared_experts", *(f"experts.{e}" for e in range(experts))):
        shapes[f"ffn.{expert}.w1.weight"] = (width, hidden)
        shapes[f"ffn.{expert}.w3.weight"] = (width, hidden)
        shapes[f"ffn.{expert}.w2.weight"] = (hidden, width)
    for name, shape in shapes.items():
        yield f"{prefix}.{name}", shape


def _compressor_shapes(
    prefix: str, config: ModelConfig, ratio: int, coff: int, width: int
) -> Shapes:
    yield f"{prefix}.ape", (ratio, coff * width)
    yield f"{prefix}.wkv.weight", (coff * width, config.hidden_size)
    yield f"{prefix}.wgate.weight", (coff * width, config.hidden_size)
    yield f"{prefix}.norm.weight", (width,)


def _head_shapes(prefix: str, config: ModelConfig) -> Shapes:
    yield f"{prefix}_fn", (config.hc_mult, config.hc_mult * config.hidden_size)
    yield f"{prefix}_base", (config.hc_mult,)
    yield f"{prefix}_scale", (1,)


def _random(
    name: str, shape: tuple[int, ...], config: ModelConfig, generator: torch.Generator
) -> torch.Tensor:
    if name.endswith("tid2eid"):
        scores = torch.rand(shape[0], config.n_routed_experts, generator=generator)
        return scores.argsort(dim=-1)[:, : shape[1]]
    noise = torch.randn(shape, generator=generator)
    if "norm" in name or name.endswith("_scale"):
        return 1.0 + 0.2 * noise
    if name.endswith("gate.bias"):
        return 0.3 * noise
    if name.endswith(("embed.weight", "attn_sink", "ape", "_base", "markov_w1.weight")):
        return noise
    noise *= shape[-1] ** -0.5
    if name == "head.weight":
        # The largest of so many normal logits is about 3.5 deviations out.
        noise *= LOGIT_SCALE / 3.5
    return noise
