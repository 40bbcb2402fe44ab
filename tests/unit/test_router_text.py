"""Text as it is shown: whole characters only, and never a part of a stop string."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.router.text import TextStream


class Pieces:
    """A detokenizer whose token i is the i-th piece of a text."""

    def __init__(self, pieces: list[str], tail: str = "") -> None:
        self._pieces = pieces
        self._tail = tail

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return self._tail


def run(
    pieces: list[str], stops: tuple[str, ...], min_tokens: int = 0
) -> tuple[list[str], str | None]:
    """What is shown after each token, and the stop string that ended it."""
    text = TextStream(Pieces(pieces), stops)
    shown: list[str] = []
    for i in range(len(pieces)):
        matched = text.push(i, may_stop=i + 1 >= min_tokens)
        if matched is not None:
            return [*shown, text.take()], matched
        shown.append(text.take())
    text.release()
    return [*shown, text.take()], None


def expected(pieces: list[str], stops: tuple[str, ...], min_tokens: int) -> tuple[str, str | None]:
    """The slow twin: looks for the first allowed end of any stop string in the whole text, character by character."""
    text = ""
    for i, piece in enumerate(pieces):
        for char in piece:
            text += char
            ending = [stop for stop in stops if text.endswith(stop)]
            if ending and i + 1 >= min_tokens:
                stop = max(ending, key=len)
                return text[: len(text) - len(stop)], stop
    return text, None


ALPHABET = "ab"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4).map(tuple)
PIECES = st.lists(st.text(ALPHABET, max_size=4), max_size=20)


@given(pieces=PIECES, stops=STOPS, min_tokens=st.integers(0, 12))
def test_any_split_into_tokens_gives_what_a_search_of_the_whole_text_gives(
    pieces: list[str], stops: tuple[str, ...], min_tokens: int
) -> None:
    shown, matched = run(pieces, stops, min_tokens)
    assert ("".join(shown), matched) == expected(pieces, stops, min_tokens)


@given(pieces=PIECES, stops=STOPS)
def test_exactly_what_may_begin_a_stop_string_is_held_back(
    pieces: list[str], stops: tuple[str, ...]
) -> None:
    shown, matched = run(pieces, stops)
    num_tokens = len(shown) - 1
    for i in range(num_tokens):
        text = "".join(pieces[: i + 1])
        held = max(
            (k for stop in stops for k in range(1, len(stop)) if text.endswith(stop[:k])), default=0
        )
        assert "".join(shown[: i + 1]) == text[: len(text) - held]
    assert matched is not None or "".join(shown) == "".join(pieces)


def test_text_that_cannot_become_a_stop_string_is_shown_at_once() -> None:
    shown, _ = run(["abc", "d"], ("xyz",))
    assert shown == ["abc", "d", ""]


def test_a_possible_stop_string_is_held_back_until_it_is_refuted() -> None:
    shown, matched = run(["say s", "to", "ry"], ("stop",))
    assert shown == ["say ", "", "story", ""]
    assert matched is None


def test_what_is_held_at_the_end_is_shown() -> None:
    shown, _ = run(["sto"], ("stop",))
    assert shown == ["", "sto"]


def test_nothing_after_a_stop_string_is_shown() -> None:
    shown, matched = run(["one st", "op two"], ("stop",))
    assert "".join(shown) == "one "
    assert matched == "stop"


def test_of_two_stop_strings_the_one_that_ends_first_wins() -> None:
    shown, matched = run(["xabcd"], ("abcd", "bc"))
    assert ("".join(shown), matched) == ("xa", "bc")


def test_of_two_that_end_together_the_longer_wins() -> None:
    shown, matched = run(["xabc"], ("bc", "abc"))
    assert ("".join(shown), matched) == ("x", "abc")


def test_an_incomplete_character_is_shown_at_the_end_only() -> None:
    text = TextStream(Pieces(["a", ""], tail="�"), ("b",))
    text.push(0, may_stop=True)
    text.push(1, may_stop=True)
    assert text.take() == "a"
    text.release()
    assert text.take() == "�"
