"""The same weights in transformers' DeepseekV4: an implementation that shares nothing with ours. It has no drafter."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from common.model.config import ModelConfig
from tests.support.tiny_checkpoint import Tensors

_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
_LAYER = {
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    **{
        f"hc_{ours}_{part}": f"{ours}_hc.{part}"
        for ours in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    },
    **{
        f"{ours}.{part}": f"{theirs}.{peer_part}"
        for ours, theirs in (
            ("attn.compressor", "self_attn.compressor"),
            ("attn.indexer.compressor", "self_attn.compressor.indexer"),
        )
        for part, peer_part in (
            ("ape", "position_bias"),
            ("wkv.weight", "kv_proj.weight"),
            ("wgate.weight", "gate_proj.weight"),
            ("norm.weight", "kv_norm.weight"),
        )
    },
}


@dataclass(frozen=True, slots=True)
class PeerOutput:
    """What the peer gives for a whole sequence at once."""

    logits: torch.Tensor
    """`[T, vocab]`."""
    taps: torch.Tensor
    """`[T, taps * D]`."""


class Peer:
    """transformers' model with our weights."""

    def __init__(self, values: dict[str, Any], config: ModelConfig, tensors: Tensors) -> None:
        import transformers

        keys = {k: v for k, v in values.items() if k not in _NOT_PASSED}
        keys["compress_ratios"] = list(config.compress_ratios)
        rope = {k: v for k, v in values["rope_scaling"].items() if k != "type"}
        library: Any = transformers
        peer_config = library.DeepseekV4Config(**keys, rope_parameters=rope)
        self.model = library.DeepseekV4ForCausalLM(peer_config)
        self.model.eval()
        missing, unexpected = self.model.load_state_dict(
            peer_state(config, tensors), strict=False, assign=True
        )
        assert not missing and not unexpected, f"{missing=} {unexpected=}"
        self._tapped: dict[int, torch.Tensor] = {}
        for i in config.dspark_target_layer_ids:
            self.model.model.layers[i].register_forward_hook(self._tap(i))

    @torch.no_grad()
    def run(self, tokens: list[int]) -> PeerOutput:
        self._tapped.clear()
        output = self.model(input_ids=torch.tensor([tokens]), use_cache=False)
        taps = [self._tapped[i] for i in sorted(self._tapped)]
        return PeerOutput(output.logits[0], torch.cat(taps, dim=-1))

    def _tap(self, layer_id: int) -> Any:
        def hook(_module: Any, _inputs: Any, streams: torch.Tensor) -> None:
            self._tapped[layer_id] = streams[0].mean(1)

        return hook


def peer_of(checkpoint_dir: Path) -> Peer:
    """A checkpoint on disk, in float32."""
    values = json.loads((checkpoint_dir / "config.json").read_text(encoding="utf-8"))
    tensors = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for path in checkpoint_dir.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    return Peer(values, ModelConfig.from_json(values), tensors)


_NOT_PASSED = (
    "architectures",
    "model_type",
    "rope_scaling",
    "topk_method",
    "n_mtp_layers",
    "dspark_block_size",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
    "dspark_markov_rank",
)


def peer_state(config: ModelConfig, tensors: Tensors) -> Tensors:
    """The target's tensors under transformers' names, experts stacked."""
    state = {theirs: tensors[ours] for ours, theirs in _TOP.items()}
    for i in range(config.num_hidden_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        for name, peer_name in _LAYER.items():
            if f"{ours}.{name}" in tensors:
                state[f"{theirs}.{peer_name}"] = tensors[f"{ours}.{name}"]
        w1, w2, w3 = (
            torch.stack(
                [
                    tensors[f"{ours}.ffn.experts.{e}.{w}.weight"]
                    for e in range(config.n_routed_experts)
                ]
            )
            for w in ("w1", "w2", "w3")
        )
        state[f"{theirs}.mlp.experts.gate_up_proj"] = torch.cat((w1, w3), dim=1)
        state[f"{theirs}.mlp.experts.down_proj"] = w2
    return state
