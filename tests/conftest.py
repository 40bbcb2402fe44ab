"""What all tests share: one torch thread, reproducible hypothesis, the shipped checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile(
    "dspark",
    derandomize=True,
    deadline=None,
    # A busy machine makes up examples slowly too.
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("dspark")

EXIT_STATUS = pytest.StashKey[int]()
SHIPPED_CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "dspark-tiny"


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[EXIT_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """NIXL 1.5.1 crashes in an exit handler of its libraries, which would turn a good run's exit code into 139."""
    if "nixl_cu12" in sys.modules and EXIT_STATUS in config.stash:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[EXIT_STATUS])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked with a device that cannot be used here, with what is missing as the reason."""
    for mark in item.iter_markers("device"):
        from common.device.select import open_backend
        from common.errors import ConfigError

        try:
            open_backend(mark.args[0])
        except ConfigError as error:
            pytest.skip(str(error))


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Small tensors gain nothing from threads, and tests run side by side."""
    try:
        import torch
    except ModuleNotFoundError:
        return
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shipped_checkpoint() -> Path:
    """The checkpoint that the repository ships, with its weights."""
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        if not (SHIPPED_CHECKPOINT / name).exists():
            pytest.fail(
                f"{SHIPPED_CHECKPOINT} lacks {name}; restore it or train it with tools/train_tiny"
            )
    return SHIPPED_CHECKPOINT
