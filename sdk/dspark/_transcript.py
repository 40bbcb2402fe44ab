"""What a streamed request has brought so far. Knows responses and results; not where they come from."""

from __future__ import annotations

import grpc

from dspark import _convert, types
from dspark._status import Received, error_from_call
from dspark.errors import DSparkError, StreamInterruptedError
from dspark.v1 import inference_service_pb2 as pb


class Transcript:
    """Collects a stream's responses into events and, with the last one, into the completion."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[types.TokenLogprob] = []
        self._completion: types.Completion | None = None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._token_ids)

    @property
    def completion(self) -> types.Completion:
        """Raises RuntimeError while the stream has not been read to its end."""
        if self._completion is None:
            raise RuntimeError("the completion is known once the stream has been read to its end")
        return self._completion

    def add(self, response: pb.GenerateResponse) -> types.GenerationEvent:
        event = _convert.event_from_pb(response)
        self._texts.append(event.text)
        self._token_ids.extend(event.token_ids)
        self._logprobs.extend(event.logprobs)
        if response.HasField("completion"):
            self._completion = _convert.completion_from_pb(
                response.completion,
                request_id=self.request_id,
                text=self.text,
                token_ids=self.token_ids,
                logprobs=tuple(self._logprobs),
            )
        return event

    def close(self) -> None:
        """The server ended the stream well. Raises StreamInterruptedError if it did so without a completion."""
        if self._completion is None:
            error = StreamInterruptedError(
                "the server ended the stream without a completion",
                request_id=self.request_id,
                code=grpc.StatusCode.OK.name,
            )
            error.text, error.token_ids = self.text, self.token_ids
            raise error

    def error(self, call: grpc.RpcError) -> DSparkError:
        """The typed error of the stream's failure, with what had arrived."""
        received = Received(text=self.text, token_ids=self.token_ids)
        return error_from_call(call, request_id=self.request_id, received=received)
