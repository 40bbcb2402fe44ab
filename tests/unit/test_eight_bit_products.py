"""Products of 8-bit matrices with activations in 8 bits: by hand, within their bound, and the same on every device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from common.checkpoint.dequantize import dequantize_fp8, e8m0_to_float
from common.checkpoint.quantize import quantize_fp8, quantize_int8
from common.device.select import open_backend
from common.model.kernels import EightBitProducts, select_products
from common.model.kernels.cpu_products import CpuProducts, cpu_products
from common.model.kernels.cuda_products import CudaProducts
from common.model.kernels.eight_bits import (
    PlainProducts,
    fp8_rounded,
    fp8_rows,
    int8_rows,
)
from common.model.kernels.npu_products import NpuProducts

PLAIN = PlainProducts()
DTYPES = (torch.float32, torch.bfloat16)
SIZES = ((1, 64, 8), (3, 97, 33), (20, 512, 128), (40, 1024, 256))
"""Rows, columns, and rows of the matrix."""


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def require_same(
    products: EightBitProducts, device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    """Both products against plain torch on the CPU, for sizes that libraries take and others."""
    for num_rows, columns, rows in SIZES:
        x = normal(num_rows, columns, seed=num_rows).to(dtype)
        codes, scale = quantize_int8(normal(rows, columns, seed=1))
        found = products.int8_linear(x.to(device), codes.to(device), scale.to(device))
        require_close(found, PLAIN.int8_linear(x, codes, scale), tolerance)
        fp8, blocks = quantize_fp8(normal(rows, columns, seed=2))
        by_block = e8m0_to_float(blocks).to(device)
        by_codes = products.fp8_linear(x.to(device), fp8.to(device), by_block)
        if by_codes is not None:
            values = F.linear(fp8_rounded(x).float(), dequantize_fp8(fp8, blocks))
            require_close(by_codes, values.to(dtype), tolerance)


def require_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(
        found.cpu().float(), expected.float(), atol=tolerance * 30, rtol=tolerance
    )


# The definition ------------------------------------------------------------------------------------------------


def test_a_product_of_bytes_by_hand() -> None:
    x = torch.tensor([[127.0, -63.5, 0.4], [0.0, 0.0, 0.0], [2.54, 0.01, -1.27]])
    row_codes, row_scale = int8_rows(x)
    # Halves go to the even neighbour.
    assert row_codes.tolist() == [[127, -64, 0], [0, 0, 0], [127, 0, -64]]
    torch.testing.assert_close(row_scale, torch.tensor([1.0, 1e-12 / 127, 0.02]))
    codes = torch.tensor([[1, 2, 3], [-128, 0, 127]], dtype=torch.int8)
    found = PLAIN.int8_linear(x, codes, torch.tensor([0.5, 2.0]))
    torch.testing.assert_close(
        found,
        torch.tensor([[-0.5, -32512.0], [0.0, 0.0], [-65 * 0.01, -24384 * 0.04]]),
    )


def test_a_row_of_fp8_by_hand() -> None:
    x = torch.zeros(1, 130)
    x[0, 0], x[0, 1], x[0, 2], x[0, 128] = 448.0, 17.0, -0.3, 449.0
    codes, scale = fp8_rows(x)
    # 449 / 448 is above one, hence the next power of two; e4m3 has steps of 2 from 16 to 32, and takes the even one.
    assert scale.tolist() == [[1.0, 2.0]]
    assert [codes[0, i].item() for i in (0, 1, 2, 128)] == [448.0, 16.0, -0.3125, 224.0]


def test_rows_smaller_than_any_scale_are_zeros_and_no_nan() -> None:
    tiny = torch.full((2, 128), 1e-30)
    for codes, scale in (int8_rows(tiny), fp8_rows(tiny)):
        assert codes.float().abs().max() == 0 and scale.isfinite().all() and (scale > 0).all()


def test_every_element_is_off_by_no_more_than_half_a_step_of_its_row_and_with_a_wrong_scale_by_more() -> (
    None
):
    """The bound is that of rounding, for each element by itself; a scale that is wrong by a tenth breaks it."""
    x, (codes, scale) = normal(8, 256), quantize_int8(normal(64, 256, seed=1))
    values = codes.double() * scale.double().unsqueeze(-1)
    _, row_scale = int8_rows(x)
    bound = 0.5 * row_scale.double().unsqueeze(-1) * values.abs().sum(-1) * 1.0001

    def error(given: torch.Tensor) -> torch.Tensor:
        return (PLAIN.int8_linear(x, codes, given).double() - x.double() @ values.T).abs()

    assert (error(scale) <= bound).all() and error(scale).max() > 0
    assert (error(scale * 1.1) > bound).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_fp8_keeps_of_a_row_is_within_a_sixteenth_and_exact_in_any_type(
    dtype: torch.dtype,
) -> None:
    x = (normal(4, 300) * torch.logspace(-1, 1, 300)).to(dtype)
    codes, scale = fp8_rows(x)
    rounded = fp8_rounded(x)
    assert rounded.dtype == dtype and codes.shape == x.shape and scale.shape == (4, 3)
    assert ((rounded - x).abs() <= x.abs() / 16 + scale.max() * 2**-10).all()
    for i, j in ((0, 0), (3, 130), (2, 299)):
        assert rounded[i, j].item() == codes[i, j].item() * scale[i, j // 128].item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_product_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    x = normal(50, 256).to(dtype)
    codes, scale = quantize_int8(normal(64, 256, seed=1))
    products = select_products(torch.device("cpu"))
    whole = products.int8_linear(x, codes, scale)
    for i in (0, 17, 49):
        assert torch.equal(products.int8_linear(x[i : i + 1], codes, scale)[0], whole[i])


# Devices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cpus_products_are_the_plain_ones_bit_by_bit(dtype: torch.dtype) -> None:
    require_same(cpu_products(), torch.device("cpu"), dtype, 0)


def test_a_cpu_whose_instructions_saturate_is_given_the_plain_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def saturating(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Pairs of products in 16 bits, as instructions before VNNI add them."""
        products = a.int().unsqueeze(-1) * b.int().unsqueeze(0)  # [N, K, M]
        pairs = products.view(a.shape[0], -1, 2, b.shape[1]).sum(2)
        return pairs.clamp(-(2**15), 2**15 - 1).sum(1, dtype=torch.int32)

    cpu_products.cache_clear()
    monkeypatch.setattr(torch, "_int_mm", saturating)
    try:
        assert type(cpu_products()) is PlainProducts
        monkeypatch.setattr(torch, "_int_mm", lambda a, b: (a.long() @ b.long()).int())
        cpu_products.cache_clear()
        assert type(cpu_products()) is CpuProducts
    finally:
        cpu_products.cache_clear()


