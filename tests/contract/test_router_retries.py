"""A hand-off that fails is tried again where it may go well, and not where that is of no use; over sockets, with scripted
workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import (
    CapabilityRefused,
    CapacityExhausted,
    ContractMismatch,
    InvalidRequest,
    TransferFailed,
)
from services.router import attempt
from tests.support.chat_tokenizer import write_tokenizer
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.router_cluster import (
    SEQUENCE,
    STOP,
    Cluster,
    cluster,
    collect,
    error_of,
    generate_request,
    router_config,
    tokens_of,
)
from tests.support.waiting import WAIT_S


async def test_a_prefill_error_is_tried_on_the_other_worker(pairs: Cluster) -> None:
    pairs.prefills[0].failures = [TransferFailed("the wire was cut")]
    received = await collect(pairs.stub.Generate(generate_request(stop=STOP)))
    assert tokens_of(received) == SEQUENCE[:30]
    assert received[-1].completion.route.replacements == 1
    assert len(pairs.prefills[0].prefills) == len(pairs.prefills[1].prefills) == 1


@pytest.mark.parametrize("num_prefills", [1, 2])
async def test_a_decode_worker_that_prefill_cannot_reach_is_passed_by(
    tmp_path: Path, num_prefills: int
) -> None:
    """Only prefill was suspected, so that all attempts went to the same decode worker beside one that was well."""
    config = router_config(write_tokenizer(tmp_path))
    prefills = [FakePrefill(SEQUENCE) for _ in range(num_prefills)]
    decodes = [FakeDecode(SEQUENCE), FakeDecode(SEQUENCE)]
    async with cluster(config, prefills, decodes) as it:
        for prefill in prefills:
            prefill.unreachable = {it.decode_addresses[0]}
        received = await collect(it.stub.Generate(generate_request(stop=STOP)))
        assert tokens_of(received) == SEQUENCE[:30]
        assert received[-1].completion.route.replacements == 1
        assert len(decodes[1].admits) == 1


async def test_no_pair_is_tried_again_before_every_worker_was_tried_with_others(
    pairs: Cluster,
) -> None:
    for prefill, address in zip(pairs.prefills, pairs.decode_addresses, strict=True):
        prefill.unreachable = {address}
    received = await collect(pairs.stub.Generate(generate_request(stop=STOP)))
    assert tokens_of(received) == SEQUENCE[:30]
    assert received[-1].completion.route.replacements == 2


async def test_workers_that_do_not_match_are_tried_with_others(pairs: Cluster) -> None:
    """As while a deployment is replaced."""
    pairs.prefills[0].failures = [ContractMismatch("dtype is float32 here and bfloat16 there")]
    received = await collect(pairs.stub.Generate(generate_request(stop=STOP)))
    assert tokens_of(received) == SEQUENCE[:30]
    assert received[-1].completion.route.replacements == 1
    assert len(pairs.prefills[1].prefills) == 1


async def test_workers_of_which_none_match_end_the_request_by_name(pairs: Cluster) -> None:
    for prefill in pairs.prefills:
        prefill.failures = [ContractMismatch("dtype is float32 here")] * 3
    error = await error_of(pairs.stub.Generate(generate_request(stop=STOP)))
    assert error.reason == "CONTRACT_MISMATCH"
    assert sum(len(prefill.prefills) for prefill in pairs.prefills) == 3


async def test_an_only_pair_is_tried_again(system: Cluster) -> None:
    system.prefill.failures = [TransferFailed("the wire was cut")] * 2
    received = await collect(system.stub.Generate(generate_request(stop=STOP)))
    assert tokens_of(received) == SEQUENCE[:30]


async def test_a_handoff_that_only_decode_tells_of_is_tried_elsewhere(
    pairs: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "CAUSE_TIMEOUT_S", 0.0)
    silent, other = pairs.prefills
    silent.handoff_gate.clear()
    call = pairs.stub.Generate(generate_request(request_id="r", stop=STOP))
    first = await anext(aiter(call))
    pairs.decodes[0].fail("r", 0, TransferFailed("nothing came"))
    assert tokens_of([first, *await collect(call)]) == SEQUENCE[:30]
    assert len(other.prefills) == len(pairs.decodes[1].admits) == 1
    await silent.seen.until(lambda: silent.cancelled == ["r"])


async def test_an_overloaded_prefill_worker_is_no_failure(system: Cluster) -> None:
    system.prefill.failures = [CapacityExhausted("full")] * 5
    received = await collect(system.stub.Generate(generate_request(stop=STOP)))
    assert tokens_of(received) == SEQUENCE[:30]


async def test_the_clients_own_error_is_not_tried_again(pairs: Cluster) -> None:
    pairs.prefills[0].failures = [InvalidRequest("not like this")]
    error = await error_of(pairs.stub.Generate(generate_request(stop=STOP)))
    assert error.message == "not like this"
    assert not pairs.prefills[1].prefills


async def test_when_a_handoff_is_given_up_prefill_knows_why(
    system: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode hears of it first and can only say that it ended; that error would be tried again."""
    monkeypatch.setattr(attempt, "CAUSE_TIMEOUT_S", WAIT_S)
    system.prefill.start_gate.clear()
    system.prefill.failures = [CapabilityRefused("not this one")]
    call = system.stub.Generate(generate_request(request_id="r", stop=STOP))
    await system.prefill.seen.until(lambda: bool(system.prefill.prefills))
    system.decode.fail("r", 0, TransferFailed("the prefill worker gave up"))
    system.prefill.start_gate.set()
    assert (await error_of(call)).message == "not this one"


async def test_after_the_last_attempt_the_last_error_is_the_clients(system: Cluster) -> None:
    system.prefill.failures = [TransferFailed("the wire was cut")] * 9
    error = await error_of(system.stub.Generate(generate_request(stop=STOP)))
    assert error.reason == "KV_TRANSFER_FAILED"
    assert len(system.prefill.prefills) == 3
