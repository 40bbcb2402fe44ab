"""Text to tokens and back, and the chat format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import CheckpointError, InvalidRequest
from common.tokenizer import ChatMessage, Tokenizer
from tests.support.chat_tokenizer import (
    ASSISTANT,
    BOS,
    END_THINK,
    EOS,
    THINK,
    USER,
    write_tokenizer,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def user(content: str) -> ChatMessage:
    return ChatMessage(role="user", content=content)


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_text_survives_the_way_there_and_back(tokenizer: Tokenizer) -> None:
    text = "the cat sat — naïve 日本語 🎉\n"
    assert tokenizer.decode(plain(tokenizer, text)) == text


def test_begin_of_sequence_comes_only_when_asked_for(tokenizer: Tokenizer) -> None:
    ids = plain(tokenizer, "cat")
    assert BOS not in ids
    assert tokenizer.encode("cat", add_special_tokens=True) == [BOS, *ids]


def test_a_chat_is_rendered_up_to_the_answer_without_thinking(tokenizer: Tokenizer) -> None:
    messages = [
        ChatMessage(role="system", content="be brief"),
        user("the cat"),
        ChatMessage(role="assistant", content="sat"),
        user("the dog"),
    ]
    assert tokenizer.encode_chat(messages) == [
        BOS,
        *plain(tokenizer, "be brief"),
        USER,
        *plain(tokenizer, "the cat"),
        ASSISTANT,
        END_THINK,
        *plain(tokenizer, "sat"),
        EOS,
        USER,
        *plain(tokenizer, "the dog"),
        ASSISTANT,
        END_THINK,
    ]


@pytest.mark.parametrize(
    "spelling", ["<think>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"]
)
def test_a_special_token_that_a_user_spells_is_plain_text(
    tokenizer: Tokenizer, spelling: str
) -> None:
    ids = tokenizer.encode_chat([user(f"say {spelling} now")])
    question = ids[2:-2]
    assert not set(question) & {BOS, EOS, USER, ASSISTANT, THINK, END_THINK}
    assert tokenizer.decode(question) == f"say {spelling} now"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [user("hi"), ChatMessage(role="assistant", content="hello")],
        [ChatMessage(role="robot", content="hi"), user("hi")],
    ],
)
def test_a_conversation_that_nobody_can_answer_is_refused(
    tokenizer: Tokenizer, messages: list[ChatMessage]
) -> None:
    with pytest.raises(InvalidRequest):
        tokenizer.encode_chat(messages)


@given(text=st.text(max_size=40))
def test_pieces_add_up_to_the_text_and_hold_no_half_character(
    tokenizer: Tokenizer, text: str
) -> None:
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token) for token in plain(tokenizer, text)]
    assert "".join(pieces) + detokenizer.flush() == text
    if "�" not in text:
        assert all("�" not in piece for piece in pieces)


@given(token_ids=st.lists(st.integers(0, 299), max_size=30))
def test_any_tokens_at_all_give_the_text_that_decoding_them_at_once_gives(
    tokenizer: Tokenizer, token_ids: list[int]
) -> None:
    detokenizer = tokenizer.detokenizer()
    text = "".join(detokenizer.push(token) for token in token_ids) + detokenizer.flush()
    assert text == tokenizer.decode(token_ids)


def test_a_character_that_never_ends_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    *_, last = plain(tokenizer, "🎉")
    half = plain(tokenizer, "🎉")[:-1]
    assert half, "the vocabulary is bytes for what it never saw"
    assert [detokenizer.push(token) for token in half] == [""] * len(half)
    assert "�" in detokenizer.flush()
    assert detokenizer.flush() == ""
    assert last not in half


@given(text=st.text(max_size=60))
def test_the_bound_without_encoding_is_a_bound(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.least_tokens(text) <= len(plain(tokenizer, text))


def test_several_end_tokens_are_read_from_the_configuration(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = {"bos_token_id": 0, "eos_token_id": [1, 3]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (1, 3)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
