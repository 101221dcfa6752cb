"""Parameters for kernels/numbers.cuh."""

from __future__ import annotations


def divisor(name: str, size: int) -> dict[str, int]:
    """Factors by which kernels divide by `size` (Divisor in numbers.cuh), int32: `name`_multiplier, `name`_shift.

    They are zeros for sizes below 2.
    """
    multiplier = shift = 0
    if size >= 2:
        exponent = (size - 1).bit_length()
        multiplier = (-(-(1 << 31 + exponent) // size) ^ 1 << 31) - (1 << 31)
        shift = exponent - 1
    return {f"{name}_multiplier": multiplier, f"{name}_shift": shift}
