"""`dspark generate`: one prompt, streamed to standard output; figures go to standard error."""

from __future__ import annotations

import dataclasses
import json
import sys

import dspark
from services.cli.client import Stopwatch, failures, open_client, sampling_params, stop_params
from services.cli.settings import GenerateSettings


def run(settings: GenerateSettings) -> int:
    text = sys.stdin.read() if settings.text == "-" else settings.text
    prompt = [dspark.ChatMessage(role="user", content=text)] if settings.chat else text
    stopwatch = Stopwatch()
    with (
        failures(),
        open_client(settings) as client,
        client.generate(
            prompt,
            sampling=sampling_params(settings.sampling),
            stop=stop_params(settings.sampling),
            stream=True,
        ) as stream,
    ):
        for event in stream:
            stopwatch.saw(len(event.token_ids))
            _show(event, settings.output)
        completion = stream.completion
    if settings.output == "json":
        print(json.dumps({"completion": dataclasses.asdict(completion)}, ensure_ascii=False))
        return 0
    print()
    if sys.stderr.isatty():
        print(f"[{stopwatch.figures(completion)}]", file=sys.stderr)
    return 0


def _show(event: dspark.GenerationEvent, output: str) -> None:
    if output == "json":
        print(json.dumps(dataclasses.asdict(event), ensure_ascii=False), flush=True)
    else:
        print(event.text, end="", flush=True)
