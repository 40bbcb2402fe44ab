"""What commands that talk to a router share: sampling settings, failures, figures. Knows the SDK; prints nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import dspark
from services.cli.failures import EXIT_CONFIG, EXIT_NETWORK, EXIT_OTHER, Failure
from services.cli.sections import SamplingSection
from services.cli.settings import AllSettings


def open_client(settings: AllSettings) -> dspark.Client:
    api_key = settings.api_key.get_secret_value() if settings.api_key else None
    return dspark.Client(settings.endpoint, api_key=api_key, timeout=settings.timeout_s)


def sampling_params(section: SamplingSection) -> dspark.SamplingParams:
    return dspark.SamplingParams(
        temperature=section.temperature,
        top_k=section.top_k,
        top_p=section.top_p,
        seed=section.seed,
    )


def stop_params(section: SamplingSection) -> dspark.StopParams:
    return dspark.StopParams(max_tokens=section.max_tokens, stop=section.stop)


def client_failure(error: dspark.DSparkError) -> Failure:
    """One sentence and the exit code for an error of the SDK."""
    match error:
        case dspark.APIConnectionError():
            hint = "; is the router running? `dspark up` starts one"
            return Failure(f"{_one_line(error)}{hint}", exit_code=EXIT_NETWORK)
        case dspark.APITimeoutError() | dspark.UnavailableError():
            return Failure(_one_line(error), exit_code=EXIT_NETWORK)
        case dspark.BadRequestError() | dspark.NotFoundError() | dspark.AuthenticationError():
            return Failure(_one_line(error), exit_code=EXIT_CONFIG)
    return Failure(_one_line(error), exit_code=EXIT_OTHER)


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Turn the SDK's errors into a Failure."""
    try:
        yield
    except dspark.DSparkError as error:
        raise client_failure(error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """How quickly an answer came, by the client's clock."""

    num_tokens: int
    time_to_first_token_s: float
    tokens_per_s: float
    """After the first token."""
    mean_accepted_length: float
    """Tokens per verification round, the target's own included; 0 when one round was all."""

    def __str__(self) -> str:
        return (
            f"{self.num_tokens} tokens · first after {self.time_to_first_token_s * 1000:.0f} ms · "
            f"{self.tokens_per_s:.1f} tokens/s · accepted length {self.mean_accepted_length:.2f}"
        )


class Stopwatch:
    """Measures one answer from its making on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._first: float | None = None
        self._first_count = 0

    def saw(self, num_tokens: int) -> None:
        """So many tokens have just come."""
        if self._first is None and num_tokens:
            self._first = time.monotonic()
            self._first_count = num_tokens

    def figures(self, completion: dspark.Completion) -> Figures:
        now = time.monotonic()
        first = self._first or now
        later = completion.usage.completion_tokens - self._first_count
        return Figures(
            num_tokens=completion.usage.completion_tokens,
            time_to_first_token_s=first - self._began,
            tokens_per_s=later / (now - first) if later > 0 else 0.0,
            mean_accepted_length=completion.usage.mean_accepted_length,
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
