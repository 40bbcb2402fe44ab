"""One line a request, with its figures, and never a word of what was asked or answered."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

import dspark
from common.telemetry.logging import JsonFormatter
from tests.support.spans import Kept
from tests.support.system import System

pytestmark = pytest.mark.e2e

SENTINEL = "xyzzy-plugh-4711"
PROMPT = f"# {SENTINEL}\ndef add(a, b):"
GREEDY = dspark.SamplingParams(temperature=0.0)
STOP = dspark.StopParams(max_tokens=24, ignore_eos=True, stop=(f"{SENTINEL}-stop",))


class Log:
    """Everything that all three services say, at the lowest level, as a machine reads it."""

    def __init__(self) -> None:
        self._stream = io.StringIO()
        self.handler = logging.StreamHandler(self._stream)
        self.handler.setFormatter(JsonFormatter("all"))

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]

    def of(self, request_id: str, msg: str) -> list[dict[str, Any]]:
        return [
            line
            for line in self.lines
            if (line.get("request_id"), line["msg"]) == (request_id, msg)
        ]


@pytest.fixture
def log() -> Iterator[Log]:
    log, root = Log(), logging.getLogger()
    level = root.level
    root.addHandler(log.handler)
    root.setLevel(logging.DEBUG)
    yield log
    root.removeHandler(log.handler)
    root.setLevel(level)


@pytest.fixture
def client(traced: System) -> Iterator[dspark.Client]:
    with dspark.Client(traced.address, timeout=60.0) as opened:
        yield opened


def test_a_request_is_one_line_with_its_figures_and_its_trace(
    client: dspark.Client, traced: System, log: Log, spans: Kept
) -> None:
    spans.clear()
    completion = client.generate(PROMPT, sampling=GREEDY, stop=STOP, request_id="r-log")
    traced.wait_at_rest()
    (line,) = [line for line in log.of("r-log", "request ended") if line["level"] == "info"]
    usage, route = completion.usage, completion.route
    (trace_id,) = {
        span.trace_id
        for span in spans.now()
        if span.attributes.get("gen_ai.response.id") == "r-log"
    }
    assert line["trace_id"] == trace_id
    assert line["logger"] == "services.router.story"
    assert line["model"] == "dspark-tiny"
    assert (line["operation"], line["finish_reason"]) == ("text_completion", "length")
    assert line["prompt_tokens"] == usage.prompt_tokens
    assert line["completion_tokens"] == usage.completion_tokens == 24
    assert line["accepted_length"] == pytest.approx(usage.mean_accepted_length, abs=1e-3)
    assert line["prefill_worker"] == route.prefill_worker == traced.prefill_address
    assert line["decode_worker"] == route.decode_worker == traced.decode_address
    assert line["transfer_engine"] == route.transfer_engine
    assert 0 < line["queue_s"] <= line["ttft_s"] <= line["duration_s"]
    # The workers' own lines are for whoever looks closer, and belong to the same trace.
    (decoded,) = [line for line in log.of("r-log", "request ended") if line["level"] == "debug"]
    (handed_over,) = log.of("r-log", "request handed over")
    assert decoded["level"] == handed_over["level"] == "debug"
    assert decoded["trace_id"] == handed_over["trace_id"] == trace_id


def test_no_log_has_a_word_of_prompt_or_answer(
    client: dspark.Client, traced: System, log: Log
) -> None:
    completion = client.generate(PROMPT, sampling=GREEDY, stop=STOP)
    chat = client.chat(
        [dspark.ChatMessage(role="user", content=f"What is {SENTINEL}?")],
        sampling=GREEDY,
        stop=dspark.StopParams(max_tokens=8),
    )
    traced.wait_at_rest()
    text = log.text
    assert text.count("request ended") >= 2
    assert SENTINEL not in text
    for answer in (completion, chat):
        assert answer.text.strip(), "an answer without text would prove nothing"
        assert json.dumps(answer.text, ensure_ascii=False)[1:-1] not in text
        assert ", ".join(map(str, answer.token_ids[:4])) not in text
    prompt_ids = client.tokenize(PROMPT)
    assert ", ".join(map(str, prompt_ids[:4])) not in text


def test_a_refused_request_is_one_line_with_its_error_and_no_word_of_its_prompt(
    client: dspark.Client, log: Log
) -> None:
    with pytest.raises(dspark.BadRequestError):
        client.generate(
            PROMPT, stop=dspark.StopParams(max_tokens=10**6, stop=(SENTINEL,)), request_id="r-long"
        )
    with pytest.raises(dspark.BadRequestError):
        client.generate(PROMPT, stop=dspark.StopParams(stop=(SENTINEL * 50,)), request_id="r-stop")
    (line,) = log.of("r-long", "request ended")
    assert line["error"] == "CONTEXT_LENGTH_EXCEEDED"
    assert "finish_reason" not in line
    assert "limit" in line["cause"] or "holds" in line["cause"]
    assert SENTINEL not in log.text
