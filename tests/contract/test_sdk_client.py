"""Claims about both clients against a server of twenty lines that plays InferenceService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

import dspark
from dspark.v1 import inference_service_pb2 as pb
from dspark.v1 import inference_service_pb2_grpc, types_pb2, worker_pb2
from tests.support.waiting import WAIT_S

QUICK_RETRY = dspark.RetryConfig(max_attempts=3, initial_backoff_s=0.01, max_backoff_s=0.02)
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass
class FakeRouter(inference_service_pb2_grpc.InferenceServiceServicer):
    """Answers with two rounds and a completion, unless told to fail before or after the first round."""

    failures: list[status_pb2.Status] = field(default_factory=list)
    failure_after_first_round: status_pb2.Status | None = None
    endless: bool = False
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        try:
            await self._enter(context)
            yield pb.GenerateResponse(token_ids=[1, 2], text="Hel", logprobs=[LOGPROB])
            if self.failure_after_first_round is not None:
                status = rpc_status.to_status(self.failure_after_first_round)
                await context.abort_with_status(status)
            if self.endless:
                await asyncio.Event().wait()
            yield pb.GenerateResponse(token_ids=[3], text="lo", completion=COMPLETION)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        await self._enter(context)
        return pb.AbortResponse(found=request.request_id == "known")

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        await self._enter(context)
        text = request.text or request.chat.messages[-1].content
        return pb.TokenizeResponse(token_ids=[0] * request.add_special_tokens + [*map(ord, text)])

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        await self._enter(context)
        return pb.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        await self._enter(context)
        return pb.GetModelInfoResponse(model="tiny", eos_token_ids=[1], draft_length=7)

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        await self._enter(context)
        info = worker_pb2.WorkerInfo(
            role="decode",
            num_slots=16,
            mesh=worker_pb2.WorkerMesh(dp=2, tp=4, ep=8, num_ranks=8, device="npu"),
            memory=[
                worker_pb2.RankMemory(
                    rank=7,
                    device="npu:7",
                    claims=[worker_pb2.MemoryClaim(owner="csa", kind="pages", num_bytes=640)],
                )
            ],
        )
        return pb.GetServerInfoResponse(
            role="router", details={"policy": "least loaded"}, workers={"a:1": info}
        )

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: Context
    ) -> pb.ListWorkersResponse:
        await self._enter(context)
        worker = pb.Worker(
            address="a:1", role=pb.WORKER_ROLE_DECODE, state=pb.WORKER_STATE_DRAINING
        )
        return pb.ListWorkersResponse(workers=[worker])

    async def _enter(self, context: Context) -> None:
        sent = context.invocation_metadata() or ()
        self.metadata.append({key: str(value) for key, value in sent})
        if self.failures:
            await context.abort_with_status(rpc_status.to_status(self.failures.pop(0)))


LOGPROB = types_pb2.TokenLogprob(
    token_id=1, logprob=-0.5, top=[types_pb2.TopLogprob(token_id=1, logprob=-0.5)]
)
COMPLETION = pb.Completion(
    finish_reason=types_pb2.FINISH_REASON_STOP,
    matched_stop="END",
    usage=pb.Usage(
        prompt_tokens=4, completion_tokens=3, rounds=1, draft_tokens=7, accepted_tokens=1
    ),
    timings=pb.Timings(total_s=0.5),
    route=pb.Route(decode_worker="d:1", transfer_engine="grpc"),
)


def failure(
    code: grpc.StatusCode, reason: str = "", *, message: str = "no", retry_after_s: int = 0
) -> status_pb2.Status:
    status = status_pb2.Status(code=code.value[0], message=message)
    if reason:
        info = error_details_pb2.ErrorInfo(reason=reason, domain="dspark", metadata={"limit": "8"})
        status.details.append(packed(info))
    if retry_after_s:
        delay = duration_pb2.Duration(seconds=retry_after_s)
        status.details.append(packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status


def packed(detail: Any) -> any_pb2.Any:
    box = any_pb2.Any()
    box.Pack(detail)
    return box


@dataclass
class Served:
    """A fake router behind a socket, and calls of both clients to it."""

    router: FakeRouter
    endpoint: str

    async def sync(self, use: Callable[[dspark.Client], Any], **options: Any) -> Any:
        """Run `use` in a thread, since the fake lives on this loop."""

        def call() -> Any:
            with dspark.Client(
                self.endpoint, retry=QUICK_RETRY, timeout=WAIT_S, **options
            ) as client:
                return use(client)

        return await asyncio.to_thread(call)

    async def aio(self, use: Callable[[dspark.AsyncClient], Awaitable[Any]], **options: Any) -> Any:
        async with dspark.AsyncClient(
            self.endpoint, retry=QUICK_RETRY, timeout=WAIT_S, **options
        ) as client:
            return await use(client)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    router, server = FakeRouter(), grpc.aio.server()
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield Served(router, f"127.0.0.1:{port}")
    await server.stop(None)


@pytest.fixture(params=["sync", "aio"])
def call(request: pytest.FixtureRequest, served: Served) -> Callable[..., Awaitable[Any]]:
    """Calls a method by name on either client."""

    async def run(method: str, *args: Any, client: dict[str, Any] | None = None, **kw: Any) -> Any:
        which = served.sync if request.param == "sync" else served.aio
        return await which(lambda it: getattr(it, method)(*args, **kw), **(client or {}))

    return run


Call = Callable[..., Awaitable[Any]]


async def test_a_whole_completion_joins_the_rounds(call: Call, served: Served) -> None:
    done = await call("generate", "hi", request_id="mine")
    assert (done.text, done.token_ids, done.finish_reason) == ("Hello", (1, 2, 3), "stop")
    assert (done.matched_stop, done.matched_token_id) == ("END", None)
    assert done.usage.mean_accepted_length == 2.0
    assert done.route.transfer_engine == "grpc"
    assert done.logprobs[0].top[0].token_id == 1
    assert done.request_id == "mine"
    assert served.router.requests[0].request_id == "mine"


async def test_chat_sends_messages(call: Call, served: Served) -> None:
    await call("chat", [{"role": "user", "content": "hi"}], model="tiny")
    (request,) = served.router.requests
    assert request.chat.messages[0].role == "user"
    assert request.model == "tiny"


async def test_the_small_questions_are_answered_in_plain_values(call: Call) -> None:
    assert await call("abort", "known") is True
    assert await call("abort", "unknown") is False
    assert await call("tokenize", "ab", add_special_tokens=True) == [0, 97, 98]
    assert await call("tokenize", [{"role": "user", "content": "a"}]) == [97]
    assert await call("detokenize", [97, 98]) == "ab"
    assert (await call("model_info")).draft_length == 7
    server = await call("server_info")
    assert server.details == {"policy": "least loaded"}
    decode = server.workers["a:1"]
    assert (decode.role, decode.num_slots) == ("decode", 16)
    assert decode.mesh == dspark.WorkerMesh(dp=2, tp=4, ep=8, num_ranks=8, device="npu")
    claim = dspark.MemoryClaim(owner="csa", kind="pages", num_bytes=640)
    assert decode.memory == (dspark.RankMemory(rank=7, device="npu:7", claims=(claim,)),)
    (worker,) = await call("workers")
    assert (worker.address, worker.role, worker.state) == ("a:1", "decode", "draining")


async def test_every_call_carries_its_id_and_the_key(call: Call, served: Served) -> None:
    await call("generate", "hi", request_id="mine", client={"api_key": "secret"})
    await call("model_info")
    generate, model_info = served.router.metadata
    assert generate["x-request-id"] == "mine"
    assert generate["authorization"] == "Bearer secret"
    assert generate["user-agent"].startswith(f"dspark-client/{dspark.__version__}")
    assert model_info["x-request-id"]
    assert "authorization" not in model_info


@pytest.mark.parametrize("method", ["generate", "chat"])
async def test_a_request_may_belong_to_the_callers_trace(
    call: Call, served: Served, method: str
) -> None:
    prompt = "hi" if method == "generate" else [{"role": "user", "content": "hi"}]
    await call(method, prompt, traceparent=f"00-{'4' * 32}-{'7' * 16}-01")
    await call(method, prompt)
    with_trace, without = served.router.metadata
    assert with_trace["traceparent"] == f"00-{'4' * 32}-{'7' * 16}-01"
    assert "traceparent" not in without


S = grpc.StatusCode
MAPPING: list[tuple[status_pb2.Status, type[dspark.DSparkError]]] = [
    (failure(S.INVALID_ARGUMENT, "INVALID_PARAMETER"), dspark.BadRequestError),
    (failure(S.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED"), dspark.ContextLengthExceededError),
    (failure(S.FAILED_PRECONDITION, "FEATURE_DISABLED"), dspark.BadRequestError),
    (failure(S.OUT_OF_RANGE), dspark.BadRequestError),
    (failure(S.UNIMPLEMENTED), dspark.BadRequestError),
    (failure(S.UNAUTHENTICATED, "INVALID_API_KEY"), dspark.AuthenticationError),
    (failure(S.PERMISSION_DENIED, "ADMIN_KEY_REQUIRED"), dspark.AuthenticationError),
    (failure(S.NOT_FOUND, "MODEL_NOT_FOUND"), dspark.NotFoundError),
    (failure(S.RESOURCE_EXHAUSTED, "QUEUE_FULL"), dspark.RateLimitError),
    (failure(S.RESOURCE_EXHAUSTED, message="message larger than max"), dspark.BadRequestError),
    (failure(S.ABORTED, "STREAM_INTERRUPTED"), dspark.StreamInterruptedError),
    (failure(S.CANCELLED, "ABORTED"), dspark.RequestAbortedError),
    (failure(S.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"), dspark.APITimeoutError),
    (failure(S.INTERNAL), dspark.InternalError),
    (failure(S.UNKNOWN), dspark.InternalError),
    (failure(S.DATA_LOSS), dspark.InternalError),
]


@pytest.mark.parametrize("method", ["generate", "tokenize"])
@pytest.mark.parametrize(("status", "kind"), MAPPING, ids=lambda it: getattr(it, "__name__", ""))
async def test_each_status_has_its_error(
    call: Call, served: Served, method: str, status: status_pb2.Status, kind: type[Exception]
) -> None:
    served.router.failures = [status]
    with pytest.raises(dspark.DSparkError) as caught:
        await call(method, "hi")
    assert type(caught.value) is kind
    assert caught.value.request_id == served.router.metadata[0]["x-request-id"]
    assert caught.value.message == status.message


async def test_an_error_keeps_reason_numbers_and_delay(call: Call, served: Served) -> None:
    served.router.failures = [failure(S.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after_s=3)]
    with pytest.raises(dspark.RateLimitError) as caught:
        await call("generate", "hi", request_id="mine")
    error = caught.value
    assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
    assert (error.metadata, error.retry_after_s) == ({"limit": "8"}, 3.0)
    assert str(error) == "no (request mine)"


async def test_unavailable_is_tried_again_before_the_first_token(
    call: Call, served: Served
) -> None:
    served.router.failures = [failure(S.UNAVAILABLE, "DRAINING")] * 2
    assert (await call("generate", "hi")).text == "Hello"
    assert len(served.router.requests) == 3
    assert len({request.request_id for request in served.router.requests}) == 1


async def test_a_large_prompt_is_tried_again_too(call: Call, served: Served) -> None:
    served.router.failures = [failure(S.UNAVAILABLE, "DRAINING")]
    assert (await call("generate", [99_999] * 200_000)).text == "Hello"
    assert len(served.router.requests) == 2


async def test_a_server_that_stays_unavailable_is_told_from_one_that_is_not_there(
    call: Call, served: Served
) -> None:
    served.router.failures = [failure(S.UNAVAILABLE, "NO_READY_WORKERS")] * 3
    with pytest.raises(dspark.UnavailableError) as caught:
        await call("generate", "hi")
    assert caught.value.reason == "NO_READY_WORKERS"
    assert len(served.router.requests) == 3
    served.endpoint = "127.0.0.1:1"
    with pytest.raises(dspark.APIConnectionError):
        await call("generate", "hi")


@pytest.mark.parametrize("code", [S.UNAVAILABLE, S.ABORTED])
async def test_nothing_is_repeated_after_the_first_token(
    call: Call, served: Served, code: grpc.StatusCode
) -> None:
    served.router.failure_after_first_round = failure(code, "WORKER_LOST")
    with pytest.raises(dspark.StreamInterruptedError) as caught:
        await call("generate", "hi")
    assert (caught.value.text, caught.value.token_ids) == ("Hel", (1, 2))
    assert caught.value.reason == "WORKER_LOST"
    assert len(served.router.requests) == 1


async def test_the_deadline_ends_a_request_on_both_sides(call: Call, served: Served) -> None:
    served.router.endless = True
    for timeout_s in (0.2, 2.0, 20.0):
        with pytest.raises(dspark.APITimeoutError):
            await call("generate", "hi", timeout=timeout_s)
        if served.router.requests:  # a busy machine may need longer for that
            break
    await asyncio.wait_for(served.router.cancelled.wait(), WAIT_S)


async def test_a_stream_brings_each_round_and_then_the_completion(served: Served) -> None:
    def use(client: dspark.Client) -> None:
        with client.generate("hi", stream=True) as stream:
            with pytest.raises(RuntimeError, match="read to its end"):
                _ = stream.completion
            assert [event.text for event in stream] == ["Hel", "lo"]
            assert stream.completion.text == stream.text == "Hello"
            assert stream.completion.request_id == stream.request_id

    async def use_aio(client: dspark.AsyncClient) -> None:
        async with client.generate("hi", stream=True) as stream:
            with pytest.raises(RuntimeError, match="read to its end"):
                _ = stream.completion
            assert [event.token_ids async for event in stream] == [(1, 2), (3,)]
            assert stream.completion.token_ids == stream.token_ids == (1, 2, 3)

    await served.sync(use)
    await served.aio(use_aio)


async def test_leaving_the_block_cancels_the_request(served: Served) -> None:
    def use(client: dspark.Client) -> None:
        with client.generate("hi", stream=True) as stream:
            assert next(stream).text == "Hel"

    async def use_aio(client: dspark.AsyncClient) -> None:
        async with client.chat([{"role": "user", "content": "hi"}], stream=True) as stream:
            assert (await anext(stream)).text == "Hel"

    served.router.endless = True
    for run in (served.sync(use), served.aio(use_aio)):
        served.router.cancelled.clear()
        await run
        await asyncio.wait_for(served.router.cancelled.wait(), WAIT_S)


async def test_cancel_ends_the_iteration_without_an_error(served: Served) -> None:
    def use(client: dspark.Client) -> list[str]:
        seen = []
        with client.generate("hi", stream=True) as stream:
            for event in stream:
                seen.append(event.text)
                stream.cancel()
        return seen

    async def use_aio(client: dspark.AsyncClient) -> list[str]:
        seen = []
        async with client.generate("hi", stream=True) as stream:
            async for event in stream:
                seen.append(event.text)
                asyncio.get_running_loop().call_soon(stream.cancel)
        return seen

    served.router.endless = True
    assert await served.sync(use) == ["Hel"]
    assert await served.aio(use_aio) == ["Hel"]


async def test_a_cancelled_task_cancels_its_request_and_stays_cancelled(served: Served) -> None:
    served.router.endless = True
    started = asyncio.Event()

    async def use(client: dspark.AsyncClient) -> None:
        async with client.generate("hi", stream=True) as stream:
            async for _ in stream:
                started.set()

    task = asyncio.create_task(served.aio(use))
    await asyncio.wait_for(started.wait(), WAIT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(served.router.cancelled.wait(), WAIT_S)


async def test_a_stream_that_ends_without_a_completion_is_an_error(
    call: Call, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "COMPLETION", None)
    with pytest.raises(dspark.StreamInterruptedError, match="without a completion") as caught:
        await call("generate", "hi")
    assert caught.value.token_ids == (1, 2, 3)
