"""The asynchronous client. Knows the calls of InferenceService; not how values become messages or statuses errors."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from types import TracebackType
from typing import Literal, TypeVar, overload

import grpc
import grpc.aio

from dspark import _convert, options, types
from dspark._call import call_metadata, new_request_id
from dspark._status import error_from_call
from dspark.aio_stream import AsyncCompletionStream
from dspark.v1 import inference_service_pb2 as pb
from dspark.v1.inference_service_pb2_grpc import InferenceServiceStub

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


class AsyncClient:
    """Talks to a DSpark router, or to a worker that serves both roles, over one channel; made and used in one event loop.

    `endpoint` defaults to DSPARK_ENDPOINT and then to localhost:50051, `api_key` to DSPARK_API_KEY. `timeout` is the
    deadline in seconds of every call that brings none of its own. Every method raises a DSparkError when its call fails
    and ValueError or TypeError when a value cannot be sent at all. Close it, or use it as an
    asynchronous context manager.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        timeout: float = options.DEFAULT_TIMEOUT_S,
        retry: options.RetryConfig = options.DEFAULT_RETRY,
        keepalive: options.KeepAliveConfig = options.DEFAULT_KEEPALIVE,
        tls: options.TLSConfig | None = None,
        api_key: str | None = None,
        channel_options: Sequence[options.ChannelOption] = (),
    ) -> None:
        self.endpoint = options.endpoint_or_default(endpoint)
        self._timeout = timeout
        self._api_key = options.api_key_or_default(api_key)
        arguments = options.channel_options(
            retry=retry, keepalive=keepalive, tls=tls, extra=channel_options
        )
        self._channel = (
            grpc.aio.insecure_channel(self.endpoint, options=arguments)
            if tls is None
            else grpc.aio.secure_channel(self.endpoint, tls.credentials(), options=arguments)
        )
        self._stub = InferenceServiceStub(self._channel)

    @overload
    def generate(
        self,
        prompt: _convert.Prompt,
        *,
        sampling: types.SamplingParams = ...,
        stop: types.StopParams = ...,
        model: str = ...,
        request_id: str | None = ...,
        traceparent: str | None = ...,
        timeout: float | None = ...,
        stream: Literal[False] = ...,
    ) -> Awaitable[types.Completion]: ...

    @overload
    def generate(
        self,
        prompt: _convert.Prompt,
        *,
        sampling: types.SamplingParams = ...,
        stop: types.StopParams = ...,
        model: str = ...,
        request_id: str | None = ...,
        traceparent: str | None = ...,
        timeout: float | None = ...,
        stream: Literal[True],
    ) -> AsyncCompletionStream: ...

    def generate(
        self,
        prompt: _convert.Prompt,
        *,
        sampling: types.SamplingParams = types.DEFAULT_SAMPLING,
        stop: types.StopParams = types.DEFAULT_STOP,
        model: str = "",
        request_id: str | None = None,
        traceparent: str | None = None,
        timeout: float | None = None,
        stream: bool = False,
    ) -> Awaitable[types.Completion] | AsyncCompletionStream:
        """Continue a text, token ids or chat messages; awaited whole, or as a stream of events to be closed by the caller.

        `timeout` covers the request to its last token. A failure after the first token is never repeated: it raises
        StreamInterruptedError, which holds what had arrived. `traceparent` is the caller's own trace, as W3C Trace Context
        writes it, which the request then is a part of.
        """
        request_id = request_id or new_request_id()
        request = _convert.generate_request(
            prompt, request_id=request_id, model=model, sampling=sampling, stop=stop
        )
        call = self._stub.Generate(
            request,
            timeout=self._timeout if timeout is None else timeout,
            metadata=call_metadata(request_id, self._api_key, traceparent),
        )
        events = AsyncCompletionStream(call, request_id)
        if stream:
            return events
        return _read(events)

    @overload
    def chat(
        self,
        messages: Sequence[_convert.Message],
        *,
        sampling: types.SamplingParams = ...,
        stop: types.StopParams = ...,
        model: str = ...,
        request_id: str | None = ...,
        traceparent: str | None = ...,
        timeout: float | None = ...,
        stream: Literal[False] = ...,
    ) -> Awaitable[types.Completion]: ...

    @overload
    def chat(
        self,
        messages: Sequence[_convert.Message],
        *,
        sampling: types.SamplingParams = ...,
        stop: types.StopParams = ...,
        model: str = ...,
        request_id: str | None = ...,
        traceparent: str | None = ...,
        timeout: float | None = ...,
        stream: Literal[True],
    ) -> AsyncCompletionStream: ...

    def chat(
        self,
        messages: Sequence[_convert.Message],
        *,
        sampling: types.SamplingParams = types.DEFAULT_SAMPLING,
        stop: types.StopParams = types.DEFAULT_STOP,
        model: str = "",
        request_id: str | None = None,
        traceparent: str | None = None,
        timeout: float | None = None,
        stream: bool = False,
    ) -> Awaitable[types.Completion] | AsyncCompletionStream:
        """Answer a conversation; `generate` for chat messages only."""
        if stream:
            return self.generate(
                messages,
                sampling=sampling,
                stop=stop,
                model=model,
                request_id=request_id,
                traceparent=traceparent,
                timeout=timeout,
                stream=True,
            )
        return self.generate(
            messages,
            sampling=sampling,
            stop=stop,
            model=model,
            request_id=request_id,
            traceparent=traceparent,
            timeout=timeout,
        )

    async def abort(self, request_id: str, *, timeout: float | None = None) -> bool:
        """End a running request, which finishes with "abort" on its own stream; False when there is none."""
        request = pb.AbortRequest(request_id=request_id)
        return (await self._unary(self._stub.Abort, request, timeout)).found

    async def tokenize(
        self,
        prompt: str | Sequence[_convert.Message],
        *,
        add_special_tokens: bool = False,
        timeout: float | None = None,
    ) -> list[int]:
        """The token ids of a text, or of a conversation in the model's chat format."""
        request = _convert.tokenize_request(prompt, add_special_tokens=add_special_tokens)
        return list((await self._unary(self._stub.Tokenize, request, timeout)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        keep_special_tokens: bool = False,
        timeout: float | None = None,
    ) -> str:
        """The text of token ids, with an incomplete character at the end shown as U+FFFD."""
        request = pb.DetokenizeRequest(token_ids=token_ids, keep_special_tokens=keep_special_tokens)
        return (await self._unary(self._stub.Detokenize, request, timeout)).text

    async def model_info(self, *, timeout: float | None = None) -> types.ModelInfo:
        """The served model and its limits."""
        response = await self._unary(self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout)
        return _convert.model_info_from_pb(response)

    async def server_info(self, *, timeout: float | None = None) -> types.ServerInfo:
        """The state of the server that answers."""
        response = await self._unary(self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout)
        return _convert.server_info_from_pb(response)

    async def workers(self, *, timeout: float | None = None) -> tuple[types.Worker, ...]:
        """The workers that the router knows, in the order of its configuration."""
        response = await self._unary(self._stub.ListWorkers, pb.ListWorkersRequest(), timeout)
        return tuple(_convert.worker_from_pb(worker) for worker in response.workers)

    async def close(self) -> None:
        """Close the channel; requests that still run are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _unary(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        timeout: float | None,
    ) -> ResponseT:
        request_id = new_request_id()
        try:
            return await method(
                request,
                timeout=self._timeout if timeout is None else timeout,
                metadata=call_metadata(request_id, self._api_key),
            )
        except grpc.RpcError as failure:
            raise error_from_call(failure, request_id=request_id) from failure


async def _read(events: AsyncCompletionStream) -> types.Completion:
    async with events:
        return await events.read()
