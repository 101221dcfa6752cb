"""The kernel that sums over GPUs, emulated on ranks that are processes: sizes, late ranks, ranks that never come."""

from __future__ import annotations

import random

import pytest
import torch
from emulated_ranks import AllReduceCall, Host
from tiers import deep, sampled, slow

from fastattention.distributed.transports.all_reduce import DTYPES, MOST_RANKS, PACKET_BYTES, WARPS, AllReduceConfig

PACKETS_OF_CTA = 32 * WARPS  # packets that it takes at once

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
every_size = pytest.mark.parametrize(
    "num_ranks", [2, 3, *(pytest.param(n, marks=deep) for n in range(4, MOST_RANKS)), MOST_RANKS]
)
every_way = pytest.mark.parametrize("bulk_copies", [False, True], ids=["registers", "bulk"])


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> None:
    """Seeds the order of execution and the values."""
    random.seed(request.node.name)
    torch.manual_seed(random.getrandbits(32))


def assert_right(config: AllReduceConfig, calls: list[AllReduceCall], first_step: int = 0) -> None:
    host = Host(config, calls, first_step)
    assert host.run() == [""] * config.num_ranks
    host.check()


@sampled
@every_dtype
@every_size
@every_way
def test_calls_of_all_sizes_one_after_the_other(dtype: torch.dtype, num_ranks: int, bulk_copies: bool) -> None:
    """Calls use the same memory and flags, different numbers of CTAs, and results at any offset."""
    of_packet = PACKET_BYTES // dtype.itemsize
    counts = [1, 2, num_ranks - 1, of_packet - 1, of_packet + 1, 133, 777, 1001, 2500, 4100]
    calls = [
        AllReduceCall(count, num_ctas, one_shot, random.randrange(8))
        for count in counts
        for num_ctas, one_shot in ((1, False), (random.randint(1, 4), random.random() < 0.5))
    ]
    random.shuffle(calls)
    assert_right(AllReduceConfig(dtype, num_ranks, bulk_copies), calls)


@sampled
@every_dtype
@every_size
@every_way
def test_every_cta_takes_many_chunks(dtype: torch.dtype, num_ranks: int, bulk_copies: bool) -> None:
    """There are more chunks than stages of shared memory, so stages and the phases of their counters are reused."""
    of_cta = PACKETS_OF_CTA * PACKET_BYTES // dtype.itemsize
    of_all = num_ranks * of_cta
    many = (2 * (24 // num_ranks) + 1) * of_all + random.randint(1, of_all)
    calls = [
        AllReduceCall(many, out_offset=1),
        AllReduceCall(3 * of_all, num_ctas=3),
        AllReduceCall(3 * of_cta + 5, num_ctas=2, one_shot=True),
    ]
    assert_right(AllReduceConfig(dtype, num_ranks, bulk_copies), calls)


@every_way
@pytest.mark.parametrize("one_shot", [False, True], ids=["two-shot", "one-shot"])
def test_nothing_is_read_before_the_last_rank_has_computed_it(bulk_copies: bool, one_shot: bool) -> None:
    calls = [AllReduceCall(1200, 1 + late % 2, one_shot, late=late) for late in (0, 1, 2, 0)]
    assert_right(AllReduceConfig(torch.bfloat16, 3, bulk_copies), calls)


@every_way
@pytest.mark.parametrize("num_ranks", [2, 5])
@pytest.mark.parametrize("first_step", [2**31 - 9, -12])
def test_steps_go_on_behind_the_largest_number(num_ranks: int, bulk_copies: bool, first_step: int) -> None:
    calls = [AllReduceCall(500, 2, one_shot) for one_shot in (False, False, True, False, False)]
    assert_right(AllReduceConfig(torch.float16, num_ranks, bulk_copies), calls, first_step)


@slow
@every_way
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_ranks_give_up_one_that_never_comes(bulk_copies: bool, missing: int) -> None:
    host = Host(AllReduceConfig(torch.float32, 3, bulk_copies), [AllReduceCall(1000)])
    complaints = host.run(*(rank for rank in range(3) if rank != missing), timeout=1_000_000_000)
    assert len(complaints) == 2
    assert all(complaint.startswith("fastattention_all_reduce of ") for complaint in complaints)
    assert all(complaint.endswith(f"cta 0, thread {missing} gave up") for complaint in complaints)
