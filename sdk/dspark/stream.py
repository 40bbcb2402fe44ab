"""A streamed request of the synchronous client. Knows one call's life; not how it was begun."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Protocol

import grpc

from dspark._transcript import Transcript
from dspark.types import Completion, GenerationEvent
from dspark.v1 import inference_service_pb2 as pb


class GenerateCall(Protocol):
    """What gRPC returns for a running Generate."""

    def __iter__(self) -> Iterator[pb.GenerateResponse]: ...
    def cancel(self) -> bool: ...


class CompletionStream:
    """Iterates over a request's events; leaving its `with` block early cancels the request.

    Made by `Client.generate(..., stream=True)`. One thread reads; any thread may cancel.
    """

    def __init__(self, call: GenerateCall, request_id: str) -> None:
        self._call = call
        self._responses = iter(call)
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

    def read(self) -> Completion:
        """Read to the end and return the whole. Raises RuntimeError if the stream was cancelled here."""
        for _ in self:
            pass
        return self.completion

    def cancel(self) -> None:
        """End the request on the server; iteration then stops. Harmless when it has ended."""
        self._is_cancelled = True
        self._call.cancel()

    def __iter__(self) -> Iterator[GenerationEvent]:
        return self

    def __next__(self) -> GenerationEvent:
        """Raises a DSparkError when the request fails."""
        if self._is_cancelled:
            raise StopIteration
        try:
            response = next(self._responses)
        except StopIteration:
            self._transcript.close()
            raise
        except grpc.RpcError as failure:
            if self._is_cancelled:
                raise StopIteration from None
            raise self._transcript.error(failure) from failure
        return self._transcript.add(response)

    def __enter__(self) -> CompletionStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()
