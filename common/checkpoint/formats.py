"""The formats in which DeepSeek-V4 is published, and how to tell them apart from the headers. Needs no torch."""

from __future__ import annotations

import enum
from collections import Counter

from common.checkpoint.headers import Headers, StoredTensor
from common.checkpoint.model_tensor import Linear, ModelTensor
from common.checkpoint.storage import Storage, companions


class CheckpointFormat(enum.Enum):
    """A whole checkpoint's format."""

    FP8_FP4 = "fp8-fp4"
    """The official one: FP8 blocks, FP4 experts."""
    W8A8_COMPRESSED = "w8a8-compressed-tensors"
    """INT8 rows for wq_b, wo_b and all experts, the rest BF16."""
    W8A8_MODELSLIM = "w8a8-modelslim"
    """INT8 rows with offsets, as tensors that the tool left alone happen to be."""
    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def plain_dtype(self) -> str | None:
        """The type of all matrices where the format has only one."""
        return {CheckpointFormat.BF16: "BF16", CheckpointFormat.FP32: "F32"}.get(self)


def storages(checkpoint_format: CheckpointFormat, tensor: ModelTensor) -> tuple[Storage, ...]:
    """Storages that the format admits for a tensor, the usual one first."""
    linear = tensor.linear
    if linear is None:
        return (Storage.PLAIN,)
    match checkpoint_format:
        case CheckpointFormat.FP8_FP4:
            return (Storage.FP4,) if linear is Linear.ROUTED_EXPERT else (Storage.FP8,)
        case CheckpointFormat.W8A8_COMPRESSED:
            is_plain = linear in (Linear.LATENT, Linear.GROUPED_OUTPUT, Linear.MAIN_PROJ)
            return (Storage.PLAIN,) if is_plain else (Storage.INT8,)
        case CheckpointFormat.W8A8_MODELSLIM:
            return _modelslim(tensor, linear)
        case _:
            return (Storage.PLAIN,)


def detect_format(headers: Headers) -> CheckpointFormat:
    """The format that most scales have, by their names and types: a few may be of others, or strays."""
    votes = Counter(
        found for tensor in headers.values() if (found := _format_of_scale(tensor)) is not None
    )
    if votes:
        return votes.most_common(1)[0][0]
    dtypes = [t.dtype for name, t in headers.items() if name.endswith(".weight")]
    is_fp32 = dtypes.count("F32") > len(dtypes) / 2
    return CheckpointFormat.FP32 if is_fp32 else CheckpointFormat.BF16


def _format_of_scale(tensor: StoredTensor) -> CheckpointFormat | None:
    if tensor.name.endswith(".weight_scale"):
        return CheckpointFormat.W8A8_MODELSLIM
    if not tensor.name.endswith(".scale"):
        return None
    is_official = tensor.dtype == "F8_E8M0"
    return CheckpointFormat.FP8_FP4 if is_official else CheckpointFormat.W8A8_COMPRESSED


def stored_as(headers: Headers, name: str) -> Storage:
    """How the matrix `name` is stored, by its header and its neighbours'. It must be there."""
    dtype = headers[name].dtype
    if dtype == "F8_E4M3":
        return Storage.FP8
    if dtype != "I8":
        return Storage.PLAIN
    scale, modelslim_scale, offset = companions(name)
    # One of ModelSlim's pair beside the scale of another format is a stray.
    has_pair = modelslim_scale in headers and offset in headers
    if scale in headers and not has_pair:
        return Storage.FP4 if headers[scale].dtype == "F8_E8M0" else Storage.INT8
    return Storage.INT8_OFFSET if modelslim_scale in headers else Storage.INT8


def _modelslim(tensor: ModelTensor, linear: Linear) -> tuple[Storage, ...]:
    """Published ones differ in what they leave unquantised; a drafter's wo_a may even be FP8 still."""
    if linear is Linear.ROUTED_EXPERT:
        return (Storage.INT8_OFFSET,)
    if linear is Linear.LATENT:
        return Storage.PLAIN, Storage.INT8_OFFSET, Storage.FP8
    if linear is Linear.GROUPED_OUTPUT:
        is_drafter = tensor.name.startswith("mtp.")
        return (Storage.FP8, Storage.PLAIN) if is_drafter else (Storage.PLAIN, Storage.FP8)
    return Storage.INT8_OFFSET, Storage.PLAIN, Storage.FP8
