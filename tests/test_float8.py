"""float8 rows: what is encoded is read within half a step of e4m3, and exactly the second time."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.float8 import decode, encode

E4M3_STEP = 2**-4  # largest error of a value with 3 bits of mantissa, relative to it
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
LARGEST = 464 * 2.0**119  # 3.1e38
ROWS = st.lists(FLOATS.filter(lambda x: abs(x) <= LARGEST), min_size=1, max_size=9)


def e4m3_values() -> list[float]:
    """Every value of e4m3fn from its definition: sign, 4 bits of exponent, 3 of mantissa."""
    values = []
    for code in range(256):
        sign, exponent, mantissa = -1 if code >> 7 else 1, code >> 3 & 15, code & 7
        if exponent == 15 and mantissa == 7:
            values.append(math.nan)
        elif exponent == 0:
            values.append(sign * mantissa * 2.0**-9)
        else:
            values.append(sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return values


def test_every_code_is_read_as_the_format_says() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    scales = torch.full((256,), 2.0**-3).to(torch.float8_e8m0fnu)
    for found, value in zip(decode(codes, scales)[:, 0].tolist(), e4m3_values(), strict=True):
        assert found == value / 8 or (math.isnan(found) and math.isnan(value))


def test_values_of_the_format_are_stored_without_loss() -> None:
    row = torch.tensor([value for value in e4m3_values() if not math.isnan(value)])
    for factor in (1.0, 2.0**-100, 2.0**60):
        assert torch.equal(decode(*encode(row * factor)).double(), row.double() * factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_row_has_its_own_scale(dtype: torch.dtype) -> None:
    """Rows of very different size, as the layers of a model are."""
    values = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0))
    values = (values * torch.tensor([1e-3, 1.0, 1e3])[:, None]).to(dtype)
    codes, scales = encode(values)
    assert (codes.shape, scales.shape) == ((5, 3, 64), (5, 3))
    error = (decode(codes, scales).double() - values.double()).norm(dim=-1)
    assert float((error / values.double().norm(dim=-1)).max()) < 0.03


@given(ROWS)
def test_a_value_is_off_by_half_a_step_at_most(row: list[float]) -> None:
    """Half a step of the value itself, or of the smallest that its row can tell apart."""
    found = decode(*encode(torch.tensor(row))).double().tolist()
    largest = max(map(abs, row))
    for value, back in zip(row, found, strict=True):
        assert abs(back - value) <= max(abs(value) * E4M3_STEP, largest * 2**-17, 2.0**-126)


@given(ROWS)
def test_what_was_read_is_stored_as_it_was(row: list[float]) -> None:
    codes, scales = encode(torch.tensor(row))
    again, scales_again = encode(decode(codes, scales))
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(scales_again.view(torch.uint8), scales.view(torch.uint8))


@pytest.mark.parametrize("value", [0.0, -0.0, 2.0**-149, -(2.0**-127)])
def test_nothing_and_next_to_nothing_are_zeros(value: float) -> None:
    codes, scales = encode(torch.full((2, 8), value))
    assert decode(codes, scales).abs().sum() == 0
    assert scales.float().tolist() == [1.0, 1.0]


def test_the_smallest_and_the_largest_rows_are_finite() -> None:
    most = torch.finfo(torch.float32).max
    for value, expected in ((2.0**-126, 2.0**-126), (most, 448 * 2.0**119)):
        found = decode(*encode(torch.tensor([value, -value, 0.0])))
        assert found.tolist() == [expected, -expected, 0.0]


def test_no_tokens_are_no_rows() -> None:
    codes, scales = encode(torch.empty(0, 3, 8))
    assert decode(codes, scales).shape == (0, 3, 8)
