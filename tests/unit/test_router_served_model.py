"""The limits that requests are checked against."""

from __future__ import annotations

from dspark.v1 import worker_pb2
from services.router.served_model import served_model


def info(*, model: str = "m", context: int = 4096, pages: int = 0) -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(
        model_fingerprint=model,
        max_context_length=context,
        vocab_size=300,
        draft_length=7,
        num_pages=pages,
    )


def test_the_smallest_context_of_the_workers_counts() -> None:
    assert (
        served_model("m", [info(), info(context=1024), info(context=2048)]).max_context_length
        == 1024
    )


def test_workers_with_another_model_do_not_count() -> None:
    assert served_model("m", [info(), info(model="x", context=10)]).max_context_length == 4096


def test_a_context_that_no_cache_can_hold_is_not_promised() -> None:
    """A request that needs more pages than there are would be refused as overload, after a long wait."""
    assert served_model("m", [info(pages=3)]).max_context_length == 384
