"""`dspark chat`: a conversation at the terminal. Ctrl-C ends an answer, Ctrl-D the conversation."""

from __future__ import annotations

import contextlib
import sys

import dspark
from services.cli.client import (
    Stopwatch,
    client_failure,
    failures,
    open_client,
    sampling_params,
    stop_params,
)
from services.cli.settings import ChatSettings

HELP = "Ctrl-C ends an answer, Ctrl-D the conversation; /reset forgets it, /exit leaves."


def run(settings: ChatSettings) -> int:
    with contextlib.suppress(ImportError):
        # Line editing and history for `input`; some Python builds come without.
        import readline  # noqa: F401
    with open_client(settings) as client:
        with failures():
            model = client.model_info().model
        print(f"{model} at {client.endpoint}. {HELP}")
        Conversation(client, settings).run()
    return 0


class Conversation:
    """The turns so far and the loop that adds to them."""

    def __init__(self, client: dspark.Client, settings: ChatSettings) -> None:
        self._client = client
        self._settings = settings
        self.messages: list[dspark.ChatMessage] = []
        self.reset()

    def reset(self) -> None:
        system = self._settings.system
        self.messages = [dspark.ChatMessage(role="system", content=system)] if system else []

    def run(self) -> None:
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                continue
            if line == "/exit":
                return
            if line == "/reset":
                self.reset()
            elif line.startswith("/"):
                print(HELP)
            elif line:
                self.turn(line)

    def turn(self, text: str) -> None:
        """Ask and show the answer. One that fails leaves the conversation as it was; a broken-off one is kept as shown."""
        asked = [*self.messages, dspark.ChatMessage(role="user", content=text)]
        try:
            answer = self._answer(asked)
        except dspark.DSparkError as error:
            print(f"\n{client_failure(error).cause}", file=sys.stderr)
            return
        self.messages = [*asked, dspark.ChatMessage(role="assistant", content=answer)]

    def _answer(self, messages: list[dspark.ChatMessage]) -> str:
        stopwatch = Stopwatch()
        with self._client.chat(
            messages,
            sampling=sampling_params(self._settings.sampling),
            stop=stop_params(self._settings.sampling),
            stream=True,
        ) as stream:
            try:
                for event in stream:
                    stopwatch.saw(len(event.token_ids))
                    print(event.text, end="", flush=True)
            except KeyboardInterrupt:
                print(" [ended]")
                return stream.text
            print(f"\n[{stopwatch.figures(stream.completion)}]")
            return stream.text
