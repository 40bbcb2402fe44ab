"""What a process does between its start-up and its first request."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from services.cli.roles import settle


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


class Cycle:
    """Only a collection can free it."""

    def __init__(self) -> None:
        self.itself = self


def test_a_settled_process_keeps_what_start_up_left_out_of_later_collections() -> None:
    kept = Cycle()
    settle()
    assert gc.get_freeze_count() > 10_000
    assert not any(each is kept for each in gc.get_objects())


def test_what_comes_after_start_up_is_collected_as_ever() -> None:
    settle()
    freed: list[bool] = []

    class Late(Cycle):
        def __del__(self) -> None:
            freed.append(True)

    Late()
    gc.collect()
    assert freed == [True]
