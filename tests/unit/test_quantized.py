"""The formula of quantized caches, element by element."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fastattention.quantized import LARGEST_STORED, dequantize, quantize

EVERY_DTYPE = pytest.mark.parametrize("cache_dtype", LARGEST_STORED, ids=["int8", "float8"])
# Every finite value of e4m3: 3 bits after the first, exponents -6 to 8, and subnormal multiples of 2^-9.
SUBNORMAL, NORMAL = range(8), [(e, m) for e, m in itertools.product(range(-6, 9), range(8)) if (e, m) != (8, 7)]
MAGNITUDES = {m * 2.0**-9 for m in SUBNORMAL} | {(8 + m) * 2.0 ** (e - 3) for e, m in NORMAL}
FLOAT8 = sorted(MAGNITUDES | {-magnitude for magnitude in MAGNITUDES})


def nearest(x: float, cache_dtype: torch.dtype) -> float:
    """The nearest value that can be stored; on a tie, the one whose last bit is 0."""
    if cache_dtype is torch.int8:
        return float(round(x))
    best = min(abs(number - x) for number in FLOAT8)
    near = [number for number in FLOAT8 if abs(number - x) == best]
    return next((number for number in near if is_even(number)), near[0])


def is_even(number: float) -> bool:
    """Whether the last of the three bits of a value of e4m3 is 0."""
    unit = 2.0 ** (max(math.frexp(number)[1] - 1, -6) - 3)
    return number / unit % 2 == 0


@EVERY_DTYPE
def test_every_number_is_the_nearest_that_can_be_stored(cache_dtype: torch.dtype) -> None:
    x = torch.randn(7, 3, 24) * torch.tensor([1e-6, 1.0, 1e6])[:, None]
    stored, scale = quantize(x, cache_dtype)
    assert (stored.dtype, scale.dtype) == (cache_dtype, torch.float32)
    assert (stored.shape, scale.shape) == (x.shape, x.shape[:-1])
    largest = torch.tensor(LARGEST_STORED[cache_dtype])
    for row, numbers, factor in zip(x.flatten(0, 1), stored.flatten(0, 1), scale.flatten(), strict=True):
        amax = row.abs().max()
        assert factor == amax / largest
        assert numbers.tolist() == [nearest(float(number), cache_dtype) for number in row * (largest / amax)]


def test_halves_are_rounded_to_even() -> None:
    halves = {
        torch.int8: ([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5], [127, 0, 2, 2, 0, -2, -126]),
        torch.float8_e4m3fn: (
            [448.0, 17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10, 432.0], [448.0, 16.0, 20.0, -16.0, 0.0, 2.0**-8, 448.0],
        ),
    }  # fmt: skip
    for cache_dtype, (x, rounded) in halves.items():
        stored, scale = quantize(torch.tensor(x), cache_dtype)
        assert (stored.float().tolist(), scale) == (rounded, 1.0)


@EVERY_DTYPE
def test_the_largest_number_comes_back_and_others_within_half_a_step(cache_dtype: torch.dtype) -> None:
    x = torch.randn(50, 64)
    back = dequantize(*quantize(x, cache_dtype))
    amax = x.abs().amax(dim=1, keepdim=True)
    assert ((back - x).abs() <= amax * (1 / 254 if cache_dtype is torch.int8 else 1 / 28) * 1.0001).all()
    at_largest = x.abs() == amax
    torch.testing.assert_close(back[at_largest], x[at_largest], rtol=3e-7, atol=0.0)


@EVERY_DTYPE
def test_zeros_have_scale_zero(cache_dtype: torch.dtype) -> None:
    stored, scale = quantize(torch.zeros(2, 5), cache_dtype)
    assert not stored.float().any()
    assert not scale.any()


@EVERY_DTYPE
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan], ids=str)
def test_a_number_that_is_not_finite_makes_its_token_nan_and_no_other(cache_dtype: torch.dtype, bad: float) -> None:
    x = torch.randn(3, 2, 5)
    x[1, 0, 2] = bad
    stored, scale = quantize(x, cache_dtype)
    spoiled = torch.zeros(3, 2, dtype=torch.bool)
    spoiled[1, 0] = True
    assert torch.equal(scale.isnan(), spoiled)
    assert not stored[1, 0].float().any()
    assert torch.equal(dequantize(stored, scale).isnan().all(dim=-1), spoiled)


@EVERY_DTYPE
@pytest.mark.parametrize("magnitude", [1e-45, 1e-40, 1e-37, 3e38], ids=str)
def test_numbers_at_the_ends_of_float32_stay_finite(cache_dtype: torch.dtype, magnitude: float) -> None:
    x: Tensor = magnitude * torch.tensor([1.0, -0.5, 0.0, 0.3])
    back = dequantize(*quantize(x, cache_dtype))
    assert back.isfinite().all()
    assert back[2] == 0.0
    assert ((back - x).abs() <= magnitude if magnitude < 1.0 else (back - x).abs() <= magnitude / 28).all()


@EVERY_DTYPE
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_first(cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    x = torch.randn(5, 16).to(dtype)
    for got, expected in zip(quantize(x, cache_dtype), quantize(x.float(), cache_dtype), strict=True):
        assert torch.equal(got.float(), expected.float())
