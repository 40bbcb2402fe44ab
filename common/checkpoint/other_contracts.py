"""Contracts other than the server's own: the full DSpark one for any configuration, and the reference system's 123 names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from common.checkpoint.contract import check_contract, stored_name
from common.checkpoint.contract_report import ContractReport, Fault
from common.checkpoint.headers import Headers
from common.model.config import ModelConfig

NUM_STAGES = 3
FLASH_MARKOV_RANK, PRO_MARKOV_RANK = 256, 512
FLASH_HIDDEN_SIZE = 4096


def check_dspark(config: ModelConfig, headers: Headers) -> ContractReport:
    """Target and full drafter, also where config.json names none: what `base` checkpoints lack is counted."""
    notes: tuple[str, ...] = ()
    if not config.has_drafter:
        config = _with_drafter(config)
        notes = (
            "config.json has no dspark_* keys; three stages on the last three layers were assumed",
        )
    report = check_contract(config, headers)
    return replace(
        report, contract=report.contract.replace("served", "dspark"), notes=report.notes + notes
    )


def check_upstream_123(config: ModelConfig, headers: Headers) -> ContractReport:
    """The reference system's check of drafter weights: names only, and of the experts only the first and the last.

    It accepts a checkpoint whose other experts are missing; our own contract does not.
    """
    expected: dict[str, int] = {}
    faults = []
    for group, name in upstream_names(config.n_routed_experts):
        expected[group] = expected.get(group, 0) + 1
        if stored_name(name, headers) not in headers:
            faults.append(Fault(name=name, group=group, kind="missing"))
    return ContractReport(
        contract="upstream-123",
        expected=expected,
        faults=tuple(faults),
        notes=(
            "this contract names W8A8 scales and only the first and last expert of a stage, without shapes and types",
        ),
    )


def upstream_names(num_experts: int) -> Iterator[tuple[str, str]]:
    """Group and name: 38 for each of three stages, and nine heads."""
    for stage in range(NUM_STAGES):
        for name in _stage_names(num_experts):
            yield f"mtp.{stage}", f"mtp.{stage}.{name}"
    last = f"mtp.{NUM_STAGES - 1}"
    for name in (
        "mtp.0.main_proj.weight",
        "mtp.0.main_norm.weight",
        f"{last}.norm.weight",
        *(f"{last}.hc_head_{part}" for part in ("fn", "scale", "base")),
        *(f"{last}.markov_head.markov_w{i}.weight" for i in (1, 2)),
        # The reference system says confidence_head.weight; published checkpoints say this, and both are accepted.
        f"{last}.confidence_head.proj.weight",
    ):
        yield "drafter heads", name


def _stage_names(num_experts: int) -> Iterator[str]:
    yield "attn.attn_sink"
    for name in ("kv_norm", "q_norm", "wkv", "wo_a", "wo_b", "wq_a", "wq_b"):
        yield f"attn.{name}.weight"
    yield from ("attn.wo_b.scale", "attn.wq_b.scale")
    yield from ("attn_norm.weight", "ffn_norm.weight", "ffn.gate.weight", "ffn.gate.bias")
    for sublayer in ("attn", "ffn"):
        yield from (f"hc_{sublayer}_{part}" for part in ("fn", "scale", "base"))
    for expert in ("shared_experts", "experts.0", f"experts.{num_experts - 1}"):
        for matrix in ("w1", "w2", "w3"):
            yield from (f"ffn.{expert}.{matrix}.weight", f"ffn.{expert}.{matrix}.scale")


def _with_drafter(config: ModelConfig) -> ModelConfig:
    is_flash = config.hidden_size <= FLASH_HIDDEN_SIZE
    layers = config.num_hidden_layers
    return replace(
        config,
        dspark_target_layer_ids=tuple(range(layers - NUM_STAGES, layers)),
        dspark_markov_rank=FLASH_MARKOV_RANK if is_flash else PRO_MARKOV_RANK,
        num_drafter_layers=NUM_STAGES,
    )
