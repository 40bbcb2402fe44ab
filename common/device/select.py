"""From a device's name in the settings to its backend. The only place that imports what a device needs.

Whatever is missing is told with the package, version or script that brings it.
"""

from __future__ import annotations

import importlib
import re
from typing import cast

import torch

from common.device.accelerator import Accelerator, Library
from common.device.backend import Backend
from common.device.cpu import CpuBackend
from common.errors import ConfigError

NAMES = ("cpu", "cuda", "npu")


def open_backend(name: str) -> Backend:
    """The backend of `cpu`, `cuda`, `npu`, or of `cuda:2` when ranks are to begin at that device.

    Raises ConfigError that says what is missing on this machine.
    """
    parsed = re.fullmatch(r"([a-z]+)(?::(\d+))?", name)
    kind, index = (parsed[1], int(parsed[2] or 0)) if parsed else ("", 0)
    match kind:
        case "cpu":
            return CpuBackend()
        case "cuda":
            return Accelerator("cuda", "nccl", _cuda(), first_index=index)
        case "npu":
            return Accelerator("npu", "hccl", _npu(), first_index=index)
        case _:
            raise ConfigError(f"device is {name!r}; give one of {', '.join(NAMES)}, or cuda:1")


def _cuda() -> Library:
    if torch.version.cuda is None:
        raise ConfigError(
            f"device is cuda, but torch {torch.__version__} is built without CUDA; install a torch wheel for CUDA, "
            f"such as {_base_version()}+cu130, from PyTorch's own package index"
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device is cuda, but torch {torch.__version__} finds no usable one; it is built for CUDA "
            f"{torch.version.cuda}, which needs an NVIDIA driver of that generation (nvidia-smi shows it) and, in a "
            "container, NVIDIA's container toolkit; CUDA_VISIBLE_DEVICES may hide devices"
        )
    return cast(Library, torch.cuda)


def _npu() -> Library:
    try:
        importlib.import_module("torch_npu")
    except ModuleNotFoundError as error:
        if error.name != "torch_npu":
            raise
        raise ConfigError(
            f"device is npu, but the package torch-npu is not installed; it must have the version of torch, "
            f"{_base_version()}, and needs CANN: pip install torch-npu=={_base_version()}"
        ) from None
    except ImportError as error:
        # Libraries of CANN, such as libhccl.so, are found by what its script puts into the environment.
        raise ConfigError(
            f"device is npu, but torch-npu cannot load Ascend's CANN ({error}); install the CANN toolkit and kernels "
            "that this torch-npu names, and run `source /usr/local/Ascend/ascend-toolkit/set_env.sh` before this program"
        ) from None
    library = cast(Library, getattr(torch, "npu"))  # noqa: B009 - torch-npu puts it there
    if library.device_count() == 0:
        raise ConfigError(
            "device is npu, but torch-npu finds none; it needs Ascend's driver and firmware (npu-smi info shows them) "
            "and, in a container, Ascend's docker runtime; ASCEND_RT_VISIBLE_DEVICES may hide devices"
        )
    return library


def _base_version() -> str:
    return torch.__version__.partition("+")[0]
