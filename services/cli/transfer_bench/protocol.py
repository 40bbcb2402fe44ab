"""What the two ends of a measurement say to each other: JSON objects, one a line. Knows no engine and no memory."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import asdict, dataclass
from typing import Any

from common.errors import ConfigError
from common.transfer.meeting import EngineDescriptor
from services.cli.transfer_bench.patterns import MAX_SIZE_BYTES, Pattern

MAX_LINE_BYTES = 1 << 20
ANSWER_S = 60.0
"""The longest answer takes as long as reading or filling the largest memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The first question: be a receiver with this memory and these engines."""

    engines: tuple[str, ...]
    size_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.size_bytes <= MAX_SIZE_BYTES:
            raise ConfigError(f"a receiver of {self.size_bytes} bytes was asked for")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clear:
    """Overwrite what arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """What has arrived in this pattern?"""

    size_bytes: int
    num_ranges: int

    @property
    def pattern(self) -> Pattern:
        return Pattern(size_bytes=self.size_bytes, num_ranges=self.num_ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTime:
    """How long has your process computed?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """The answer to an opening: where and how to write."""

    grpc_port: int
    tcp_port: int
    capability: bytes
    descriptors: tuple[EngineDescriptor, ...]
    missing: dict[str, str]


Question = Opening | Clear | Digest | CpuTime
_QUESTIONS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Opening, Clear, Digest, CpuTime)
}


class Lines:
    """One connection, either end of it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, question: Question) -> Any:
        """The answer. Raises ConnectionError when the other end refuses or is gone."""
        await self._send({"ask": type(question).__name__, **asdict(question)})
        async with asyncio.timeout(ANSWER_S):
            fields = await self._receive()
        if "refused" in fields:
            raise ConnectionError(f"the peer refused: {fields['refused']}")
        return fields["answer"]

    async def next_question(self) -> Question | None:
        """None when the other end has left. Raises ConfigError when it cannot be read."""
        try:
            fields = await self._receive()
        except ConnectionError:
            return None
        try:
            kind = _QUESTIONS[fields.pop("ask")]
            if "engines" in fields:
                fields["engines"] = tuple(fields["engines"])
            question: Question = kind(**fields)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"not a question of this tool: {error}") from error
        return question

    async def answer(self, value: object) -> None:
        await self._send({"answer": value})

    async def refuse(self, why: str) -> None:
        await self._send({"refused": why})

    def close(self) -> None:
        self._writer.close()

    async def _send(self, fields: dict[str, Any]) -> None:
        self._writer.write(json.dumps(fields).encode() + b"\n")
        async with asyncio.timeout(ANSWER_S):
            await self._writer.drain()

    async def _receive(self) -> dict[str, Any]:
        try:
            line = await self._reader.readline()
            fields = json.loads(line) if line else None
        except ValueError as error:
            raise ConfigError(f"the other end is not this tool: {error}") from error
        if not isinstance(fields, dict):
            raise ConnectionError("the other end of the measurement is gone")
        return fields


def receiver_to_json(receiver: Receiver) -> dict[str, Any]:
    fields = asdict(receiver)
    fields["capability"] = receiver.capability.hex()
    for each in fields["descriptors"]:
        each["endpoint"] = base64.b64encode(each["endpoint"]).decode()
    return fields


def receiver_from_json(fields: dict[str, Any]) -> Receiver:
    descriptors = tuple(
        EngineDescriptor(
            **each
            | {
                "endpoint": base64.b64decode(each["endpoint"]),
                "region_addresses": tuple(each["region_addresses"]),
            }
        )
        for each in fields["descriptors"]
    )
    return Receiver(
        grpc_port=fields["grpc_port"],
        tcp_port=fields["tcp_port"],
        capability=bytes.fromhex(fields["capability"]),
        descriptors=descriptors,
        missing=fields["missing"],
    )
