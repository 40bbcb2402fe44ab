"""Python client of DSpark Serving.

    with dspark.Client("localhost:50051") as client:
        with client.generate("Once upon a time", stream=True) as stream:
            for event in stream:
                print(event.text, end="", flush=True)
        print(stream.completion.usage.mean_accepted_length)

Knows the public service only; needs neither the server's packages nor torch.
"""

from dspark._version import __version__
from dspark.aio import AsyncClient
from dspark.aio_stream import AsyncCompletionStream
from dspark.client import Client
from dspark.errors import (
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    ContextLengthExceededError,
    DSparkError,
    InternalError,
    NotFoundError,
    RateLimitError,
    RequestAbortedError,
    StreamInterruptedError,
    UnavailableError,
)
from dspark.options import KeepAliveConfig, RetryConfig, TLSConfig
from dspark.stream import CompletionStream
from dspark.types import (
    ChatMessage,
    Completion,
    FinishReason,
    GenerationEvent,
    MemoryClaim,
    ModelInfo,
    RankMemory,
    Route,
    SamplingParams,
    ServerInfo,
    StopParams,
    Timings,
    TokenLogprob,
    TopLogprob,
    Usage,
    Verification,
    Worker,
    WorkerInfo,
    WorkerMesh,
    WorkerRole,
    WorkerState,
)

__all__ = [
    "APIConnectionError",
    "APIStatusError",
    "APITimeoutError",
    "AsyncClient",
    "AsyncCompletionStream",
    "AuthenticationError",
    "BadRequestError",
    "ChatMessage",
    "Client",
    "Completion",
    "CompletionStream",
    "ContextLengthExceededError",
    "DSparkError",
    "FinishReason",
    "GenerationEvent",
    "InternalError",
    "KeepAliveConfig",
    "MemoryClaim",
    "ModelInfo",
    "NotFoundError",
    "RankMemory",
    "RateLimitError",
    "RequestAbortedError",
    "RetryConfig",
    "Route",
    "SamplingParams",
    "ServerInfo",
    "StopParams",
    "StreamInterruptedError",
    "TLSConfig",
    "Timings",
    "TokenLogprob",
    "TopLogprob",
    "UnavailableError",
    "Usage",
    "Verification",
    "Worker",
    "WorkerInfo",
    "WorkerMesh",
    "WorkerRole",
    "WorkerState",
    "__version__",
]
