"""Stored codes become exactly the values that they stand for, computed here by hand or one by one."""

from __future__ import annotations

import math

import pytest
import torch

from common.checkpoint.dequantize import (
    dequantize_fp4,
    dequantize_fp8,
    dequantize_int8,
    e8m0_to_float,
)
from common.checkpoint.quantize import quantize_fp4, quantize_fp8, quantize_int8

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def bits(values: torch.Tensor) -> list[int]:
    return values.contiguous().view(torch.int32).flatten().tolist()


def e8m0(*exponents: int) -> torch.Tensor:
    return torch.tensor(exponents, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def fp8(rows: int, columns: int, code: int) -> torch.Tensor:
    return torch.full((rows, columns), code, dtype=torch.uint8).view(torch.float8_e4m3fn)


def e4m3(code: int) -> float:
    """The definition: a sign, four bits of exponent with bias 7, three of mantissa, one NaN, no infinity."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


# Scales ----------------------------------------------------------------------------------------------------------


def test_e8m0_scales_are_powers_of_two_to_both_ends() -> None:
    values = e8m0_to_float(e8m0(0, 1, 126, 127, 128, 254)).tolist()
    assert values == [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127]


def test_the_e8m0_scale_255_is_not_a_number() -> None:
    assert math.isnan(e8m0_to_float(e8m0(255)).item())


def test_all_e8m0_scales_are_those_of_torch() -> None:
    scale = e8m0(*range(255))
    assert bits(e8m0_to_float(scale)) == bits(scale.to(torch.float32))


# FP8 -------------------------------------------------------------------------------------------------------------


def test_every_fp8_code_is_its_definition() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128).view(torch.float8_e4m3fn)
    values = dequantize_fp8(codes, e8m0(127).view(1, 1)).flatten().tolist()
    for code, value in enumerate(values):
        expected = e4m3(code)
        assert math.isnan(value) if math.isnan(expected) else value == expected, hex(code)
        assert math.copysign(1, value) == math.copysign(1, expected) or math.isnan(expected)


def test_a_block_ends_at_128_whatever_the_shape() -> None:
    """130 x 257 codes of 1.0 in 2 x 3 blocks, of which the last are 2 rows and 1 column."""
    scale = e8m0(127, 128, 129, 130, 131, 132).view(2, 3)
    values = dequantize_fp8(fp8(130, 257, 0x38), scale)
    for row in (0, 1, 127, 128, 129):
        for column in (0, 127, 128, 255, 256):
            assert values[row, column].item() == 2.0 ** (3 * (row // 128) + column // 128)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (127, 129), (128, 128), (300, 96)])
def test_fp8_is_code_times_scale_for_every_element(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 127, (rows, columns), dtype=torch.uint8, generator=generator)
    blocks = (-(-rows // 128), -(-columns // 128))
    exponents = torch.randint(100, 140, blocks, dtype=torch.uint8, generator=generator)
    values = dequantize_fp8(
        codes.view(torch.float8_e4m3fn), exponents.view(torch.float8_e8m0fnu)
    ).tolist()
    for row in range(0, rows, 7):
        for column in range(columns):
            expected = e4m3(int(codes[row, column])) * 2.0 ** (
                int(exponents[row // 128, column // 128]) - 127
            )
            assert values[row][column] == expected


def test_the_smallest_code_at_the_smallest_scale_does_not_vanish() -> None:
    value = dequantize_fp8(fp8(1, 1, 0x01), e8m0(0).view(1, 1))
    assert bits(value) == [1 << 13] and value.item() == 2.0**-136


# FP4 -------------------------------------------------------------------------------------------------------------


def test_every_fp4_byte_is_two_codes_low_nibble_first() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).view(torch.int8)
    values = dequantize_fp4(codes, e8m0(*[127] * 16).view(16, 1)).flatten()
    expected = [FP4[nibble] for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    assert bits(values) == bits(torch.tensor(expected))


def test_an_fp4_scale_is_for_32_inputs_of_one_row() -> None:
    codes = torch.full((2, 32), 0x22, dtype=torch.int8)  # 1.0 everywhere
    values = dequantize_fp4(codes, e8m0(127, 130, 120, 0).view(2, 2))
    assert values[0].tolist() == [1.0] * 32 + [8.0] * 32
    assert values[1].tolist() == [2.0**-7] * 32 + [2.0**-127] * 32


# INT8 ------------------------------------------------------------------------------------------------------------


def test_int8_is_code_times_its_rows_scale() -> None:
    codes = torch.tensor([[-128, 0, 127], [1, 2, 3]], dtype=torch.int8)
    values = dequantize_int8(codes, torch.tensor([0.5, 4.0]))
    assert values.tolist() == [[-64.0, 0.0, 63.5], [4.0, 8.0, 12.0]]


def test_an_int8_offset_is_subtracted_before_scaling() -> None:
    codes = torch.tensor([[10, 12], [-1, 0]], dtype=torch.int8)
    scale, offset = torch.tensor([[2.0], [0.25]]), torch.tensor([[10.0], [-3.0]])
    assert dequantize_int8(codes, scale, offset).tolist() == [[0.0, 4.0], [0.5, 0.75]]


# Parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [slice(0, 130), slice(5, 129), slice(128, 260), slice(127, 128)])
@pytest.mark.parametrize("columns", [slice(0, 320), slice(32, 160), slice(288, 320)])
def test_a_part_is_a_part_of_the_whole(rows: slice, columns: slice) -> None:
    values = torch.randn(260, 320, generator=torch.Generator().manual_seed(3))
    codes, scale = quantize_fp8(values)
    whole = dequantize_fp8(codes, scale)
    part = dequantize_fp8(codes[rows, columns], scale, rows.start, columns.start)
    assert torch.equal(part, whole[rows, columns])
    codes, scale = quantize_fp4(values)
    whole = dequantize_fp4(codes, scale)
    packed = codes[rows, columns.start // 2 : columns.stop // 2]
    assert torch.equal(
        dequantize_fp4(packed, scale, rows.start, columns.start), whole[rows, columns]
    )
    codes, scale = quantize_int8(values)
    whole = dequantize_int8(codes, scale)
    assert torch.equal(
        dequantize_int8(codes[rows, columns], scale, None, rows.start), whole[rows, columns]
    )


# The way back ----------------------------------------------------------------------------------------------------


def test_fp4_rounds_to_the_nearest_value_and_in_the_middle_to_even() -> None:
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    near = [0.24, 0.26, 0.74, 0.76, 2.49, 2.51, 4.99, 5.01]
    row = torch.tensor([6.0, *middles, *near])
    row = torch.cat((row, -row))
    values = torch.nn.functional.pad(row, (0, 32 - len(row))).view(1, 32)
    half = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, 0.5, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0]
    found = dequantize_fp4(*quantize_fp4(values)).flatten().tolist()
    assert found[: len(row)] == half + [-value for value in half]


@pytest.mark.parametrize(
    ("largest", "exponent"), [(448.0, 127), (449.0, 128), (224.0, 126), (1.0, 119), (0.0, 105)]
)
def test_an_fp8_scale_is_the_smallest_power_of_two_that_holds_the_block(
    largest: float, exponent: int
) -> None:
    """s = 2^ceil(log2(max(amax, 1e-4) / 448)), as published."""
    assert exponent == math.ceil(math.log2(max(largest, 1e-4) / 448)) + 127
    _, scale = quantize_fp8(torch.tensor([[largest, 0.0]]))
    assert scale.view(torch.uint8).item() == exponent


@pytest.mark.parametrize(("largest", "exponent"), [(6.0, 127), (6.5, 128), (3.0, 126), (0.0, 1)])
def test_an_fp4_scale_is_the_smallest_power_of_two_that_holds_the_group(
    largest: float, exponent: int
) -> None:
    values = torch.zeros(1, 32)
    values[0, 5] = largest
    _, scale = quantize_fp4(values)
    assert scale.view(torch.uint8).item() == exponent


def test_values_of_a_format_survive_it_unchanged() -> None:
    values = torch.randn(200, 160, generator=torch.Generator().manual_seed(8))
    once = dequantize_fp8(*quantize_fp8(values))
    assert torch.equal(dequantize_fp8(*quantize_fp8(once)), once)
    assert ((once - values).abs() <= values.abs() * 2**-4 + 2**-16).all()
    once = dequantize_fp4(*quantize_fp4(values))
    assert torch.equal(dequantize_fp4(*quantize_fp4(once)), once)
    once = dequantize_int8(*quantize_int8(values))
    assert ((once - values).abs() <= values.abs().amax(-1, keepdim=True) / 127 / 2 * 1.0001).all()
