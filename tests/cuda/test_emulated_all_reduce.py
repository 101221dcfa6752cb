"""The kernel that sums over GPUs, emulated on ranks that are processes: sizes, blocks, flags, ranks that never come."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from emulated_ranks import Call, Host
from tiers import thin

from fastattention.backends.cuda.all_reduce import PACKET_BYTES
from fastattention.backends.cuda.kernel_config import ALL_REDUCE_WARPS, AllReduceConfig
from fastattention.backends.cuda.params import MOST_BLOCKS

DTYPES = ("float16", "bfloat16", "float32")
PIECE = 32 * ALL_REDUCE_WARPS  # packets that a CTA takes at once

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_size = pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
every_way = pytest.mark.parametrize("bulk_copies", [False, True], ids=["registers", "bulk"])


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> None:
    """Of what is drawn here, and of numbers."""
    random.seed(request.node.name)
    torch.manual_seed(random.getrandbits(32))


def numbers_of_packet(dtype: str) -> int:
    return PACKET_BYTES // getattr(torch, dtype).itemsize


def some_ends(count: int, num_blocks: int) -> list[int]:
    """Of blocks that begin and end anywhere; some may have no number at all."""
    return [*sorted(random.choices(range(1, count + 1), k=num_blocks - 1)), count]


def shuffled(num_blocks: int) -> list[int]:
    return random.sample(range(num_blocks), num_blocks)


def assert_right(host: Host, num_ranks: int) -> None:
    assert host.run() == [""] * num_ranks
    host.check()


@thin(quick=23, all=7)
@every_dtype
@every_size
@every_way
def test_calls_of_all_sizes_one_after_the_other(dtype: str, num_ranks: int, bulk_copies: bool) -> None:
    """Through the same memory and flags, by changing numbers of CTAs."""
    counts = [1, 2, num_ranks - 1, numbers_of_packet(dtype) - 1, numbers_of_packet(dtype) + 1, 133, 1001, 4100]
    calls = [
        Call([count], num_ctas, whole, offset)
        for count in counts
        for num_ctas, whole, offset in (
            (1, False, random.randrange(8)),
            (random.randint(1, 4), random.random() < 0.5, 0),
        )
    ]
    calls += [Call(some_ends(random.randint(50, 3000), num_blocks)) for num_blocks in (2, 5, MOST_BLOCKS)]
    random.shuffle(calls)
    assert_right(Host(AllReduceConfig(dtype, num_ranks, bulk_copies), calls), num_ranks)


@thin(quick=23, all=7)
@every_dtype
@every_size
@every_way
def test_every_cta_takes_many_pieces(dtype: str, num_ranks: int, bulk_copies: bool) -> None:
    """More than there are stages of shared memory, so that stages and the phases of their counters come again."""
    of_all = num_ranks * PIECE * numbers_of_packet(dtype)
    many = (2 * (24 // num_ranks) + 1) * of_all + random.randint(1, of_all)
    calls = [
        Call([many], out_offset=1),
        Call(some_ends(3 * of_all, 4), num_ctas=3),
        Call([3 * PIECE * numbers_of_packet(dtype) + 5], num_ctas=2, whole=True),
    ]
    assert_right(Host(AllReduceConfig(dtype, num_ranks, bulk_copies), calls), num_ranks)


@thin(quick=23, all=7)
@every_dtype
@every_size
@every_way
def test_blocks_are_awaited_in_whatever_order_they_are_computed(dtype: str, num_ranks: int, bulk_copies: bool) -> None:
    """Before its flag is raised a block is NaN, and the last one may be first."""
    calls = []
    for num_blocks, num_ctas in ((1, 1), (3, 2), (MOST_BLOCKS, 3), (MOST_BLOCKS, 1)):
        raised = [shuffled(num_blocks) for _ in range(num_ranks)]
        calls.append(Call(some_ends(2500, num_blocks), num_ctas, num_blocks == 3, 3 * (num_ctas % 2), raised))
    for last in range(num_ranks):
        raised = [shuffled(5) if rank != last else list(range(5)) for rank in range(num_ranks)]
        calls.append(Call(some_ends(1200, 5), 1 + last % 2, last % 3 == 1, 0, raised, last))
    reverse = list(reversed(range(5)))
    calls.append(Call(some_ends(999, 5), raised=[reverse] * num_ranks))
    assert_right(Host(AllReduceConfig(dtype, num_ranks, bulk_copies), calls), num_ranks)


@thin(quick=71, all=17)
@every_dtype
@every_size
@every_way
@pytest.mark.parametrize("offset", [1, 3, 7])
def test_out_may_begin_anywhere(dtype: str, num_ranks: int, bulk_copies: bool, offset: int) -> None:
    calls = [Call(some_ends(777, 3), 2, whole, offset) for whole in (False, True)]
    assert_right(Host(AllReduceConfig(dtype, num_ranks, bulk_copies), calls), num_ranks)


@every_way
@pytest.mark.parametrize("num_ranks", [2, 5])
@pytest.mark.parametrize("first_step", [2**31 - 9, -12])
def test_steps_go_on_behind_the_largest_number(num_ranks: int, bulk_copies: bool, first_step: int) -> None:
    calls = [Call(some_ends(500, num_blocks), 2) for num_blocks in (1, 2, 7, 1)]
    host = Host(AllReduceConfig("float16", num_ranks, bulk_copies), calls, first_step)
    assert_right(host, num_ranks)


@every_way
@pytest.mark.parametrize("num_ranks", [5, 6, 7])
def test_other_numbers_of_ranks(num_ranks: int, bulk_copies: bool) -> None:
    calls = [Call([4000]), Call(some_ends(60_000, 3), 2), Call([100], whole=True)]
    assert_right(Host(AllReduceConfig("bfloat16", num_ranks, bulk_copies), calls), num_ranks)


@every_way
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_ranks_give_up_one_that_never_comes(bulk_copies: bool, missing: int) -> None:
    host = Host(AllReduceConfig("float32", 3, bulk_copies), [Call([1000])])
    here = [rank for rank in range(3) if rank != missing]
    complaints = host.run(here, patience=200_000_000)
    assert all(complaint.startswith("fastattention_all_reduce of ") for complaint in complaints)
    assert all(complaint.endswith(f"cta 0, thread {missing} gave up") for complaint in complaints)


@every_way
@pytest.mark.parametrize("raised", [[], [0], [1]], ids=["nothing", "the first", "the last"])
def test_a_block_that_is_never_computed_is_given_up(bulk_copies: bool, raised: Sequence[int]) -> None:
    """By its own rank, whose flag is missing, and so by the others."""
    host = Host(AllReduceConfig("float32", 2, bulk_copies), [Call([500, 1000], raised=[[0, 1], raised])])
    complaints = host.run(patience=200_000_000)
    assert [complaint.split(", ")[-1] for complaint in complaints] == ["thread 1 gave up", "thread 0 gave up"]