CUDA, NPU = (
    pytest.param("cuda", marks=pytest.mark.device("cuda")),
    pytest.param("npu", marks=pytest.mark.device("npu")),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [CUDA, NPU])
def test_a_devices_products_are_the_plain_ones(name: str, dtype: torch.dtype) -> None:
    device = open_backend(name).device(0)
    products = select_products(device)
    assert type(products) is not PlainProducts
    require_same(products, device, dtype, 2e-2 if dtype == torch.bfloat16 else 1e-4)


class CudaLibrary:
    """torch's products on a CUDA device by their definition, with what they ask of shapes and strides."""

    def __init__(self) -> None:
        self.num_int8 = self.num_fp8 = 0

    def int_mm(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert a.shape[0] > 16 and a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0
        assert a.is_contiguous() and b.T.is_contiguous()
        self.num_int8 += 1
        return (a.long() @ b.long()).int()

    def scaled_mm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        *,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        (rows, columns), outputs = a.shape, b.shape[1]
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        assert scale_a.dtype == scale_b.dtype == torch.float32
        assert a.is_contiguous() and b.T.is_contiguous() and outputs % 16 == 0
        # A scale per 128 columns of a row, column by column; one per block, row by row, rows padded to four.
        assert scale_a.shape == (rows, columns // 128) and scale_a.stride() == (1, rows)
        assert scale_b.shape == (columns // 128, outputs // 128)
        padded = -(-columns // 512) * 4
        assert scale_b.stride() == (1, padded) or outputs == 128
        self.num_fp8 += 1
        left = a.float() * scale_a.repeat_interleave(128, dim=1)
        blocks = scale_b.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
        return (left @ (b.float() * blocks)).to(out_dtype)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaLibrary]:
    library = CudaLibrary()
    monkeypatch.setattr(torch, "_int_mm", library.int_mm)
    monkeypatch.setattr(torch, "_scaled_mm", library.scaled_mm)
    yield library


@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_products_ask_the_library_for_what_it_takes(
    dtype: torch.dtype, library: CudaLibrary
) -> None:
    require_same(CudaProducts(has_fp8_blocks=True), torch.device("cpu"), dtype, 1e-2)
    assert library.num_int8 == len([s for s in SIZES if s[1] % 8 == 0 and s[2] % 8 == 0]) == 3
    assert library.num_fp8 == len([s for s in SIZES if s[1] % 512 == 0 and s[2] % 128 == 0]) == 2
    codes, scale = quantize_fp8(normal(256, 512))
    able, unable = (CudaProducts(has_fp8_blocks=has) for has in (True, False))
    x = normal(3, 512, seed=1).to(dtype)
    assert unable.fp8_linear(x, codes, e8m0_to_float(scale)) is None
    assert able.fp8_linear(x[:, :384], codes[:, :384], e8m0_to_float(scale)[:, :3]) is None
    assert library.num_fp8 == 2


class NpuOperations:
    """torch-npu's operations by their definition, for what they take."""

    def __init__(self) -> None:
        self.num_fused = 0

    def npu_dynamic_quant(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert x.dtype in (torch.bfloat16, torch.float16)
        scale = x.float().abs().amax(-1) / 127
        return (x.float() / scale.unsqueeze(-1)).round().to(torch.int8), scale

    def npu_quant_matmul(
        self,
        x1: torch.Tensor,
        x2: torch.Tensor,
        scale: torch.Tensor,
        *,
        pertoken_scale: torch.Tensor | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        assert x1.dtype == x2.dtype == torch.int8 and scale.dtype == torch.float32
        assert scale.shape == x2.shape[1:] and x1.shape[0] > 0
        sums = x1.long() @ x2.long()
        if output_dtype == torch.int32:
            assert pertoken_scale is None
            return sums.int()
        assert output_dtype == torch.bfloat16 and pertoken_scale is not None
        assert pertoken_scale.shape == x1.shape[:1]
        self.num_fused += 1
        return (sums.float() * scale * pertoken_scale.unsqueeze(-1)).to(output_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_npu_products_are_the_plain_ones_by_the_operators_definitions(dtype: torch.dtype) -> None:
    operations = NpuOperations()
    require_same(NpuProducts(operations), torch.device("cpu"), dtype, 1e-2)
    assert operations.num_fused == (len(SIZES) if dtype == torch.bfloat16 else 0)
