"""The conversation of `dspark chat`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

import dspark
from services.cli.commands.chat import Conversation
from services.cli.settings import ChatSettings

DONE = dspark.Completion(
    request_id="r",
    text="",
    token_ids=(),
    logprobs=(),
    finish_reason="stop",
    matched_stop=None,
    matched_token_id=None,
    usage=dspark.Usage(
        prompt_tokens=1, completion_tokens=4, rounds=1, draft_tokens=3, accepted_tokens=2
    ),
    timings=dspark.Timings(queue_s=0, prefill_s=0, handoff_s=0, time_to_first_token_s=0, total_s=0),
    route=dspark.Route(
        prefill_worker="", decode_worker="", transfer_engine="", replacements=0, drafter_fallback=""
    ),
)


class FakeStream:
    """Yields texts, then raises what it was given, if anything."""

    completion = DONE

    def __init__(self, texts: Sequence[str], error: BaseException | None) -> None:
        self.text = ""
        self._texts = texts
        self._error = error

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __iter__(self) -> Iterator[dspark.GenerationEvent]:
        for text in self._texts:
            self.text += text
            yield dspark.GenerationEvent(token_ids=(1,), text=text)
        if self._error is not None:
            raise self._error


class FakeClient:
    """Answers from a list and keeps what it was asked."""

    def __init__(self, *answers: tuple[Sequence[str], BaseException | None]) -> None:
        self._answers = iter(answers)
        self.asked: list[list[tuple[str, str]]] = []

    def chat(self, messages: Sequence[dspark.ChatMessage], **_: Any) -> FakeStream:
        self.asked.append([(message.role, message.content) for message in messages])
        return FakeStream(*next(self._answers))


def conversation(client: FakeClient, **settings: Any) -> Conversation:
    return Conversation(cast(dspark.Client, client), ChatSettings(**settings))


def test_each_turn_sends_the_whole_conversation() -> None:
    client = FakeClient((["Hi", "!"], None), (["Fine."], None))
    talk = conversation(client, system="be brief")
    talk.turn("hello")
    talk.turn("how are you?")
    assert client.asked[1] == [
        ("system", "be brief"),
        ("user", "hello"),
        ("assistant", "Hi!"),
        ("user", "how are you?"),
    ]


def test_ctrl_c_ends_the_answer_and_keeps_what_was_shown() -> None:
    client = FakeClient((["Once ", "upon"], KeyboardInterrupt()))
    talk = conversation(client)
    talk.turn("a story")
    assert talk.messages[-1] == dspark.ChatMessage(role="assistant", content="Once upon")


def test_a_turn_that_fails_is_one_line_and_leaves_the_conversation_as_it_was(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = dspark.RateLimitError("everything is\nfull", code="RESOURCE_EXHAUSTED")
    talk = conversation(FakeClient(([], error)))
    talk.turn("hello")
    assert talk.messages == []
    assert capsys.readouterr().err == "\neverything is full\n"


def test_commands_and_the_end_of_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["hello", "/reset", "/unknown", "", "again"])

    def read_line(_: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read_line)
    client = FakeClient((["Hi"], None), (["Hi again"], None))
    conversation(client).run()
    assert client.asked == [[("user", "hello")], [("user", "again")]]
    assert "/reset forgets it" in capsys.readouterr().out
