"""Every tensor that a model consists of, from its configuration: name, shape, type, and how ranks share it.

Knows the official names and no file; the order is about the one in which a model takes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from common.checkpoint.model_tensor import Linear, ModelTensor, Sharing
from common.model.config import ModelConfig


def model_tensors(config: ModelConfig) -> Iterator[ModelTensor]:
    """Target and, where the configuration has one, drafter; optional tensors are marked."""
    yield from _target(config)
    if config.has_drafter:
        yield from _drafter(config)


def classic_mtp_tensors(config: ModelConfig) -> Iterator[ModelTensor]:
    """The one-layer head of checkpoints without DSpark, which this server has no use for."""
    hidden, group = config.hidden_size, "classic MTP layer"
    for tensor in _block("mtp.0", config, is_hash=False):
        yield replace(tensor, group=group)
    for name in ("e_proj", "h_proj"):
        yield ModelTensor(
            name=f"mtp.0.{name}.weight",
            shape=(hidden, hidden),
            group=group,
            linear=Linear.MAIN_PROJ,
        )
    for name in ("enorm", "hnorm", "norm"):
        yield ModelTensor(name=f"mtp.0.{name}.weight", shape=(hidden,), group=group)
    yield from _hyper_head("mtp.0.", config, group)


CONFIDENCE_HEAD = "confidence_head.proj.weight"
CONFIDENCE_HEAD_ALIAS = "confidence_head.weight"


def alias(name: str) -> str | None:
    """Another name under which checkpoints have the same tensor."""
    if name.endswith(CONFIDENCE_HEAD):
        return name.removesuffix(CONFIDENCE_HEAD) + CONFIDENCE_HEAD_ALIAS
    return None


def _target(config: ModelConfig) -> Iterator[ModelTensor]:
    group, vocab, hidden = "embedding and head", config.vocab_size, config.hidden_size
    yield ModelTensor(name="embed.weight", shape=(vocab, hidden), group=group)
    for i in range(config.num_hidden_layers):
        yield from _block(f"layers.{i}", config, is_hash=i < config.num_hash_layers)
        yield from _compression(f"layers.{i}", config, config.compress_ratios[i])
    yield ModelTensor(name="norm.weight", shape=(hidden,), group=group)
    yield ModelTensor(
        name="head.weight",
        shape=(vocab, hidden),
        group=group,
        is_float32=True,
        sharing=Sharing.VOCABULARY,
    )
    yield from _hyper_head("", config, group)


def _drafter(config: ModelConfig) -> Iterator[ModelTensor]:
    vocab, hidden, rank = config.vocab_size, config.hidden_size, config.dspark_markov_rank
    last, group = f"mtp.{config.num_drafter_layers - 1}", "drafter heads"
    for i in range(config.num_drafter_layers):
        yield from _block(f"mtp.{i}", config, is_hash=False)
    yield ModelTensor(
        name="mtp.0.main_proj.weight",
        shape=(hidden, hidden * len(config.dspark_target_layer_ids)),
        group=group,
        linear=Linear.MAIN_PROJ,
    )
    yield ModelTensor(name="mtp.0.main_norm.weight", shape=(hidden,), group=group)
    yield ModelTensor(name=f"{last}.norm.weight", shape=(hidden,), group=group)
    yield from _hyper_head(f"{last}.", config, group)
    for name, shape, sharing in (
        ("markov_head.markov_w1.weight", (vocab, rank), Sharing.REPLICATED),
        ("markov_head.markov_w2.weight", (vocab, rank), Sharing.VOCABULARY),
        (CONFIDENCE_HEAD, (1, hidden + rank), Sharing.REPLICATED),
    ):
        yield ModelTensor(
            name=f"{last}.{name}", shape=shape, group=group, is_float32=True, sharing=sharing
        )
    # Checkpoints whose hidden states were rotated before quantisation bring the drafter's own pair.
    yield ModelTensor(
        name="mtp.0.embed.weight", shape=(vocab, hidden), group=group, is_optional=True
    )
    yield ModelTensor(
        name=f"{last}.head.weight",
        shape=(vocab, hidden),
        group=group,
        is_float32=True,
        sharing=Sharing.VOCABULARY,
        is_optional=True,
    )


def _block(prefix: str, config: ModelConfig, *, is_hash: bool) -> Iterator[ModelTensor]:
    yield from _attention(prefix, config)
    yield from _feed_forward(prefix, config, is_hash)
    streams = config.hc_mult
    mixes = (2 + streams) * streams
    for sublayer in ("attn", "ffn"):
        for part, shape in (
            ("fn", (mixes, streams * config.hidden_size)),
            ("base", (mixes,)),
            ("scale", (3,)),
        ):
            yield _float32(f"{prefix}.hc_{sublayer}_{part}", shape, prefix)
        name = f"{prefix}.{sublayer}_norm.weight"
        yield ModelTensor(name=name, shape=(config.hidden_size,), group=prefix)


def _attention(prefix: str, config: ModelConfig) -> Iterator[ModelTensor]:
    hidden, heads, d = config.hidden_size, config.num_attention_heads, config.head_dim
    groups, rank, q_rank = config.o_groups, config.o_lora_rank, config.q_lora_rank
    split = Sharing.OUTPUT_GROUPS
    for name, shape, linear, sharing in (
        ("wq_a", (q_rank, hidden), Linear.LATENT, Sharing.REPLICATED),
        ("q_norm", (q_rank,), None, Sharing.REPLICATED),
        ("wq_b", (heads * d, q_rank), Linear.HEADS, Sharing.HEADS),
        ("wkv", (d, hidden), Linear.LATENT, Sharing.REPLICATED),
        ("kv_norm", (d,), None, Sharing.REPLICATED),
        ("wo_a", (groups * rank, heads * d // groups), Linear.GROUPED_OUTPUT, split),
        ("wo_b", (hidden, groups * rank), Linear.HEADS, split),
    ):
        yield ModelTensor(
            name=f"{prefix}.attn.{name}.weight",
            shape=shape,
            group=prefix,
            linear=linear,
            sharing=sharing,
            shares_columns=name == "wo_b",
        )
    sink = _float32(f"{prefix}.attn.attn_sink", (heads,), prefix)
    yield replace(sink, sharing=Sharing.HEADS)


def _compression(prefix: str, config: ModelConfig, ratio: int) -> Iterator[ModelTensor]:
    if ratio:
        yield from _compressor(f"{prefix}.attn.compressor", prefix, config, ratio, config.head_dim)
    if ratio == 4:
        heads, width = config.index_n_heads, config.index_head_dim
        yield ModelTensor(
            name=f"{prefix}.attn.indexer.wq_b.weight",
            shape=(heads * width, config.q_lora_rank),
            group=prefix,
            linear=Linear.INDEX_QUERY,
        )
        yield ModelTensor(
            name=f"{prefix}.attn.indexer.weights_proj.weight",
            shape=(heads, config.hidden_size),
            group=prefix,
        )
        yield from _compressor(f"{prefix}.attn.indexer.compressor", prefix, config, ratio, width)


def _compressor(
    prefix: str, group: str, config: ModelConfig, ratio: int, width: int
) -> Iterator[ModelTensor]:
    rows = 2 * width if ratio == 4 else width
    yield _float32(f"{prefix}.ape", (ratio, rows), group)
    for name, shape in (
        ("wkv", (rows, config.hidden_size)),
        ("wgate", (rows, config.hidden_size)),
        ("norm", (width,)),
    ):
        yield ModelTensor(name=f"{prefix}.{name}.weight", shape=shape, group=group, is_float32=True)


def _feed_forward(prefix: str, config: ModelConfig, is_hash: bool) -> Iterator[ModelTensor]:
    hidden, width, experts = (
        config.hidden_size,
        config.moe_intermediate_size,
        config.n_routed_experts,
    )
    yield ModelTensor(
        name=f"{prefix}.ffn.gate.weight", shape=(experts, hidden), group=prefix, is_float32=True
    )
    if is_hash:
        yield ModelTensor(
            name=f"{prefix}.ffn.gate.tid2eid",
            shape=(config.vocab_size, config.num_experts_per_tok),
            group=prefix,
            dtype="I64",
        )
    else:
        yield _float32(f"{prefix}.ffn.gate.bias", (experts,), prefix)
    shared_width = width * config.n_shared_experts
    for name, shape in _expert_shapes(hidden, shared_width):
        yield ModelTensor(
            name=f"{prefix}.ffn.shared_experts.{name}.weight",
            shape=shape,
            group=prefix,
            linear=Linear.SHARED_EXPERT,
            sharing=Sharing.SHARED_WIDTH,
            shares_columns=name == "w2",
        )
    group, shapes = f"{prefix} experts", _expert_shapes(hidden, width)
    for e in range(experts):
        for name, shape in shapes:
            yield ModelTensor(
                name=f"{prefix}.ffn.experts.{e}.{name}.weight",
                shape=shape,
                group=group,
                linear=Linear.ROUTED_EXPERT,
                sharing=Sharing.EXPERTS,
                shares_columns=name == "w2",
            )


def _expert_shapes(hidden: int, width: int) -> tuple[tuple[str, tuple[int, int]], ...]:
    return ("w1", (width, hidden)), ("w3", (width, hidden)), ("w2", (hidden, width))


def _hyper_head(prefix: str, config: ModelConfig, group: str) -> Iterator[ModelTensor]:
    streams = config.hc_mult
    yield _float32(f"{prefix}hc_head_fn", (streams, streams * config.hidden_size), group)
    yield _float32(f"{prefix}hc_head_base", (streams,), group)
    yield _float32(f"{prefix}hc_head_scale", (1,), group)


def _float32(name: str, shape: tuple[int, ...], group: str) -> ModelTensor:
    return ModelTensor(name=name, shape=shape, group=group, dtype="F32", is_float32=True)
