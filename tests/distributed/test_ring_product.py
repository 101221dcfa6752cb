"""The transport ring_product on fake GPUs: the order of its steps, shares and flags."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import Tensor

from distributed.fake_calls import BRAIN, CALLS, HALF, FakeCall, check_all, check_calls, sum_on, summed
from distributed.fake_gpus import PATIENCE, Host, Stream
from fastattention.distributed.transports import ring_steps
from fastattention.distributed.transports.ring_order import MOST_BLOCKS, joined, shares_of, steps
from fastattention.distributed.transports.ring_product import RingProduct
from fastattention.distributed.transports.ring_steps import PassOn
from fastattention.gpu_runtime.peer_memory import GRANULE, PeerMemory
from fastattention.gpu_runtime.streams import FlagWaits, FlagWrites, enqueue_all

SIZES = [2, 3, 4, 8]
FOUR = FakeCall((6, 6, 6, 6), 5, BRAIN)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_blocks", [1, 2, 5, MOST_BLOCKS])
def test_a_running_sum_has_a_turn_to_get_to_the_next_rank(num_blocks: int, size: int) -> None:
    order = list(steps(num_blocks, size))
    assert sorted(order) == list(itertools.product(range(num_blocks), range(size)))
    place = {step: number for number, step in enumerate(order)}
    for block, step in itertools.product(range(num_blocks), range(size - 1)):
        between = place[block, step + 1] - place[block, step] - 1
        in_the_midst = size - 1 <= block + step <= num_blocks - 2  # at either end there are fewer steps
        assert between == size if in_the_midst else between >= 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [(33,), (8, 8, 8), (1, 2, 1), (5, 23, 1, 7), (3,) * 16, (3, 1) * 17, (1,) * 99])
def test_shares_are_even_parts_of_neighbouring_blocks(rows: tuple[int, ...], size: int) -> None:
    shares = shares_of(rows, size)
    assert [row for block in shares for share in block for row in range(*share)] == list(range(sum(rows)))
    assert len(shares) <= MOST_BLOCKS
    assert {block[0].start for block in shares} <= {0, *itertools.accumulate(rows)}
    if len(rows) <= MOST_BLOCKS:
        assert [block[-1].stop - block[0].start for block in shares] == list(rows)
    for block in shares:
        counts = [share.stop - share.start for share in block]
        assert counts[0] == max(counts) == -(-sum(counts) // size)


def test_attention_of_blocks_that_are_joined_is_computed_at_once() -> None:
    """An error then occurs in the same step on all ranks, though these ask for shares in different orders."""
    assert RingProduct.attention_rows(mock.Mock(), (3,) * 37) == joined((3,) * 37) == (9,) * 12 + (3,)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_computes_rows_once_and_adds_but_where_sums_begin(size: int) -> None:
    blocks = (5, 8, 3, 9)

    def task(transport: RingProduct, rank: int, stream: Stream) -> dict[bool, list[int]]:
        rows: dict[bool, list[int]] = {False: [], True: []}  # by whether they are added to a sum

        def compute(start: int, stop: int, partial: Tensor, *, adds: bool = False) -> None:
            assert partial.shape == (stop - start, 6)
            rows[adds].extend(range(start, stop))

        out = torch.empty(sum(blocks), 6, dtype=HALF)
        stream.kept.append(out)
        transport.run(compute, out, blocks)
        return rows

    results = Host(size, RingProduct).run(task)
    once = list(range(sum(blocks)))
    assert [sorted(rows[False] + rows[True]) for rows in results] == [once] * size
    assert sorted(itertools.chain(*(rows[False] for rows in results))) == once


def test_blocks_are_summed_while_later_ones_are_computed() -> None:
    host, call = Host(3, RingProduct), FakeCall((5, 8, 3, 2, 9))
    expected = summed(host, call)[:5]

    def await_first(block: int, out: Tensor) -> None:
        deadline = time.monotonic() + PATIENCE
        while block == 4 and not torch.equal(out[:5], expected):
            assert time.monotonic() < deadline, "the first block is not summed before the last is computed"
            time.sleep(0)

    def task(transport: RingProduct, rank: int, stream: Stream) -> Tensor:
        return sum_on(transport, rank, stream, call, before=await_first)

    check_all([[found] for found in host.run(task)], host, [call])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_may_be_enqueued_on_one_queue_of_the_hardware(size: int) -> None:
    """The operations of a rank's streams run in the order in which they were enqueued, one after the other."""

    class OneQueue(Host):
        def make_stream(self, *_: object, **__: object) -> Stream:
            return self.here.streams[0]  # type: ignore[no-any-return]

    check_calls(OneQueue(size, RingProduct), list(CALLS.values()))


def flags_of(transport: RingProduct) -> Tensor:
    assert transport._peers is not None
    return transport._peers._handle.memory[transport._peers.nbytes :]


