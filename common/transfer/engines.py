"""Which transfer engines a process has, and which one it wants. Knows names and their order; no peers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import ConfigError
from common.transfer.config import EngineChoice, TransferConfig
from common.transfer.engine import TransferEngine
from common.transfer.grpc_engine import GrpcTransferEngine
from common.transfer.memory import PoolMemory
from common.transfer.mooncake_engine import MooncakeTransferEngine
from common.transfer.nixl_engine import NixlTransferEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The engines of a process."""

    choice: EngineChoice
    """What the configuration asks for."""
    wanted: str
    """The engine to be used with every peer that has it."""
    by_name: Mapping[str, TransferEngine]
    """What there is, best first; the last is always there."""
    missing: Mapping[str, str]
    """Why an engine that was wanted is not here."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.by_name)

    async def close(self) -> None:
        for engine in self.by_name.values():
            await engine.close()


def open_engines(config: TransferConfig, memory: PoolMemory, grpc: GrpcTransferEngine) -> Engines:
    """Start what the configuration wants and this machine has; `grpc` is what remains.

    That a wanted engine is not here is a warning when it was named, and news when it was only the first choice.
    """
    names = _preference(config.engine, memory.tensors[0].device.type)
    by_name: dict[str, TransferEngine] = {}
    missing: dict[str, str] = {}
    for name in names[:-1]:
        try:
            by_name[name] = _open(name, config, memory)
        except ConfigError as error:
            missing[name] = error.message
            level = logging.INFO if config.engine == "auto" else logging.WARNING
            logger.log(level, "transfer engine %s is not used here: %s", name, error.message)
    by_name[grpc.name] = grpc
    # What was named is wanted even where it is missing; what is only the usual choice is not.
    wanted = next(iter(by_name)) if config.engine == "auto" else names[0]
    return Engines(choice=config.engine, wanted=wanted, by_name=by_name, missing=missing)


def _preference(choice: EngineChoice, device: str) -> tuple[str, ...]:
    """Names to try, best first, gRPC last."""
    if choice == "grpc":
        return ("grpc",)
    if choice != "auto":
        return (choice, "grpc")
    # Mooncake listens on all interfaces without asking who writes, so elsewhere it has to be asked for by name.
    return ("mooncake", "grpc") if device == "npu" else ("nixl", "grpc")


def _open(name: str, config: TransferConfig, memory: PoolMemory) -> TransferEngine:
    if name == NixlTransferEngine.name:
        return NixlTransferEngine(memory)
    return MooncakeTransferEngine(memory, host=config.host, protocol=config.protocol)
