"""What all tests share: one torch thread, reproducible hypothesis, the shipped checkpoint."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("dspark", derandomize=True, deadline=None)
hypothesis.settings.load_profile("dspark")

SHIPPED_CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "dspark-tiny"


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
