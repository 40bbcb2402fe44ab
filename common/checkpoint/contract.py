"""The start-up contract: every tensor that a model needs, checked by name, shape and type before any weight is read.

Knows headers and the model's table of tensors; reads nothing and needs no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.checkpoint.formats import CheckpointFormat, detect_format, storages, stored_as
from common.checkpoint.headers import Headers, StoredTensor
from common.checkpoint.model_tensor import ModelTensor
from common.checkpoint.storage import Part, companions, parts
from common.checkpoint.tensors import alias, classic_mtp_tensors, model_tensors
from common.errors import CheckpointError
from common.model.config import ModelConfig

PLAIN_FLOATS = ("BF16", "F32", "F16")
PLAIN_INTEGERS = ("I64", "I32")
NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One tensor that is not as it must be."""

    name: str
    group: str
    kind: str
    """`missing`, `misshapen` or `wrongly typed`."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractReport:
    """What a contract found."""

    contract: str
    expected: dict[str, int]
    """Tensors by group, in the order of the model."""
    faults: tuple[Fault, ...] = ()
    extra: tuple[str, ...] = ()
    """Tensors that nothing takes, the classic MTP layer's not among them."""
    num_classic_mtp: int = 0
    """Tensors of a drafter that this server does not run."""
    notes: tuple[str, ...] = ()

    @property
    def num_expected(self) -> int:
        return sum(self.expected.values())

    @property
    def is_met(self) -> bool:
        return not self.faults

    def summary(self) -> str:
        """`85 of 123 tensors missing`, by kind."""
        if self.is_met:
            return f"all {self.num_expected} tensors are there"
        kinds = Counter(fault.kind for fault in self.faults)
        return ", ".join(
            f"{count} of {self.num_expected} tensors {kind}" for kind, count in kinds.items()
        )

    def by_group(self) -> Iterator[str]:
        """A line per group and kind: how many of how many, and the first names."""
        groups: dict[tuple[str, str], list[Fault]] = {}
        for fault in self.faults:
            groups.setdefault((fault.group, fault.kind), []).append(fault)
        for (group, kind), faults in groups.items():
            shown = [f"{f.name} {f.detail}".strip() for f in faults[:NAMES_SHOWN]]
            more = f" and {len(faults) - NAMES_SHOWN} more" if len(faults) > NAMES_SHOWN else ""
            experts = _missing_experts(faults)
            yield (
                f"{group}: {len(faults)} of {self.expected[group]} {kind}"
                f"{f' ({experts})' if experts else ''}: {', '.join(shown)}{more}"
            )

    def require_met(self, checkpoint_dir: Path) -> None:
        """Raise CheckpointError with the summary, the groups and the first tensor's name."""
        if self.is_met:
            return
        lines = list(self.by_group())
        rest = f"; and {len(lines) - 8} more groups" if len(lines) > 8 else ""
        raise CheckpointError(
            f"the checkpoint {checkpoint_dir} does not fit its config.json: {self.summary()}: "
            f"{'; '.join(lines[:8])}{rest}; `dspark checkpoint validate` lists everything",
            metadata={"tensor": self.faults[0].name, "faults": str(len(self.faults))},
        )


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
    """What must be stored for a tensor: as its own header says where the format admits that, else as is usual."""
    storage, *others = storages(checkpoint_format, tensor)
    name = stored_name(tensor.name, headers)
    if others and name in headers and (found := stored_as(headers, name)) in others:
        storage = found
    return parts(storage, name, tensor.shape, tensor.dtype)


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


def _missing_experts(faults: Iterable[Fault]) -> str:
    """Which experts a truncated set lacks, as ranges."""
    ids = sorted(
        {
            int(fault.name.partition(".experts.")[2].partition(".")[0])
            for fault in faults
            if ".ffn.experts." in fault.name
        }
    )
    if not ids:
        return ""
    ranges: list[list[int]] = []
    for e in ids:
        if ranges and ranges[-1][1] == e - 1:
            ranges[-1][1] = e
        else:
            ranges.append([e, e])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:6]]
    more = ", …" if len(ranges) > 6 else ""
    return f"expert{'s' if len(ids) > 1 else ''} {', '.join(shown)}{more}"
