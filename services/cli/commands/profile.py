"""`dspark profile`: what a worker's engine does in its next steps, as a file for Perfetto."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import grpc

from common.errors import ConfigError
from common.rpc.admin_key import bearer, read_key
from dspark.v1 import admin_service_pb2 as pb
from dspark.v1.admin_service_pb2_grpc import AdminServiceStub
from services.cli.failures import EXIT_CONFIG, EXIT_NETWORK, EXIT_OK, EXIT_OTHER, Failure
from services.cli.settings import ProfileSettings

EXPORT_S = 120.0
"""What the worker gets to write the trace and send it, after the recording."""

_EXIT_CODES = {
    grpc.StatusCode.UNAVAILABLE: EXIT_NETWORK,
    grpc.StatusCode.DEADLINE_EXCEEDED: EXIT_NETWORK,
    grpc.StatusCode.PERMISSION_DENIED: EXIT_CONFIG,
    grpc.StatusCode.INVALID_ARGUMENT: EXIT_CONFIG,
}


def run(settings: ProfileSettings) -> int:
    if settings.admin.key_file is None:
        raise ConfigError("admin.key_file is not given; workers show a profile only for their key")
    metadata = bearer(read_key(settings.admin.key_file))
    request = pb.ProfileRequest(max_steps=settings.steps, max_seconds=settings.seconds)
    with grpc.insecure_channel(settings.worker) as channel:
        answers = AdminServiceStub(channel).Profile(
            request, metadata=metadata, timeout=settings.seconds + EXPORT_S
        )
        try:
            profile = next(answers).profile
            num_bytes = _write(settings.trace, answers)
        except grpc.RpcError as error:
            code = error.code()
            raise Failure(
                f"{settings.worker}: {error.details()}",
                exit_code=_EXIT_CODES.get(code, EXIT_OTHER),
            ) from None
    print(
        f"{settings.trace}: {profile.num_steps} steps in {profile.seconds:.3f} s, {num_bytes} bytes; "
        "open it at https://ui.perfetto.dev",
        file=sys.stderr,
    )
    return EXIT_OK


def _write(path: Path, answers: Iterator[pb.ProfileResponse]) -> int:
    with path.open("wb") as file:
        return sum(file.write(answer.trace) for answer in answers)
