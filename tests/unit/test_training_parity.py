"""The vectorised training forward against transformers, on a small random model."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tools.train_tiny.config import SHIPPED, TinyConfig  # noqa: E402
from tools.train_tiny.export import official  # noqa: E402
from tools.train_tiny.model import Target  # noqa: E402
from tools.train_tiny.weights import WeightMaker, Weights  # noqa: E402

SMALL = {
    **SHIPPED,
    "vocab_size": 256,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4, 0, 0, 0],
    "sliding_window": 128,
    "n_routed_experts": 4,
    "dspark_target_layer_ids": [1, 2, 3],
}
RENAMED = (
    ("attn.indexer.compressor.", "self_attn.compressor.indexer."),
    ("attn.indexer.weights_proj", "self_attn.compressor.indexer.scorer.weights_proj"),
    ("attn.indexer.wq_b", "self_attn.compressor.indexer.q_b_proj"),
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("hc_attn_", "attn_hc."),
    ("hc_ffn_", "ffn_hc."),
    ("hc_head_", "model.hc_head.hc_"),
    ("attn.attn_sink", "self_attn.sinks"),
    ("attn.compressor.", "self_attn.compressor."),
    ("attn.wq_a", "self_attn.q_a_proj"),
    ("attn.wq_b", "self_attn.q_b_proj"),
    ("attn.q_norm", "self_attn.q_a_norm"),
    ("attn.wkv", "self_attn.kv_proj"),
    ("attn.kv_norm", "self_attn.kv_norm"),
    ("attn.wo_a", "self_attn.o_a_proj"),
    ("attn.wo_b", "self_attn.o_b_proj"),
    ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
    ("ffn.shared_experts.w1", "mlp.shared_experts.gate_proj"),
    ("ffn.shared_experts.w3", "mlp.shared_experts.up_proj"),
    ("ffn.shared_experts.w2", "mlp.shared_experts.down_proj"),
    ("ffn.", "mlp."),
)


def to_peer_names(weights: Weights) -> Weights:
    renamed: Weights = {}
    for name, tensor in weights.items():
        if name.startswith("layers."):
            for ours, theirs in RENAMED:
                if ours in name:
                    name = name.replace(ours, theirs)
                    break
            name = "model." + name.replace("experts.w13", "experts.gate_up_proj").replace(
                "experts.w2", "experts.down_proj"
            ).replace("compressor.norm", "compressor.kv_norm").replace(
                "indexer.norm", "indexer.kv_norm"
            )
            for ours, theirs in (
                ("ape", "position_bias"),
                ("wkv", "kv_proj"),
                ("wgate", "gate_proj"),
            ):
                name = name.replace(f".{ours}", f".{theirs}")
        elif name.startswith("hc_head_"):
            name = name.replace("hc_head_", "model.hc_head.hc_")
        else:
            name = {"embed": "model.embed_tokens", "head": "lm_head", "norm": "model.norm"}[
                name.split(".")[0]
            ] + ".weight"
        renamed[name] = tensor
    return renamed


def randomised(config: TinyConfig) -> Weights:
    """Initial values plus noise everywhere: zeros and ones would hide a mixed-up tensor."""
    weights = WeightMaker(config, seed=3).target()
    torch.manual_seed(4)
    return {
        k: v + 0.2 * torch.randn_like(v)
        if (v.is_floating_point() and v.dim() < 2) or "ape" in k
        else v
        for k, v in weights.items()
    }


@torch.no_grad()
@pytest.mark.parametrize("length", [100, 300])
def test_training_forward_equals_transformers(length: int) -> None:
    config = TinyConfig.from_json(SMALL)
    keys = {k: v for k, v in SMALL.items() if not k.startswith(("architectures", "model_type"))}
    yarn = {**SMALL["rope_scaling"]}
    keys["compress_ratios"] = SMALL["compress_ratios"][:4]
    del keys["rope_scaling"]
    keys["torch_dtype"] = "float32"
    peer = transformers.DeepseekV4ForCausalLM(
        transformers.DeepseekV4Config(**keys, rope_parameters=yarn)
    ).eval()
    weights = randomised(config)
    missing, unexpected = peer.load_state_dict(to_peer_names(weights), strict=False)
    assert not missing and not unexpected, (missing, unexpected)
    taps: dict[int, torch.Tensor] = {}
    for i in config.dspark_target_layer_ids:
        peer.model.layers[i].register_forward_hook(
            lambda _m, _i, out, i=i: taps.__setitem__(i, out.mean(2))
        )
    tokens = torch.randint(0, config.vocab_size, (2, length))
    expected = peer(input_ids=tokens, use_cache=False).logits
    output = Target(config, max_length=512).forward(weights, tokens)
    logits = (output.hidden @ weights["head.weight"].t()).view_as(expected)
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max().clamp(min=1)
    for tap, i in zip(output.taps, config.dspark_target_layer_ids, strict=True):
        assert (tap.view_as(taps[i]) - taps[i]).abs().max() < 1e-4
    assert len(official(weights)) > len(weights)
