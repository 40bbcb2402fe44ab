"""Where a request goes first."""

from __future__ import annotations

from services.router.policy import WorkerLoad, WorkerState, rank


def worker(
    address: str,
    *,
    pending: int = 0,
    running: int = 0,
    state: WorkerState = WorkerState.READY,
    model: str = "m",
) -> WorkerLoad:
    return WorkerLoad(
        address=address,
        state=state,
        model_fingerprint=model,
        pending_tokens=pending,
        running_requests=running,
    )


def test_the_worker_with_the_fewest_pending_tokens_comes_first() -> None:
    workers = [worker("a", pending=900), worker("b", pending=100), worker("c", pending=500)]
    assert rank(workers, model_fingerprint="m") == ["b", "c", "a"]


def test_equal_tokens_are_decided_by_requests_and_then_by_the_configured_order() -> None:
    workers = [worker("a", running=2), worker("b", running=1), worker("c", running=1)]
    assert rank(workers, model_fingerprint="m") == ["b", "c", "a"]


def test_workers_that_are_not_ready_are_left_out() -> None:
    workers = [worker(state.value, state=state) for state in WorkerState]
    assert rank(workers, model_fingerprint="m") == ["ready"]


def test_workers_with_another_model_are_left_out() -> None:
    assert rank([worker("a", model="x"), worker("b")], model_fingerprint="m") == ["b"]


def test_where_a_request_failed_is_the_last_resort() -> None:
    workers = [worker("a"), worker("b", pending=10_000)]
    assert rank(workers, model_fingerprint="m", blame={"a": 1}) == ["b", "a"]


def test_the_more_a_worker_is_to_blame_the_later_it_comes() -> None:
    workers = [worker("a"), worker("b", pending=10_000)]
    assert rank(workers, model_fingerprint="m", blame={"a": 2, "b": 1}) == ["b", "a"]


def test_an_only_worker_is_used_though_the_request_failed_there() -> None:
    assert rank([worker("a")], model_fingerprint="m", blame={"a": 1}) == ["a"]
