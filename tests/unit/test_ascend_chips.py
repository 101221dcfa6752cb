"""What is known of Ascend chips, and their names."""

from __future__ import annotations

import pytest

from fastattention.backends.ascend.chips import CHIPS, find_chip
from fastattention.errors import ArgumentError


@pytest.mark.parametrize(("name", "tflops"), [("910B1", 364), ("910B2", 354), ("910B3", 295), ("910B4", 246)])
def test_peak_rate_is_the_published_one(name: str, tflops: int) -> None:
    assert CHIPS[name].peak_tflops == pytest.approx(tflops, abs=0.5)


@pytest.mark.parametrize(
    ("given", "name"),
    [("910B2", "910B2"), ("Ascend910B2", "910B2"), ("Ascend910B2C", "910B2"), ("ascend910b4-1", "910B4")],
)
def test_chip_is_found_by_what_a_device_calls_itself(given: str, name: str) -> None:
    assert find_chip(given) is CHIPS[name]


@pytest.mark.parametrize("given", ["", "910B", "910B9", "Ascend910_9392", "Ascend310P3", "x910B2", "910B2 or so"])
def test_unknown_chip_is_refused_with_those_that_are_known(given: str) -> None:
    with pytest.raises(ArgumentError, match="is not known; choose from 910B1, 910B2, 910B3, 910B4"):
        find_chip(given)


def test_vector_buffer_is_less_what_the_compiler_keeps() -> None:
    assert CHIPS["910B2"].ub_bytes == 188_160


def test_cores_share_the_bandwidth_of_memory() -> None:
    chip = CHIPS["910B4"]
    assert chip.memory_rate(1) == chip.hbm_rate
    together = chip.memory_rate(chip.num_cores) * chip.num_cores * chip.clock_hz
    assert together == pytest.approx(chip.hbm_bytes_per_second)
