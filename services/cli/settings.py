"""The settings of every command: the sections together, and what single commands add."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import CliPositionalArg, CliSuppress

from common.checkpoint.folder import DEFAULT_MODEL
from common.config import Settings
from common.telemetry.compat import Compat
from services.cli.sections import (
    ROUTER_PORT,
    AdminSection,
    DecodeSection,
    EngineSection,
    LogSection,
    PrefillSection,
    RouterSection,
    SamplingSection,
    TracingSection,
    TransferSection,
    UpSection,
)


class AllSettings(Settings):
    """Everything that any command can be told, so that one file and one environment serve them all."""

    model: str = Field(
        default=DEFAULT_MODEL, description="checkpoint folder, or the name of a shipped one"
    )
    metrics_compat: Compat = Field(
        default="none",
        description="vllm: metrics are shown under its names, too, for dashboards and autoscalers that know them",
    )
    shutdown_s: float = Field(
        default=30.0,
        gt=0,
        description="time that running requests have after the first stop signal",
    )
    termination_log: Path | None = Field(
        default=None,
        description="file that a service which fails writes the cause to, such as /dev/termination-log",
    )
    log: LogSection = LogSection()
    tracing: TracingSection = TracingSection()
    admin: AdminSection = AdminSection()
    engine: EngineSection = EngineSection()
    transfer: TransferSection = TransferSection()
    router: RouterSection = RouterSection()
    prefill: PrefillSection = PrefillSection()
    decode: DecodeSection = DecodeSection()
    up: UpSection = UpSection()
    endpoint: str = Field(default=f"127.0.0.1:{ROUTER_PORT}", description="host:port of the router")
    api_key: SecretStr | None = Field(default=None, description="better given as DSPARK_API_KEY")
    timeout_s: float = Field(default=600.0, gt=0, description="deadline of one answer")
    sampling: SamplingSection = SamplingSection()
    status_fd: CliSuppress[int | None] = None
    """Where a supervised process reports its start; its standard input then ends when its parent does."""


class GenerateSettings(AllSettings):
    text: CliPositionalArg[str] = Field(description="what to continue; - reads standard input")
    chat: bool = Field(default=False, description="send the text as a user's chat message")
    output: Literal["text", "json"] = Field(
        default="text",
        description="json prints one object per committed round, then the completion",
    )


class ChatSettings(AllSettings):
    system: str | None = Field(default=None, description="what the assistant is told first")


class ProfileSettings(AllSettings):
    worker: CliPositionalArg[str] = Field(description="host:port of a prefill or decode worker")
    steps: int = Field(default=20, ge=1, le=1000, description="steps of the engine to record")
    seconds: float = Field(
        default=10.0, gt=0, le=60, description="end the recording then, whatever was recorded"
    )
    trace: Path = Field(
        default=Path("trace.json.gz"), description="file to write, for Perfetto or chrome://tracing"
    )
