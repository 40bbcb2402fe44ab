"""What a hand-off says of its time on the wire."""

from __future__ import annotations

from services.prefill.spans import Span, Spans


def test_wire_time_is_counted_from_the_moment_that_is_asked_for() -> None:
    spans = Spans()
    spans.add(Span(began=1.0, ended=2.0, num_bytes=10))
    spans.add(Span(began=3.0, ended=5.0, num_bytes=20))
    spans.add(Span(began=6.0, ended=6.5, num_bytes=40))
    assert (spans.num_bytes, spans.seconds) == (70, 3.5)
    assert [spans.seconds_after(at) for at in (0.0, 2.0, 4.0, 5.0, 7.0)] == [
        3.5,
        2.5,
        1.5,
        0.5,
        0.0,
    ]
    assert [spans.bytes_after(at) for at in (0.0, 2.0, 4.0, 5.0, 7.0)] == [70, 60, 60, 40, 0]
