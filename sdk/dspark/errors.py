"""The errors that a client raises. Knows what a caller can do about each; not how they travel."""

from __future__ import annotations


class DSparkError(Exception):
    """Root of everything that this package raises for a failed request.

    `request_id` finds the request in the server's logs; empty when the request never got one.
    """

    def __init__(self, message: str, *, request_id: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id

    def __str__(self) -> str:
        return f"{self.message} (request {self.request_id})" if self.request_id else self.message


class APIConnectionError(DSparkError):
    """No server could be reached, or the connection broke before anything was generated."""


class APITimeoutError(DSparkError):
    """The deadline passed; raise `timeout`, or ask for fewer tokens."""


class APIStatusError(DSparkError):
    """The server answered with an error.

    `code` is the gRPC status name, `reason` the server's stable word for the cause (empty when the answer is not from
    DSpark itself), `metadata` holds the numbers of the message.
    """

    def __init__(
        self,
        message: str,
        *,
        request_id: str = "",
        code: str,
        reason: str = "",
        metadata: dict[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, request_id=request_id)
        self.code = code
        self.reason = reason
        self.metadata = metadata or {}
        self.retry_after_s = retry_after_s
        """Seconds after which the same request may succeed; None when the server did not say."""


class BadRequestError(APIStatusError):
    """The request is malformed, out of range or does not fit the server; sending it again will not help."""


class ContextLengthExceededError(BadRequestError):
    """Prompt plus max_tokens are longer than the model's context; `metadata` has the numbers."""


class AuthenticationError(APIStatusError):
    """The API key is missing, wrong, or may not do this."""


class NotFoundError(APIStatusError):
    """The model or request that was named does not exist."""


class RateLimitError(APIStatusError):
    """Everything is full; try again after `retry_after_s`."""


class UnavailableError(APIStatusError):
    """The server is up and cannot serve now: no ready workers, draining, loading."""


class RequestAbortedError(APIStatusError):
    """The request was cancelled, here or by someone else, before it finished."""


class InternalError(APIStatusError):
    """The server failed; its logs have the cause under the request id."""


class StreamInterruptedError(APIStatusError):
    """The request broke after tokens had arrived, and was not repeated: what arrived is kept in `text` and `token_ids`."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
