"""Text of a request as it may be shown: whole characters, and never a part of a stop string.

Knows characters and stop strings; never sees what ends a request otherwise.
"""

from __future__ import annotations

from typing import Protocol


class IncrementalText(Protocol):
    """What `common.tokenizer.Detokenizer` is to this file."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class TextStream:
    """Text of one request. `push` every token in order, `take` what may be shown, `close` once at the end."""

    def __init__(self, detokenizer: IncrementalText, stops: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._matchers = tuple(_StopMatcher(stop) for stop in stops)
        self._ready = ""
        self._held = ""
        """The longest end of the text that may turn out to begin a stop string."""

    def push(self, token_id: int, *, may_stop: bool) -> str | None:
        """Add a token's text; the stop string that it completes, if it may stop here.

        The match that ends first wins, and of those that end together the longest. Nothing of it, and nothing after
        it, is ever shown.
        """
        text = self._detokenizer.push(token_id)
        if not self._matchers:
            self._ready += text
            return None
        for i, char in enumerate(text):
            matched = [matcher.stop for matcher in self._matchers if matcher.advance(char)]
            if matched and may_stop:
                stop = max(matched, key=len)
                shown = self._held + text[: i + 1]
                self._ready += shown[: len(shown) - len(stop)]
                self._held = ""
                return stop
        self._hold_back(self._held + text)
        return None

    def take(self) -> str:
        """Text that may be shown and was not taken before."""
        ready, self._ready = self._ready, ""
        return ready

    def release(self) -> None:
        """The request ended for another reason: what was held back is text like any other."""
        self._ready += self._held + self._detokenizer.flush()
        self._held = ""

    def _hold_back(self, text: str) -> None:
        num_held = max(matcher.num_matched for matcher in self._matchers)
        num_ready = len(text) - num_held
        self._ready += text[:num_ready]
        self._held = text[num_ready:]


class _StopMatcher:
    """Knuth-Morris-Pratt: how much of one stop string the text ends with, at one step per character."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        """Length of the longest proper beginning of the stop string that the text ends with."""
        self._borders = _borders(stop)

    def advance(self, char: str) -> bool:
        """True when the text now ends with the whole stop string."""
        while self.num_matched and self.stop[self.num_matched] != char:
            self.num_matched = self._borders[self.num_matched - 1]
        if self.stop[self.num_matched] == char:
            self.num_matched += 1
        if self.num_matched < len(self.stop):
            return False
        self.num_matched = self._borders[-1]
        return True


def _borders(stop: str) -> list[int]:
    """For each beginning of `stop`, the length of its longest proper beginning that it also ends with."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        if stop[i] == stop[length]:
            length += 1
        borders[i] = length
    return borders