def test_a_call_that_fails_in_its_midst_leaves_no_flag_up() -> None:
    """It ends with the last of its fetches, however late, because the next call writes the memory that they read."""
    host = Host(3, RingProduct)
    calls = [FOUR, *(FOUR._replace(blocks=blocks) for blocks in ((4, 4, 5), (3,), (700, 1, 2, GRANULE // 8)))]

    def task(transport: RingProduct, rank: int, stream: Stream) -> tuple[list[Tensor], Tensor]:
        pass_on, results = transport._pass_on, []

        def late(then: PassOn) -> None:
            transport._stream.enqueue(lambda: time.sleep(0.03))
            pass_on(then)

        for number, call in enumerate(calls):
            late_fetches = mock.patch.object(transport, "_pass_on", late if rank == 1 else pass_on)
            with late_fetches, pytest.raises(MemoryError, match=f"no memory for block {number}"):
                sum_on(transport, rank, stream, FOUR, 10 + number, fails_at=number)
            results.append(sum_on(transport, rank, stream, call, number))
        stream.synchronize()
        return results, flags_of(transport)

    for results, flags in host.run(task):
        check_all([results], host, calls)
        assert not flags.any()


def test_an_interrupt_between_a_flag_and_the_wait_for_one_leaves_none_up() -> None:
    """All ranks are interrupted in one step. The flag that rank 0 has set would let rank 1 fetch too early later."""
    host, ended = Host(3, RingProduct), threading.Barrier(3)

    def task(transport: RingProduct, rank: int, stream: Stream) -> tuple[list[Tensor], Tensor]:
        pass_on = transport._pass_on
        passed_on = (place for place in steps(len(FOUR.blocks), 3) if place[1] < 2)

        def interrupted(then: PassOn) -> None:
            if next(passed_on) != (2, 0):
                pass_on(then)
                return
            if rank == 1:
                raises, waits, _ = then.operations
                assert (raises.doing, waits.doing) == ("writing flags", "waiting for another GPU")
                enqueue_all([raises])
            else:
                pass_on(then)
            raise KeyboardInterrupt

        def late(block: int, out: Tensor) -> None:
            time.sleep(0.05 if rank == 0 and block == 2 else 0.0)

        sum_on(transport, rank, stream, FOUR)
        with mock.patch.object(transport, "_pass_on", interrupted), pytest.raises(KeyboardInterrupt):
            sum_on(transport, rank, stream, FOUR, 9, before=late)
        stream.synchronize()
        ended.wait(PATIENCE)
        flags = flags_of(transport).clone()
        ended.wait(PATIENCE)  # before any rank sets a flag in the next call
        return [sum_on(transport, rank, stream, FOUR, number, before=late) for number in range(3)], flags

    for results, flags in host.run(task):
        check_all([results], host, [FOUR] * 3)
        assert not flags.any()


def test_what_failed_first_is_raised_where_the_end_of_the_call_fails_too() -> None:
    def task(transport: RingProduct, rank: int, stream: Stream) -> None:
        lost = mock.patch.object(transport, "_end", side_effect=RuntimeError("the context is lost"))
        with lost, pytest.raises(MemoryError):
            sum_on(transport, rank, stream, FOUR, fails_at=1)

    Host(1, RingProduct).run(task)


@pytest.mark.parametrize("size", SIZES)
def test_every_flag_has_one_that_raises_it_and_one_that_waits_for_it(size: int) -> None:
    """Every rank waits in its own memory: that of rank r is at r << 32."""
    raised, awaited, lowered = Counter[int](), Counter[int](), Counter[int]()

    def writes(addresses: list[int], value: int) -> FlagWrites:
        (raised if value else lowered).update(addresses)
        return mock.Mock(FlagWrites)

    def waits(addresses: list[int]) -> FlagWaits:
        assert {address >> 32 for address in addresses} <= {rank}
        awaited.update(addresses)
        return mock.Mock(FlagWaits)

    memory = mock.Mock(PeerMemory, flag=lambda rank, number: (rank << 32) + number)
    barrier = mock.Mock(side_effect=lambda mine, theirs: (waits(mine), writes(theirs, 1)))
    with mock.patch.multiple(ring_steps, FlagWrites=writes, FlagWaits=waits, StreamBarrier=barrier):
        for rank in range(size):
            ring_steps.RingFlags(memory, rank, size)
    numbers = {address: address & 0xFFFFFFFF for address in awaited}
    assert set(raised.values()) == set(awaited.values()) == {1}
    assert raised.keys() <= awaited.keys()
    assert max(numbers.values()) < ring_steps.RingFlags.needed(size)
    complete, barriers = MOST_BLOCKS * size, 2 * MOST_BLOCKS * size  # indices of the first ones
    own = {complete + block * size + rank for block, rank in itertools.product(range(MOST_BLOCKS), range(size))}
    assert {numbers[address] for address in awaited.keys() - raised.keys()} <= own  # no rank signals itself
    assert lowered.keys() == {address for address, number in numbers.items() if number < barriers}
