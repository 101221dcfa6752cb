"""Parses and formats sizes in bytes: "16GiB", "16 GB", "500MiB", or a plain number of bytes."""

from __future__ import annotations

import re
from decimal import Decimal

from fastattention.errors import ArgumentError

UNITS = {"B": 1}
UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)}
UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)}
_BY_UPPER_CASE = {unit.upper(): factor for unit, factor in UNITS.items()}


def read_bytes(name: str, value: int | str) -> int:
    """Bytes of `value`, which is the argument `name`.

    The value is a number of bytes, or a text: a number, with decimals or without, and a unit. KB, MB, GB and TB are
    powers of 1000, KiB, MiB, GiB and TiB of 1024; no unit is bytes. The B must be a capital, since b means bits; the
    case of other letters does not matter. Parts of a byte are dropped. Raises ArgumentError for anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    count = _parse(value) if isinstance(value, str) else None
    if count is None:
        raise ArgumentError(f"{name}={value!r} is no size; use a number of bytes, or one with {', '.join(UNITS)}")
    return count


def read_bandwidth(name: str, value: str) -> int:
    """Bytes a second of a text such as "52GB/s": a size as read_bytes takes it, "/s" or not. Raises ArgumentError."""
    count = _parse(re.sub(r"\s*/\s*s\s*$", "", value))
    if count is None:
        units = ", ".join(f"{unit}/s" for unit in UNITS)
        raise ArgumentError(f"{name}={value!r} is no bandwidth in bytes a second; use a number with {units}")
    return count


def _parse(text: str) -> int | None:
    """Bytes of a text; None if it is no size. A lower-case b is not allowed: 16Gb are gigabits, an eighth of 16GB."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*((?:[kmgt]i?)?(?-i:B)|)\s*", text, re.ASCII | re.I)
    return None if found is None else int(Decimal(found[1]) * _BY_UPPER_CASE[found[2].upper() or "B"])


def format_bytes(count: int) -> str:
    """A number of bytes as text, in units of 1024, with two decimals: "12.55 GiB"."""
    for unit in ("GiB", "MiB", "KiB"):
        if count >= UNITS[unit]:
            return f"{count / UNITS[unit]:.2f} {unit}"
    return f"{count} B"
