"""Log lines: text for people at a terminal, JSON for machines. Knows formats; not what is logged, and never a prompt."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any, Literal, TextIO

from common.telemetry.tracing import current

Format = Literal["auto", "text", "json"]
Level = Literal["debug", "info", "warning", "error"]

# What every record has; anything else came by `extra=` and is part of the line.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logging(
    *, level: Level, format: Format, role: str, stream: TextIO | None = None
) -> None:
    """Send all log records of this process to `stream` (standard error), replacing what was configured before.

    `role` names the process in every line. "auto" is text on a terminal and JSON elsewhere. Values given as
    `extra={"request_id": …}` become fields.
    """
    stream = stream or sys.stderr
    is_text = format == "text" or (format == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextFormatter(role) if is_text else JsonFormatter(role))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # gRPC's Python layer reports every cancelled call of a client that went away.
    logging.getLogger("grpc").setLevel(logging.WARNING)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ts, level, logger, role, msg, then the record's own fields."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(
                timespec="milliseconds"
            ),
            "level": record.levelname.lower(),
            "logger": record.name,
            "role": self._role,
            "msg": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, role and message, fields behind it as name=value."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        line = f"{time} {record.levelname:<7} {self._role} {record.getMessage()}{fields}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller gave as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """The caller's, and the trace that the line belongs to when there is one."""
    fields = extra_fields(record)
    span = current()
    return fields if span is None else {"trace_id": span.trace_id, **fields}
