"""The settings of the `checkpoint` commands."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import CliPositionalArg

from services.cli.settings import AllSettings


class CheckpointSettings(AllSettings):
    checkpoint: CliPositionalArg[str] = Field(
        description="checkpoint folder, or the name of a shipped one"
    )
    output: Literal["text", "json"] = "text"


class ValidateSettings(CheckpointSettings):
    contract: Literal["served", "dspark", "upstream-123"] = Field(
        default="served",
        description="served: what config.json asks for; dspark: the full drafter besides; upstream-123: the names "
        "that the reference system looks for",
    )
    deep: bool = Field(
        default=False,
        description="read all weights: damaged scales, and digests where there are some",
    )
    record_digests: bool = Field(
        default=False, description="trust the weights as they are and write their digests"
    )


class ConvertSettings(CheckpointSettings):
    target: CliPositionalArg[Path] = Field(description="folder to write; must not exist")
    to: Literal["fp8-fp4", "w8a8-compressed-tensors", "w8a8-modelslim", "bf16", "fp32"] = Field(
        description="format to write"
    )
    shard_gb: float = Field(
        default=4.0, gt=0, description="largest file in 10^9 bytes; one is in memory at a time"
    )


class PlanSettings(CheckpointSettings):
    dp: int = Field(default=1, ge=1, description="data parallel groups")
    tp: int = Field(default=1, ge=1, description="ranks that share output groups and vocabulary")
    ep: int = Field(default=1, ge=1, description="ranks that share experts: 1 or dp x tp")
    device_gib: float = Field(default=64.0, gt=0, description="memory of one device in 2^30 bytes")
    utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="share of it for weights and caches; the rest is for activations and the driver",
    )
    cache: Literal["official", "bfloat16", "float32"] = Field(
        default="bfloat16",
        description="how cache rows are kept; official is the published FP8 and FP4 layout",
    )
    weights: Literal["stored", "native", "bfloat16", "float32"] = Field(
        default="bfloat16",
        description="how weights are held: dequantised; native: quantised matrices as stored, which holds for w8a8 too; stored: every tensor as stored",
    )
    draft_length: int | None = Field(
        default=None, ge=0, le=63, description="the checkpoint's own if not given"
    )
    context_length: int | None = Field(
        default=None, ge=128, description="context of the largest batch; the model's if not given"
    )
