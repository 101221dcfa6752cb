"""Division in kernels, by the parameters that `divisor` computes."""

from __future__ import annotations

import pytest

from fastattention.backends.cuda.common.numbers import divisor


@pytest.mark.parametrize("size", [2, 3, 5, 7, 8, 12, 33, 64, 132, 1000, 65_535, 65_536, 2**30 + 1, 2**31 - 1])
def test_kernels_divide_by_multiplication(size: int) -> None:
    """The test repeats numbers.cuh, on unsigned 32 bits."""
    multiplier, shift = divisor("x", size).values()
    assert -(2**31) <= multiplier < 2**31
    assert 0 <= shift < 32
    near = (number + step for number in (0, size, 2 * size, 2**31 // size * size, 2**31) for step in (-1, 0, 1))
    for number in (*near, *(2**31 * part // 97 for part in range(97))):
        if 0 <= number < 2**31:
            assert (number * (multiplier % 2**32) >> 32) >> shift == number // size


@pytest.mark.parametrize("size", [0, 1])
def test_nothing_is_divided_by_one(size: int) -> None:
    assert divisor("x", size) == {"x_multiplier": 0, "x_shift": 0}
