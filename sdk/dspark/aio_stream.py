"""A streamed request of the asynchronous client. Knows one call's life; not how it was begun."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from types import TracebackType

import grpc
import grpc.aio

from dspark._transcript import Transcript
from dspark.types import Completion, GenerationEvent
from dspark.v1 import inference_service_pb2 as pb

GenerateCall = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


class AsyncCompletionStream:
    """Iterates over a request's events; leaving its `async with` block early cancels the request.

    Made by `AsyncClient.generate(..., stream=True)`. One task reads; any task of the same loop may cancel.
    """

    def __init__(self, call: GenerateCall, request_id: str) -> None:
        self._call = call
        self._responses = aiter(call)
        self._transcript = Transcript(request_id)
        self._is_cancelled = False

    @property
    def request_id(self) -> str:
        return self._transcript.request_id

    @property
    def text(self) -> str:
        """All text so far."""
        return self._transcript.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far."""
        return self._transcript.token_ids

    @property
    def completion(self) -> Completion:
        """The finished request. Raises RuntimeError before the stream has been read to its end."""
        return self._transcript.completion

    async def read(self) -> Completion:
        """Read to the end and return the whole. Raises RuntimeError if the stream was cancelled here."""
        async for _ in self:
            pass
        return self.completion

    def cancel(self) -> None:
        """End the request on the server; iteration then stops. Harmless when it has ended."""
        self._is_cancelled = True
        self._call.cancel()

    def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        return self

    async def __anext__(self) -> GenerationEvent:
        """Raises a DSparkError when the request fails."""
        if self._is_cancelled:
            raise StopAsyncIteration
        try:
            response = await anext(self._responses)
        except StopAsyncIteration:
            self._transcript.close()
            raise
        except grpc.RpcError as failure:
            raise self._transcript.error(failure) from failure
        except asyncio.CancelledError:
            # gRPC raises this for a call that `cancel` ended, too; only a cancelled task may see it.
            if self._is_cancelled and not _is_task_cancelled():
                raise StopAsyncIteration from None
            raise
        return self._transcript.add(response)

    async def __aenter__(self) -> AsyncCompletionStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()


def _is_task_cancelled() -> bool:
    """Whether someone cancelled the running task; before Python 3.11 tasks do not say."""
    task = asyncio.current_task()
    return sys.version_info >= (3, 11) and task is not None and task.cancelling() > 0
