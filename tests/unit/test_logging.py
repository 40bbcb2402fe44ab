"""Log lines."""

from __future__ import annotations

import io
import json
import logging

import pytest

from common.telemetry.logging import configure_logging

logger = logging.getLogger("kitchen")


pytestmark = pytest.mark.usefixtures("restored_logging")


def test_a_json_line_has_time_level_logger_role_message_and_the_callers_fields() -> None:
    stream = io.StringIO()
    configure_logging(level="info", format="auto", role="decode", stream=stream)
    logger.info("%d eggs\nboiled", 3, extra={"request_id": "r-1", "seconds": 1.5})
    (line,) = stream.getvalue().splitlines()
    fields = json.loads(line)
    assert fields.pop("ts").endswith("+00:00")
    assert fields == {
        "level": "info",
        "logger": "kitchen",
        "role": "decode",
        "msg": "3 eggs\nboiled",
        "request_id": "r-1",
        "seconds": 1.5,
    }


def test_an_exception_is_part_of_its_json_line() -> None:
    stream = io.StringIO()
    configure_logging(level="info", format="json", role="decode", stream=stream)
    try:
        raise ValueError("burnt")
    except ValueError:
        logger.exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: burnt" in json.loads(line)["exception"]


def test_text_lines_are_for_people() -> None:
    stream = io.StringIO()
    configure_logging(level="info", format="text", role="decode", stream=stream)
    logger.warning("hot", extra={"request_id": "r-1"})
    assert stream.getvalue().endswith(" WARNING decode hot request_id=r-1\n")


def test_lines_below_the_level_are_not_written() -> None:
    stream = io.StringIO()
    configure_logging(level="warning", format="text", role="decode", stream=stream)
    logger.info("lukewarm")
    assert stream.getvalue() == ""
