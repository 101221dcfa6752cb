"""Figures of Ascend chips, and their names."""

from __future__ import annotations

import pytest

from fastattention.backends.ascend.chips import CHIPS, find_chip
from fastattention.errors import ArgumentError


def test_peak_rates_are_the_published_ones() -> None:
    """Rates of a 910B are published. Rates of a die of a 910C follow from cores and clock: its 752 names no SKU."""
    assert {name: round(chip.peak_tflops) for name, chip in CHIPS.items()} == {
        "910B1": 364, "910B2": 354, "910B3": 295, "910B4": 246, "910B4-1": 246, "910_9362": 246, "910_9372": 295,
        "910_9382": 354, "910_9392": 364,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("910B2", "910B2"), ("Ascend910B2", "910B2"), ("Ascend910B2C", "910B2"), ("ascend910b4-1", "910B4-1"),
        ("Ascend910_9362", "910_9362"), ("Ascend910_9381", "910_9382"), (" ascend 910_9391", "910_9392"),
        ("910c", "910_9392"), ("A3", "910_9392"),
    ],
)  # fmt: skip
def test_chip_is_found_by_what_a_device_calls_itself(given: str, name: str) -> None:
    assert find_chip(given) is CHIPS[name]


@pytest.mark.parametrize(
    "given", ["", "910B", "910B9", "Ascend910", "Ascend910_9599", "Ascend310P3", "x910B2", "910B2 or so", "910_93"]
)
def test_unknown_chip_is_refused_with_those_that_are_known(given: str) -> None:
    known = r"910B1, .*, 910B4-1, 910_9362, .*, 910_9392, 910B2C, .*, 910C, A3$"
    with pytest.raises(ArgumentError, match=f"^chip={given!r} is not known; choose from {known}"):
        find_chip(given)


@pytest.mark.parametrize(
    ("names", "mebibytes"),
    [
        (("910B1", "910B2", "910B3", "910_9372", "910_9382", "910_9392"), 192),
        (("910B4-1", "910_9362"), 168),
        (("910B4",), 96),
    ],
)
def test_l2_caches_are_those_of_the_platform_descriptions(names: tuple[str, ...], mebibytes: int) -> None:
    assert {CHIPS[name].l2_bytes for name in names} == {mebibytes * 2**20}


def test_a_910c_is_two_chips() -> None:
    assert {name for name, chip in CHIPS.items() if chip.dies == 2} == {name for name in CHIPS if "_93" in name}


def test_vector_buffer_is_less_what_the_compiler_keeps() -> None:
    assert CHIPS["910B2"].ub_bytes == 188_160


def test_cores_share_the_bandwidth_of_memory() -> None:
    chip = CHIPS["910B4"]
    assert chip.memory_rate(1) == chip.hbm_rate
    together = chip.memory_rate(chip.num_cores) * chip.num_cores * chip.clock_hz
    assert together == pytest.approx(chip.hbm_bytes_per_second)
