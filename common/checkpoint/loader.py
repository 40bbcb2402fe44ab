"""From a checkpoint folder to a model that runs."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from common.checkpoint.contract import check_contract
from common.checkpoint.contract_report import first_groups
from common.checkpoint.headers import Headers, read_headers
from common.checkpoint.read_options import Progress, ReadOptions
from common.checkpoint.reader import CheckpointReader
from common.checkpoint.rehearsal import asked_parts
from common.device.backend import Backend
from common.device.cpu import CpuBackend
from common.device.staging import Staging
from common.errors import CheckpointError
from common.model.config import ModelConfig
from common.model.dspark import DSparkModel, build_model
from common.model.quantization import Quantization
from common.parallel.collectives import Communicator

logger = logging.getLogger(__name__)

MAX_THREADS = 4
"""Experts that are read, dequantised and copied at once; each takes the memory of a piece of a matrix."""


@contextlib.contextmanager
def _collections_paused() -> Iterator[None]:
    """What loading makes stays; looking through all of it for garbage took a sixth of the time of a rank."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_collections_paused()
def load_model(
    checkpoint_dir: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    comm: Communicator | None = None,
    backend: Backend | None = None,
    quantization: Quantization = Quantization.DEQUANTIZE,
    on_progress: Progress | None = None,
    options: ReadOptions | None = None,
) -> DSparkModel:
    """Check the checkpoint against its configuration, then load what the model needs, or what the rank of `comm` needs.

    The whole checkpoint is checked by its headers, whatever the rank; of the weights only the rank's own are read. They
    reach the device by way of `backend`'s host buffers. Raises CheckpointError that names the file, key or tensors that
    are wrong, before a weight is read where the headers tell; ConfigError when the mesh does not go with the checkpoint.
    """
    config = load_config(checkpoint_dir)
    comm, backend = comm or Communicator(), backend or CpuBackend()
    headers = read_headers(checkpoint_dir)
    _check(checkpoint_dir, config, headers)
    wanted = asked_parts(config, headers, comm.shard)
    # Ranks of one machine share its cores as they do when they compute.
    num_threads = min(MAX_THREADS, torch.get_num_threads())
    with (
        CheckpointReader(
            checkpoint_dir,
            on_progress,
            headers=headers,
            wanted=wanted,
            options=options,
            num_readers=num_threads,
        ) as reader,
        # One thread more would only be in the way of this one.
        Staging(backend, num_threads=num_threads if num_threads > 1 else 0) as staging,
    ):
        model = build_model(
            config,
            reader,
            dtype=dtype,
            device=device,
            comm=comm,
            staging=staging,
            quantization=quantization,
        )
        staging.wait()
    logger.info(
        "%s: %.2f GB read at %.0f MB/s", comm.shard, reader.num_wanted_bytes / 1e9, reader.mb_per_s
    )
    return model


def load_config(checkpoint_dir: Path) -> ModelConfig:
    """Raises CheckpointError when there is no such folder or its configuration is wrong."""
    if not checkpoint_dir.is_dir():
        raise CheckpointError(f"no checkpoint folder at {checkpoint_dir}")
    return ModelConfig.load(checkpoint_dir)


def _check(checkpoint_dir: Path, config: ModelConfig, headers: Headers) -> None:
    report = check_contract(config, headers)
    report.require_met(checkpoint_dir)
    if report.extra:
        logger.warning(
            "%s has %d tensors that nothing takes: %s",
            checkpoint_dir,
            len(report.extra),
            first_groups(report.extra_groups()),
        )
