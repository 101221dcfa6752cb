"""Launches of kernels/all_reduce.cuh: variant, number of CTAs, flags and parameters."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fastattention.distributed.transports.all_reduce import (
    DTYPES,
    MOST_CTAS,
    MOST_RANKS,
    PACKET_BYTES,
    WARPS,
    AllReduceConfig,
    FlagLayout,
    choose_config,
    ctas_for,
    make_params,
    usual_configs,
)
from fastattention.gpu_runtime.chips import CHIPS

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
PACKETS_OF_CTA = 32 * WARPS


@pytest.mark.parametrize("num_ranks", range(2, MOST_RANKS + 1))
@pytest.mark.parametrize("chip", CHIPS)
def test_bulk_copies_are_for_hopper_and_newer_with_their_shared_memory(chip: str, num_ranks: int) -> None:
    config = choose_config(BRAIN, num_ranks, CHIPS[chip])
    assert config == AllReduceConfig(BRAIN, num_ranks, bulk_copies=chip == "H100")
    assert config.shared_bytes <= CHIPS[chip].shared_per_cta
    needed = AllReduceConfig(BRAIN, num_ranks, bulk_copies=True).shared_bytes
    for newer in (90, 100, 120):
        limits = CHIPS[chip]._replace(target=newer, shared_per_cta=needed)
        assert choose_config(BRAIN, num_ranks, limits).bulk_copies
        without = choose_config(BRAIN, num_ranks, limits._replace(shared_per_cta=needed - 1))
        assert (without.bulk_copies, without.shared_bytes) == (False, 0)


@pytest.mark.parametrize(
    ("num_ranks", "stages", "at_once"), [(2, 6, 2), (3, 4, 2), (4, 3, 2), (5, 4, 1), (6, 4, 1), (7, 3, 1), (8, 3, 1)]
)
def test_shared_memory_is_stages_of_chunks_and_their_counters(num_ranks: int, stages: int, at_once: int) -> None:
    config = AllReduceConfig(BRAIN, num_ranks, bulk_copies=True)
    assert config.shared_bytes == stages * (num_ranks * at_once * PACKET_BYTES * PACKETS_OF_CTA + 8)
    assert f"int shared_bytes = {config.shared_bytes};" in config.declaration
    assert [entry.shared_bytes for entry in config.entries] == [config.shared_bytes]


def test_declarations_differ_where_variants_do() -> None:
    config = AllReduceConfig(BRAIN, 4, bulk_copies=True)
    assert "int num_ranks = 4;" in config.declaration
    assert "bool bulk_copies = true;" in config.declaration
    assert config.name == "all_reduce_bfloat16_nr4_bc"
    for change in ({"dtype": HALF}, {"dtype": SINGLE}, {"num_ranks": 8}, {"bulk_copies": False}):
        other = dataclasses.replace(config, **change)  # type: ignore[arg-type]
        assert other.declaration != config.declaration
        assert other.name != config.name


@pytest.mark.parametrize("chip", ["A100", "H100"])
def test_variants_for_usual_hosts_are_listed(chip: str) -> None:
    def listed(*dtypes: torch.dtype) -> list[AllReduceConfig]:
        return [choose_config(dtype, num_ranks, CHIPS[chip]) for dtype in dtypes for num_ranks in (2, 4, 8)]

    assert list(usual_configs(CHIPS[chip])) == listed(*DTYPES)
    assert list(usual_configs(CHIPS[chip], [HALF])) == listed(SINGLE, HALF)


@pytest.mark.parametrize(
    ("packets", "num_ranks", "at_most", "one_shot", "ctas"),
    [
        (1, 2, 16, False, 1),
        (2 * PACKETS_OF_CTA, 2, 16, False, 1),
        (2 * PACKETS_OF_CTA + 1, 2, 16, False, 2),
        (8 * 5 * PACKETS_OF_CTA, 8, 16, False, 5),
        (8 * 500 * PACKETS_OF_CTA, 8, 16, False, 16),
        (PACKETS_OF_CTA, 8, 16, True, 1),
        (3 * PACKETS_OF_CTA + 1, 8, 16, True, 4),
        (3 * PACKETS_OF_CTA + 1, 8, 3, True, 3),
    ],
)
def test_ctas_are_those_that_have_something_to_do(
    packets: int, num_ranks: int, at_most: int, one_shot: bool, ctas: int
) -> None:
    assert ctas_for(16 * packets, num_ranks, at_most, one_shot) == ctas
    assert ctas_for(16 * packets - 15, num_ranks, at_most, one_shot) == ctas  # a packet with one byte is one


@pytest.mark.parametrize("one_shot", [False, True])
def test_parameters_are_those_of_the_call(one_shot: bool) -> None:
    params = make_params((1600, 3200, 4800), (100, 10_000, 20_000), 1, 9, 6, 1234, one_shot)
    unused = [None] * (MOST_RANKS - 3)
    assert list(params.parts) == [1600, 3200, 4800, *unused]
    assert list(params.arrivals) == [100, 10_000, 20_000, *unused]
    assert (params.out, params.steps) == (None, 10_000 + 4 * MOST_CTAS * MOST_RANKS)
    assert FlagLayout.COUNT == MOST_CTAS * (MOST_RANKS + 1)
    assert (params.count, params.num_ctas, params.rank) == (9, 6, 1)
    assert (params.timeout, params.one_shot) == (1234, int(one_shot))
