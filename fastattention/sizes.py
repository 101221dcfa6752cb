"""Parses and formats sizes in bytes: "16GiB", "16 GB", "500MiB", or a plain number of bytes."""

from __future__ import annotations

import re
from decimal import Decimal

from fastattention.errors import ArgumentError

UNITS = {"B": 1}
UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)}
UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)}
_BY_LOWER_CASE = {unit.lower(): factor for unit, factor in UNITS.items()}


def read_bytes(name: str, value: int | str) -> int:
    """Bytes of `value`, which is the argument `name`.

    A number of bytes, or a text: a number, with decimals or without, and a unit. KB, MB, GB and TB are powers of 1000,
    KiB, MiB, GiB and TiB of 1024; no unit is bytes, and capitals do not matter. Parts of a byte are dropped. Raises
    ArgumentError for anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value, re.ASCII | re.I) if isinstance(value, str) else None
    )
    factor = _BY_LOWER_CASE.get(found[2].lower() or "b") if found else None
    if found is None or factor is None:
        raise ArgumentError(f"{name}={value!r} is no size; use a number of bytes, or one with {', '.join(UNITS)}")
    return int(Decimal(found[1]) * factor)


def format_bytes(count: int) -> str:
    """A number of bytes to read, in units of 1024, with two decimals: "12.55 GiB"."""
    for unit in ("GiB", "MiB", "KiB"):
        if count >= UNITS[unit]:
            return f"{count / UNITS[unit]:.2f} {unit}"
    return f"{count} B"
