"""What only the admin key opens: profiles of an engine at work."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from common.errors import ConfigError
from common.rpc import admin_servicer
from common.rpc.admin_key import bearer
from common.rpc.status import error_of_call
from dspark.v1 import admin_service_pb2 as pb
from dspark.v1.admin_service_pb2_grpc import AdminServiceStub
from services.decode.app import serve as serve_decode
from services.decode.config import DecodeConfig
from tests.support.fake_engine import FakeEngine, loaded
from tests.support.handoff_cluster import ENGINE
from tests.support.small_cache import small_layout
from tests.support.waiting import until
from tests.support.worker_apps import App, begin, running

WAIT_S = 30.0
KEY = "correct-horse"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "admin-key"
    file.write_text(KEY + "\n")
    return file


async def profile(
    app: App, key: str = KEY, *, max_steps: int = 3, max_seconds: float = WAIT_S
) -> list[pb.ProfileResponse]:
    stub: Any = AdminServiceStub(app.channel)
    request = pb.ProfileRequest(max_steps=max_steps, max_seconds=max_seconds)
    return [
        answer async for answer in stub.Profile(request, metadata=bearer(key), timeout=2 * WAIT_S)
    ]


async def refusal(app: App, key: str = KEY, **bounds: Any) -> tuple[grpc.StatusCode, str, str]:
    """Code, reason and message."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await profile(app, key, **bounds)
    error = error_of_call(caught.value, peer="decode")
    return caught.value.code(), error.reason, error.message


async def test_without_the_key_nothing_is_recorded(key_file: Path) -> None:
    async with running("decode", admin_key_file=key_file) as app:
        for wrong in ("", "correct", KEY + "x"):
            code, reason, message = await refusal(app, wrong)
            assert (code, reason) == (grpc.StatusCode.PERMISSION_DENIED, "ADMIN_KEY_REQUIRED")
            assert KEY not in message
        stub: Any = AdminServiceStub(app.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Profile(pb.ProfileRequest(max_steps=1, max_seconds=1.0)):
                pass
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_worker_that_was_given_no_key_opens_to_none() -> None:
    async with running("prefill") as app:
        for key in ("", KEY, "None"):
            code, reason, message = await refusal(app, key)
            assert (code, reason) == (grpc.StatusCode.PERMISSION_DENIED, "ADMIN_KEY_REQUIRED")
        assert "start it with admin.key_file" in message


async def test_a_key_can_be_replaced_while_the_worker_runs(key_file: Path) -> None:
    async with running("decode", admin_key_file=key_file) as app:
        await asyncio.to_thread(key_file.write_text, "another")
        assert (await refusal(app))[1] == "ADMIN_KEY_REQUIRED"
        assert (await refusal(app, "another", max_steps=0))[1] == "INVALID_PARAMETER"
        await asyncio.to_thread(key_file.write_text, "")
        assert (await refusal(app, ""))[1] == "ADMIN_KEY_REQUIRED"


@pytest.mark.parametrize("content", [None, "", " \n"])
async def test_a_key_file_without_a_key_is_refused_at_the_start(
    tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "admin-key"
    if content is not None:
        file.write_text(content)
    config = DecodeConfig(model="fake", engine=ENGINE, port=0, admin_key_file=file)
    with pytest.raises(ConfigError, match="admin key"):
        await serve_decode(config, stop=asyncio.Event(), loaded=loaded(FakeEngine(small_layout())))


@pytest.mark.parametrize(
    ("bounds", "what"),
    [
        ({"max_steps": 0}, "max_steps is 0; give 1 to 1000"),
        ({"max_steps": 1001}, "max_steps is 1001; give 1 to 1000"),
        ({"max_seconds": 0.0}, "max_seconds is 0.0"),
        ({"max_seconds": 61.0}, "max_seconds is 61.0"),
        ({"max_seconds": float("nan")}, "max_seconds is nan"),
    ],
)
async def test_bounds_that_are_none_are_refused_by_name(
    key_file: Path, bounds: dict[str, Any], what: str
) -> None:
    async with running("decode", admin_key_file=key_file) as app:
        code, _, message = await refusal(app, **bounds)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert what in message


async def test_an_idle_engine_gives_no_trace(key_file: Path) -> None:
    async with running("decode", admin_key_file=key_file) as app:
        code, reason, _ = await refusal(app, max_seconds=0.05)
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NOTHING_RECORDED")


async def test_the_trace_of_steps_that_run_meanwhile_comes_in_pieces(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_servicer, "PIECE_BYTES", 100)
    async with running("decode", computes_prompts=True, admin_key_file=key_file) as app:
        app.engine.permits = threading.Semaphore(0)
        call = await begin(app, "decode")
        await until(lambda: app.engine.num_gated > 0)
        recording = asyncio.create_task(profile(app, max_steps=1))
        app.engine.permits.release(1000)
        answer, *pieces = await asyncio.wait_for(recording, WAIT_S)
        assert answer.profile.num_steps >= 1
        assert len(pieces) > 1
        assert sum(len(piece.trace) for piece in pieces) == answer.profile.num_bytes
        trace = gzip.decompress(b"".join(piece.trace for piece in pieces))
        assert "traceEvents" in json.loads(trace)
        call.cancel()
