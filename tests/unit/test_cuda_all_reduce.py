"""The sum over GPUs by kernels/all_reduce.cuh: which variant, how many CTAs, where its flags are, what it is told."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

import fastattention
from fastattention.backends.cuda.all_reduce import (
    MOST_CTAS,
    Flags,
    Peers,
    all_reduce_launch,
    all_reduce_params,
    ctas_for,
)
from fastattention.backends.cuda.kernel_config import (
    ALL_REDUCE_WARPS,
    AllReduceConfig,
    all_reduce_config,
)
from fastattention.backends.cuda.params import MOST_BLOCKS, MOST_PARTS
from fastattention.backends.cuda.variants import variants_of
from fastattention.gpu_runtime.chips import CHIPS

KERNELS = Path(fastattention.__file__).parent / "backends" / "cuda" / "kernels"
NAMES = ("float32", "float16", "bfloat16")
PACKETS_OF_CTA = 32 * ALL_REDUCE_WARPS


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("num_ranks", range(2, MOST_PARTS + 1))
def test_bulk_copies_are_for_hopper_and_newer(chip: str, num_ranks: int) -> None:
    config = all_reduce_config("bfloat16", num_ranks, CHIPS[chip])
    assert config == AllReduceConfig("bfloat16", num_ranks, bulk_copies=chip == "H100")
    assert config.shared_bytes <= CHIPS[chip].shared_per_cta
    for newer in (90, 100, 120):
        assert all_reduce_config("float32", num_ranks, CHIPS["H100"]._replace(target=newer)).bulk_copies


@pytest.mark.parametrize("num_ranks", range(2, MOST_PARTS + 1))
def test_bulk_copies_need_their_shared_memory(num_ranks: int) -> None:
    needed = AllReduceConfig("float16", num_ranks, bulk_copies=True).shared_bytes
    for missing, bulk_copies in ((0, True), (1, False)):
        limits = CHIPS["H100"]._replace(shared_per_cta=needed - missing)
        assert all_reduce_config("float16", num_ranks, limits).bulk_copies == bulk_copies
    assert all_reduce_config("float16", num_ranks, CHIPS["H100"]._replace(shared_per_cta=99 << 10)).shared_bytes == 0


@pytest.mark.parametrize(
    ("num_ranks", "stages", "at_once"),
    [(2, 6, 2), (3, 4, 2), (4, 3, 2), (5, 4, 1), (6, 4, 1), (7, 3, 1), (8, 3, 1)],
)
def test_shared_memory_is_stages_of_pieces_and_their_counters(num_ranks: int, stages: int, at_once: int) -> None:
    config = AllReduceConfig("bfloat16", num_ranks, bulk_copies=True)
    assert config.shared_bytes == stages * (num_ranks * at_once * 16 * PACKETS_OF_CTA + 8)
    assert config.macros()["FA_SHARED_BYTES"] == str(config.shared_bytes)
    assert [entry.shared_bytes for entry in config.entries] == [config.shared_bytes]


def test_macros_differ_where_variants_do() -> None:
    config = AllReduceConfig("bfloat16", 4, bulk_copies=True)
    assert (config.macros()["FA_RANKS"], config.macros()["FA_BULK_COPIES"]) == ("4", "1")
    assert config.name == "all_reduce_bfloat16_4_ranks_bulk"
    for change in ({"dtype": "float16"}, {"dtype": "float32"}, {"num_ranks": 8}, {"bulk_copies": False}):
        other = dataclasses.replace(config, **change)  # type: ignore[arg-type]
        assert other.macros() != config.macros()
        assert other.name != config.name


@pytest.mark.parametrize("chip", ["A100", "H100"])
def test_variants_for_usual_hosts_are_listed(chip: str) -> None:
    listed = {variant for variant in variants_of(CHIPS[chip], (64,)) if isinstance(variant, AllReduceConfig)}
    assert listed == {all_reduce_config(name, num_ranks, CHIPS[chip]) for name in NAMES for num_ranks in (2, 4, 8)}


def test_the_header_has_as_many_warps() -> None:
    warps = re.search(r"kAllReduceWarps = (\d+);", (KERNELS / "peer_reads.cuh").read_text())
    assert warps is not None
    assert int(warps[1]) == ALL_REDUCE_WARPS
    [entry] = AllReduceConfig("float16", 2, bulk_copies=False).entries
    assert entry.num_threads == PACKETS_OF_CTA


def test_a_step_is_made_once() -> None:
    step = all_reduce_launch(torch.bfloat16, 4, 12, True)
    assert (step.variant, step.num_ctas) == (AllReduceConfig("bfloat16", 4, bulk_copies=True), 12)
    assert all_reduce_launch(torch.bfloat16, 4, 12, True) is step
    assert all_reduce_launch(torch.float32, 4, 12, False).variant == AllReduceConfig("float32", 4, bulk_copies=False)


@pytest.mark.parametrize(
    ("packets", "num_ranks", "at_most", "whole", "ctas"),
    [
        (0, 2, 16, False, 1),
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
    packets: int, num_ranks: int, at_most: int, whole: bool, ctas: int
) -> None:
    assert ctas_for(16 * packets, num_ranks, at_most, whole) == ctas
    if packets > 0:
        assert ctas_for(16 * packets - 15, num_ranks, at_most, whole) == ctas  # a packet with one byte is one


def test_flags_do_not_overlap() -> None:
    sizes = (MOST_CTAS * MOST_PARTS, MOST_CTAS, 1, MOST_BLOCKS)
    begins = (Flags.ARRIVALS, Flags.STEPS, Flags.FINISHED, Flags.READY, Flags.COUNT)
    assert begins == tuple(sum(sizes[:i]) for i in range(5))


@pytest.mark.parametrize("awaits_blocks", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_parameters_are_those_of_the_call(awaits_blocks: bool, whole: bool) -> None:
    peers = Peers(1, (1600, 3200, 4800), (100, 10_000, 20_000))
    params = all_reduce_params(peers, 77, (5, 9), 6, 1234, awaits_blocks=awaits_blocks, whole=whole)
    nothing = [None] * (MOST_PARTS - 3)
    assert list(params.parts) == [1600, 3200, 4800, *nothing]
    assert list(params.arrivals) == [100, 10_000, 20_000, *nothing]
    assert params.ready == (10_000 + 4 * Flags.READY if awaits_blocks else None)
    assert (params.steps, params.finished) == (10_000 + 4 * Flags.STEPS, 10_000 + 4 * Flags.FINISHED)
    assert (params.out, params.patience, params.num_ctas, params.num_blocks) == (77, 1234, 6, 2)
    assert (params.rank, params.whole) == (1, int(whole))
    assert list(params.ends) == [5, 9, *[0] * (MOST_BLOCKS - 2)]


def test_as_many_blocks_as_there_is_room_for() -> None:
    ends = list(range(1, MOST_BLOCKS + 1))
    params = all_reduce_params(Peers(0, (16, 32), (4, 8)), 1, tuple(ends), 1, 1)
    assert list(params.ends) == ends
    assert params.num_blocks == MOST_BLOCKS
