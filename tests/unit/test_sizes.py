"""Sizes as people write them."""

from __future__ import annotations

import pytest

from fastattention.errors import ArgumentError
from fastattention.sizes import format_bytes, read_bandwidth, read_bytes


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (0, 0), (123, 123), ("123", 123), ("7B", 7), ("500MiB", 500 * 2**20), ("16GiB", 2**34), ("16GB", 16 * 10**9),
        (" 16 gB ", 16 * 10**9), ("16gIB", 2**34), ("1.5KiB", 1536), ("0.3B", 0), ("2TiB", 2**41), ("1TB", 10**12),
        ("1234567.000000000001TB", 1234567 * 10**12 + 1),  # more digits than a float has
    ],
)  # fmt: skip
def test_a_size_is_its_number_of_bytes(given: int | str, count: int) -> None:
    assert read_bytes("gpu_memory", given) == count


BITS = ["16Gb", "16gb", "16Gib", "16Gbit", "8b"]
NO_SIZES = ["", "GiB", "16G", "16Gib/s", "16 GB/s", "1KIB2", "-1", -1, "1e9", "1,5GB", "16 GiB of it"]
NO_NUMBERS = ["\N{ARABIC-INDIC DIGIT ONE}GB", 1.5, True, None]


@pytest.mark.parametrize("given", BITS + NO_SIZES + NO_NUMBERS)
def test_anything_else_is_refused_by_name(given: object) -> None:
    with pytest.raises(ArgumentError, match=r"gpu_memory=.* is no size; use a number of bytes, or one with B, KB, MB"):
        read_bytes("gpu_memory", given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "count"),
    [("52GB/s", 52 * 10**9), (" 52 gB / s ", 52 * 10**9), ("1.5GiB/s", 3 * 2**29), ("52GB", 52 * 10**9), ("9", 9)],
)
def test_a_bandwidth_is_its_number_of_bytes_a_second(given: str, count: int) -> None:
    assert read_bandwidth("link_bandwidth", given) == count


@pytest.mark.parametrize(
    "given", ["16Gb/s", "16gb/s", "16Gbit/s", "16Gbps", "16GBps", "16GB/h", "/s", "-1GB/s", "", "inf"]
)
def test_bits_and_other_rates_are_refused_by_name(given: str) -> None:
    message = r"link_bandwidth=.* is no bandwidth in bytes a second; use a number with B/s, KB/s, MB/s"
    with pytest.raises(ArgumentError, match=message):
        read_bandwidth("link_bandwidth", given)


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (2**29, "512.00 MiB"), (2**40, "1024.00 GiB")],
)
def test_a_size_is_written_in_units_of_1024(count: int, said: str) -> None:
    assert format_bytes(count) == said
