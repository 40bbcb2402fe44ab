"""The start-up contract: every tensor that a model needs, checked by name, shape and type before any weight is read.

Knows headers and the model's table of tensors; reads nothing and needs no torch.
"""

from __future__ import annotations

from collections import Counter

from common.checkpoint.contract_report import ContractReport, Fault
from common.checkpoint.formats import CheckpointFormat, detect_format, storages, stored_as
from common.checkpoint.headers import Headers, StoredTensor
from common.checkpoint.model_tensor import ModelTensor
from common.checkpoint.storage import Part, Storage, companions, parts
from common.checkpoint.tensors import alias, classic_mtp_tensors, model_tensors
from common.model.config import ModelConfig

PLAIN_FLOATS = ("BF16", "F32", "F16")
PLAIN_INTEGERS = ("I64", "I32")


def check_contract(config: ModelConfig, headers: Headers) -> ContractReport:
    """Compare a checkpoint's headers with what its configuration asks for."""
    checkpoint_format = detect_format(headers)
    faults: list[Fault] = []
    expected: Counter[str] = Counter()
    taken: set[str] = set()
    for tensor in model_tensors(config):
        if tensor.is_optional and tensor.name not in headers:
            continue
        for part in wanted_parts(tensor, checkpoint_format, headers):
            expected[tensor.group] += 1
            taken.add(part.name)
            fault = _fault(part, tensor, headers.get(part.name), checkpoint_format)
            if fault is not None:
                faults.append(fault)
    extra = [name for name in headers if name not in taken]
    unused = _unused_drafter(config, extra)
    return ContractReport(
        contract=f"served ({checkpoint_format.value})",
        expected=dict(expected),
        faults=tuple(faults),
        extra=tuple(name for name in extra if name not in unused),
        num_classic_mtp=len(unused),
        notes=() if config.has_drafter else (NO_DRAFTER,),
    )


NO_DRAFTER = (
    "config.json names no DSpark drafter: such a checkpoint serves without speculation; the full DSpark checkpoint "
    "brings the stages mtp.0 to mtp.2 and their heads"
)


def wanted_parts(
    tensor: ModelTensor, checkpoint_format: CheckpointFormat, headers: Headers
) -> tuple[Part, ...]:
    """What must be stored for a tensor, itself first."""
    storage = wanted_storage(tensor, checkpoint_format, headers)
    return parts(storage, stored_name(tensor.name, headers), tensor.shape, tensor.dtype)


def wanted_storage(
    tensor: ModelTensor, checkpoint_format: CheckpointFormat, headers: Headers
) -> Storage:
    """How a tensor is to be stored: as its own header says where the format admits that, else as is usual."""
    usual, *others = storages(checkpoint_format, tensor)
    name = stored_name(tensor.name, headers)
    found = stored_as(headers, name) if others and name in headers else usual
    return found if found in others else usual


def stored_name(name: str, headers: Headers) -> str:
    """The name under which a checkpoint has a tensor."""
    other = alias(name)
    return other if other is not None and name not in headers and other in headers else name


def _fault(
    part: Part,
    tensor: ModelTensor,
    found: StoredTensor | None,
    checkpoint_format: CheckpointFormat,
) -> Fault | None:
    if found is None:
        return Fault(name=part.name, group=tensor.group, kind="missing")
    admitted = _admitted_dtypes(part, tensor, checkpoint_format)
    if found.dtype not in admitted:
        return Fault(
            name=part.name,
            group=tensor.group,
            kind="wrongly typed",
            detail=f"is {found.dtype}, must be {' or '.join(admitted)}",
        )
    # Tools disagree on whether a scale by row is a column or a list.
    is_column = part.shape[1:] == (1,) and part.dtype == "F32"
    if found.shape != part.shape and not (is_column and found.shape == part.shape[:1]):
        return Fault(
            name=part.name,
            group=tensor.group,
            kind="misshapen",
            detail=f"is {list(found.shape)}, must be {list(part.shape)}",
        )
    return None


def _admitted_dtypes(
    part: Part, tensor: ModelTensor, checkpoint_format: CheckpointFormat
) -> tuple[str, ...]:
    if part.dtype == "I64":
        return PLAIN_INTEGERS
    is_weight_itself = part.shape == tensor.shape and part.dtype == tensor.dtype
    return PLAIN_FLOATS if is_weight_itself else (part.dtype,)


def _unused_drafter(config: ModelConfig, extra: list[str]) -> set[str]:
    """Those of `extra` that belong to a drafter which the configuration does not name."""
    if config.has_drafter or not any(name.startswith("mtp.") for name in extra):
        return set()
    classic = {
        name
        for tensor in classic_mtp_tensors(config)
        for name in (tensor.name, *companions(tensor.name))
    }
    return classic.intersection(extra)
