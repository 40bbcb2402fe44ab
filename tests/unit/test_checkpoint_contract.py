"""A damaged or incomplete checkpoint is refused with the names of what is wrong; what cannot be noticed is said, too."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from common.checkpoint.contract import check_contract
from common.checkpoint.convert import convert_checkpoint
from common.checkpoint.digests import FILE_NAME as DIGESTS
from common.checkpoint.formats import CheckpointFormat
from common.checkpoint.headers import read_headers
from common.checkpoint.integrity import read_all
from common.checkpoint.loader import load_model
from common.checkpoint.tensors import model_tensors
from common.errors import CheckpointError
from common.model.config import ModelConfig
from tests.support.damage import edit, flip, without
from tests.support.tiny_checkpoint import (
    Tensors,
    config_json,
    random_tensors,
    save_checkpoint,
    tensor_shapes,
)

VALUES = config_json(hidden_size=32, vocab_size=64, dspark_noise_token_id=63)
CONFIG = ModelConfig.from_json(VALUES)
TENSORS = random_tensors(CONFIG, seed=9)
FORMATS = [f for f in CheckpointFormat if f.plain_dtype is None]
SCALE = {
    CheckpointFormat.FP8_FP4: "mtp.1.ffn.experts.3.w2.scale",
    CheckpointFormat.W8A8_COMPRESSED: "mtp.1.ffn.experts.3.w2.scale",
    CheckpointFormat.W8A8_MODELSLIM: "mtp.1.ffn.experts.3.w2.weight_scale",
}


def load(folder: Path) -> None:
    load_model(folder, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(params=FORMATS)
def quantised(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[CheckpointFormat, Path]:
    source = save_checkpoint(tmp_path / "source", VALUES, TENSORS)
    convert_checkpoint(source, tmp_path / "q", request.param)
    return request.param, tmp_path / "q"


@pytest.fixture
def official(tmp_path: Path) -> Path:
    source = save_checkpoint(tmp_path / "source", VALUES, TENSORS)
    convert_checkpoint(source, tmp_path / "q", CheckpointFormat.FP8_FP4)
    return tmp_path / "q"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "plain", VALUES, TENSORS)


# The table -------------------------------------------------------------------------------------------------------


def test_the_table_is_the_references_table() -> None:
    """`tiny_checkpoint` has the names and shapes from the published lists, independently of this code."""
    table = {t.name: t.shape for t in model_tensors(CONFIG) if not t.is_optional}
    assert table == dict(tensor_shapes(CONFIG))


# Scales ----------------------------------------------------------------------------------------------------------


def test_a_flipped_scale_is_refused_by_name_where_there_are_digests(
    quantised: tuple[CheckpointFormat, Path],
) -> None:
    checkpoint_format, folder = quantised
    load(folder)
    flip(folder, SCALE[checkpoint_format], byte=0, bit=0)
    with pytest.raises(CheckpointError, match="damaged") as caught:
        load(folder)
    assert caught.value.metadata == {"tensor": SCALE[checkpoint_format]}
    with pytest.raises(CheckpointError, match=SCALE[checkpoint_format].replace(".", r"\.")):
        read_all(folder, read_headers(folder))


def test_a_flipped_weight_is_refused_by_name_where_there_are_digests(official: Path) -> None:
    flip(official, "layers.2.attn.wkv.weight", byte=17, bit=3)
    with pytest.raises(
        CheckpointError, match=r"tensor layers\.2\.attn\.wkv\.weight in .* is damaged"
    ):
        load(official)


@pytest.mark.parametrize("name", ["layers.0.attn.wq_b.scale", "mtp.1.ffn.experts.3.w2.scale"])
def test_an_impossible_scale_is_refused_by_name_without_digests(official: Path, name: str) -> None:
    def change(tensors: Tensors) -> None:
        tensors[name].view(torch.uint8)[-1, -1] = 255

    edit(official, change)
    with pytest.raises(CheckpointError, match="not numbers") as caught:
        load(official)
    assert caught.value.metadata == {"tensor": name}


def test_a_high_bit_of_an_official_scale_is_noticed_without_digests(official: Path) -> None:
    (official / DIGESTS).unlink()
    name = "layers.0.attn.wq_b.scale"
    tensor = read_headers(official)[name]
    exponent = tensor.path.read_bytes()[tensor.begin]
    assert exponent < 127
    flip(official, name, byte=0, bit=7)
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.wq_b\.scale"):
        load(official)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e9])
def test_an_impossible_row_scale_is_refused_by_name(tmp_path: Path, value: float) -> None:
    source = save_checkpoint(tmp_path / "source", VALUES, TENSORS)
    convert_checkpoint(source, tmp_path / "q", CheckpointFormat.W8A8_COMPRESSED)
    name = "layers.0.ffn.shared_experts.w1.scale"
    edit(tmp_path / "q", lambda tensors: tensors[name].__setitem__(3, value))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "q")
    assert caught.value.metadata == {"tensor": name}


def test_a_slightly_wrong_scale_without_a_digest_looks_like_any_other(official: Path) -> None:
    """What docs/checkpoints.md warns of: published checkpoints have no digests, so nothing can tell."""
    (official / DIGESTS).unlink()
    flip(official, "layers.0.attn.wq_b.scale", byte=0, bit=0)
    load(official)


def test_recorded_digests_guard_from_then_on(official: Path) -> None:
    (official / DIGESTS).unlink()
    checked = read_all(official, read_headers(official), record=True)
    assert checked.num_digests == 0
    assert read_all(official, read_headers(official)).num_digests == len(read_headers(official))
    flip(official, "layers.0.attn.wq_b.scale", byte=0, bit=0)
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.wq_b\.scale"):
        load(official)


@pytest.mark.parametrize("text", ["{", "[]", '{"algorithm": "md5", "tensors": {}}'])
def test_an_unreadable_list_of_digests_is_named(official: Path, text: str) -> None:
    (official / DIGESTS).write_text(text)
    with pytest.raises(CheckpointError, match=r"tensor_digests\.json"):
        load(official)


# Missing ---------------------------------------------------------------------------------------------------------


def test_a_missing_expert_is_refused_by_name(quantised: tuple[CheckpointFormat, Path]) -> None:
    _, folder = quantised
    name = "mtp.1.ffn.experts.3.w2.weight"
    edit(folder, lambda tensors: without(tensors, name))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert name in caught.value.message and "(expert 3)" in caught.value.message
    assert caught.value.metadata["tensor"] == name


def test_a_missing_scale_is_refused_by_name(quantised: tuple[CheckpointFormat, Path]) -> None:
    checkpoint_format, folder = quantised
    name = SCALE[checkpoint_format]
    edit(folder, lambda tensors: tensors.__delitem__(name))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(folder)


def test_a_truncated_expert_set_is_reported_by_range(plain: Path) -> None:
    """The reference system looks at the first and the last expert only, so that it starts with such a checkpoint."""

    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            if name.startswith("layers.2.ffn.experts.") and name.split(".")[4] in "23456":
                del tensors[name]

    edit(plain, change)
    report = check_contract(CONFIG, read_headers(plain))
    (line,) = report.by_group()
    assert line.startswith("layers.2 experts: 15 of 24 missing (experts 2-6): ")
    assert report.summary() == f"15 of {len(TENSORS)} tensors missing"


def test_faults_are_counted_by_group_and_kind(plain: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["layers.0.attn.wkv.weight"]
        del tensors["layers.0.attn_norm.weight"]
        tensors["layers.0.attn.wq_a.weight"] = torch.zeros(3, 3)
        tensors["head.weight"] = tensors["head.weight"].to(torch.int8)

    edit(plain, change)
    report = check_contract(CONFIG, read_headers(plain))
    n = len(TENSORS)
    assert report.summary() == (
        f"1 of {n} tensors misshapen, 2 of {n} tensors missing, 1 of {n} tensors wrongly typed"
    )
    assert list(report.by_group()) == [
        "layers.0: 1 of 21 misshapen: layers.0.attn.wq_a.weight is [3, 3], must be [32, 32]",
        "layers.0: 2 of 21 missing: layers.0.attn.wkv.weight, layers.0.attn_norm.weight",
        "embedding and head: 1 of 6 wrongly typed: head.weight is I8, must be BF16 or F32 or F16",
    ]


# Wrong -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("layers.0.attn.wq_a.scale", torch.float32, "is F32, must be F8_E8M0"),
        ("layers.0.attn.wq_a.weight", torch.bfloat16, "is BF16, must be F8_E4M3"),
        ("layers.1.ffn.experts.0.w1.weight", torch.float32, "is F32, must be I8"),
        ("norm.weight", torch.int8, "is I8, must be BF16 or F32 or F16"),
        ("layers.0.ffn.gate.tid2eid", torch.float32, "is F32, must be I64 or I32"),
    ],
)
def test_a_wrong_type_is_refused_by_name(
    official: Path, name: str, dtype: torch.dtype, expected: str
) -> None:
    edit(official, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(CheckpointError) as caught:
        load(official)
    assert f"{name} {expected}" in caught.value.message
    assert caught.value.metadata["tensor"] == name


def test_a_wrong_shape_is_refused_before_anything_is_read(official: Path) -> None:
    """The weights of the file are gone when the contract looks: it needs the headers only."""
    (path,) = official.glob("*.safetensors")
    wrong = {**load_file(path), "layers.0.attn.wq_b.scale": torch.zeros(9, 9, dtype=torch.uint8)}
    wrong["layers.0.attn.wq_b.scale"] = wrong["layers.0.attn.wq_b.scale"].view(torch.float8_e8m0fnu)
    save_file(wrong, path)
    header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
    with path.open("r+b") as file:
        size = path.stat().st_size
        file.truncate(8 + header_bytes)
        file.truncate(size)
    with pytest.raises(CheckpointError, match=r"wq_b\.scale is \[9, 9\], must be \[1, 1\]"):
        load(official)


def test_a_truncated_file_is_refused_with_the_first_tensor_that_is_cut_off(official: Path) -> None:
    (path,) = official.glob("*.safetensors")
    ordered = sorted(read_headers(official).values(), key=lambda tensor: tensor.begin)
    cut = ordered[len(ordered) // 2]
    with path.open("r+b") as file:
        file.truncate(cut.end - 1)
    with pytest.raises(CheckpointError, match="ends within tensor") as caught:
        load(official)
    assert caught.value.metadata == {"tensor": cut.name}
    assert cut.name in caught.value.message and path.name in caught.value.message


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "m", VALUES, TENSORS, num_shards=2)
    path = folder / "model-00001-of-00002.safetensors"
    other = load_file(folder / "model-00002-of-00002.safetensors")
    name = next(iter(other))
    save_file(load_file(path) | {name: other[name]}, path)
    with pytest.raises(CheckpointError, match=f"tensor {name} is in .*00001.* and in .*00002"):
        load(folder)


def test_a_header_that_contradicts_itself_is_refused(plain: Path) -> None:
    path = plain / "model.safetensors"
    content = path.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    header["norm.weight"]["shape"] = [31]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + header_bytes :])
    with pytest.raises(
        CheckpointError, match=r"tensor norm\.weight has 128 bytes, not those of F32 \[31\]"
    ):
        load(plain)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries(
    {}, optional={"dtype": st.just("F32") | JSON, "shape": JSON, "data_offsets": JSON}
)


@given(header=JSON | st.dictionaries(st.text(max_size=3), ENTRY | JSON, max_size=3))
def test_no_header_does_anything_but_be_refused(
    header: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("header")
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    with contextlib.suppress(CheckpointError):
        assert all(tensor.end <= len(text) + 72 for tensor in read_headers(folder).values())


def test_an_index_cannot_name_files_elsewhere(plain: Path) -> None:
    index = {"weight_map": {"norm.weight": "../model.safetensors"}}
    (plain / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r"'\.\./model\.safetensors', which is not a file beside it"
    ):
        load(plain)
