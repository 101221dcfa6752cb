"""The transport ring_product without GPUs: the order of its steps, shares and flags (pretended_gpus.py)."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from distributed.pretended_calls import BRAIN, CALLS, HALF, check, share_of, sum_on
from distributed.pretended_gpus import Host, Stream
from distributed.pretended_kernels import PATIENCE
from fastattention.distributed.ring_order import MOST_BLOCKS, joined, shares_of, steps
from fastattention.distributed.transports import ring_steps
from fastattention.distributed.transports.ring_product import RingProduct
from fastattention.distributed.transports.ring_steps import PassOn
from fastattention.distributed.trials import Candidate
from fastattention.gpu_runtime.peer_memory import FLAG_BYTES, GRANULE, PeerMemory
from fastattention.gpu_runtime.streams import FlagWaits, FlagWrites, enqueue_all

SIZES = [2, 3, 4, 8]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_blocks", [1, 2, 5, MOST_BLOCKS])
def test_a_running_sum_has_a_turn_to_get_to_the_next_rank(num_blocks: int, size: int) -> None:
    order = list(steps(num_blocks, size))
    assert sorted(order) == list(itertools.product(range(num_blocks), range(size)))
    place = {step: number for number, step in enumerate(order)}
    for block, step in itertools.product(range(num_blocks), range(size - 1)):
        between = place[block, step + 1] - place[block, step] - 1
        in_the_midst = size - 1 <= block + step <= num_blocks - 2  # at either end there is less to do
        assert between == size if in_the_midst else between >= 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [(33,), (8, 8, 8), (1, 2, 1), (5, 23, 1, 7), (3,) * 16, (3, 1) * 17, (1,) * 99])
def test_shares_are_even_parts_of_neighbouring_blocks(rows: tuple[int, ...], size: int) -> None:
    shares = shares_of(rows, size)
    flat = [row for block in shares for share in block for row in range(*share)]
    assert flat == list(range(sum(rows)))
    assert len(shares) <= MOST_BLOCKS
    assert {block[0].start for block in shares} <= {0, *itertools.accumulate(rows)}
    if len(rows) <= MOST_BLOCKS:
        assert [block[-1].stop - block[0].start for block in shares] == list(rows)
    for block in shares:
        counts = [share.stop - share.start for share in block]
        assert counts[0] == max(counts) == -(-sum(counts) // size)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_computes_every_row_once_and_adds_but_where_a_sum_begins(size: int) -> None:
    blocks = (5, 8, 3, 9)

    def task(transport: RingProduct, rank: int, stream: Stream) -> tuple[list[int], list[int]]:
        begun: list[int] = []
        added: list[int] = []

        def compute(start: int, stop: int, partial: Tensor, *, adds: bool = False) -> None:
            assert partial.shape == (stop - start, 6)
            (added if adds else begun).extend(range(start, stop))

        transport.run(compute, torch.empty(sum(blocks), 6, dtype=HALF), blocks)
        return begun, added

    results = Host(size, RingProduct).run(task)
    for begun, added in results:
        assert Counter(begun + added) == Counter(range(sum(blocks)))
    assert Counter(itertools.chain.from_iterable(begun for begun, _ in results)) == Counter(range(sum(blocks)))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_may_be_enqueued_on_one_queue_of_the_hardware(size: int) -> None:
    """What a rank's streams do is done in the order in which it was enqueued, each operation after the one before."""

    def task(transport: RingProduct, rank: int, stream: Stream) -> list[Tensor]:
        calls = enumerate(CALLS.values())
        return [sum_on(transport, rank, stream, call, blocks, **like) for call, (blocks, like) in calls]

    class OneQueue(Host):
        def make_stream(self, *_: object, **__: object) -> Stream:
            return self.here.streams[0]  # type: ignore[no-any-return]

    for results in OneQueue(size, RingProduct).run(task):
        for (call, (blocks, like)), found in zip(enumerate(CALLS.values()), results, strict=True):
            check(found, RingProduct, size, call, blocks, **like)


def test_a_call_that_fails_in_its_midst_leaves_no_flag_up() -> None:
    blocks, like = (4, 4, 4, 4), {"hidden": 5, "dtype": BRAIN}

    def task(transport: RingProduct, rank: int, stream: Stream) -> tuple[list[Tensor], Tensor]:
        results = []
        for call in range(4):
            with pytest.raises(MemoryError):
                sum_on(transport, rank, stream, call + 10, blocks, fails_at=call, **like)
            results.append(sum_on(transport, rank, stream, call, blocks, **like))
        stream.synchronize()
        return results, flags_of(transport)

    for results, flags in Host(3, RingProduct).run(task):
        for call, found in enumerate(results):
            check(found, RingProduct, 3, call, blocks, **like)
        assert not flags.any()


def flags_of(transport: RingProduct) -> Tensor:
    assert transport._peers is not None
    return transport._peers._handle.memory[transport._peers.nbytes :]


def test_an_interrupt_between_a_flag_and_the_wait_for_one_leaves_none_up() -> None:
    """All ranks are interrupted in one step. The flag that rank 0 has raised would let rank 1 fetch too early later."""
    blocks, like = (6, 6, 6, 6), {"hidden": 5, "dtype": BRAIN}
    ended = threading.Barrier(3)

    def task(transport: RingProduct, rank: int, stream: Stream) -> tuple[list[Tensor], Tensor]:
        pass_on = transport._pass_on
        passed_on = (place for place in steps(len(blocks), 3) if place[1] < 2)

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

        sum_on(transport, rank, stream, 0, blocks, **like)
        with mock.patch.object(transport, "_pass_on", interrupted), pytest.raises(KeyboardInterrupt):
            sum_on(transport, rank, stream, 9, blocks, **like)
        stream.synchronize()
        ended.wait(PATIENCE)
        flags = flags_of(transport).clone()
        ended.wait(PATIENCE)  # before anybody raises one in the next call
        return [sum_on(transport, rank, stream, call, blocks, before=late, **like) for call in range(3)], flags

    for results, flags in Host(3, RingProduct).run(task):
        assert not flags.any()
        for call, found in enumerate(results):
            check(found, RingProduct, 3, call, blocks, **like)


def test_a_call_that_has_failed_is_over_when_the_last_of_its_fetches_is() -> None:
    """However late: what they read is written by the next call."""
    blocks, like = (6, 6, 6, 6), {"hidden": 5, "dtype": BRAIN}

    def task(transport: RingProduct, rank: int, stream: Stream) -> list[Tensor]:
        pass_on, results = transport._pass_on, []

        def late(*arguments: Any) -> None:
            transport._stream.enqueue(lambda: time.sleep(0.03))
            pass_on(*arguments)

        for call in range(4):
            with mock.patch.object(transport, "_pass_on", late if rank == 1 else pass_on), pytest.raises(MemoryError):
                sum_on(transport, rank, stream, 10 + call, blocks, fails_at=call, **like)
            results.append(sum_on(transport, rank, stream, call, blocks, **like))
        return results

    for results in Host(3, RingProduct).run(task):
        for call, found in enumerate(results):
            check(found, RingProduct, 3, call, blocks, **like)


def test_what_failed_first_is_raised_where_the_end_of_the_call_fails_too() -> None:
    def task(transport: RingProduct, rank: int, stream: Stream) -> None:
        with (
            mock.patch.object(transport, "_end", side_effect=RuntimeError("the context is lost")),
            pytest.raises(MemoryError),
        ):
            sum_on(transport, rank, stream, 0, (4, 4), fails_at=1, hidden=5, dtype=BRAIN)

    Host(1, RingProduct).run(task)


def test_attention_of_blocks_that_are_joined_is_computed_at_once() -> None:
    """So that where it fails it fails in one step on all ranks, though these ask for shares in different orders."""
    rows = (3,) * 37
    transport = mock.Mock(asks_for_shares=True)
    with mock.patch("fastattention.distributed.trials.AttentionAhead") as ahead:
        Candidate(rows, transport).run(mock.Mock(), torch.empty(111, 4))
    assert ahead.call_args.args[1] == joined(rows) == (9,) * 12 + (3,)


@pytest.mark.parametrize("size", SIZES)
def test_every_flag_has_one_that_raises_it_and_one_that_waits_in_its_own_memory(size: int) -> None:
    """Rank r's memory is at r << 32."""
    raised: Counter[int] = Counter()
    awaited: Counter[int] = Counter()
    lowered: Counter[int] = Counter()
    needed = ring_steps.Flags.needed(size)

    def writes(addresses: list[int], value: int) -> FlagWrites:
        (raised if value else lowered).update(addresses)
        return mock.Mock(FlagWrites)

    def waits(addresses: list[int]) -> FlagWaits:
        assert {address >> 32 for address in addresses} <= {rank}
        awaited.update(addresses)
        return mock.Mock(FlagWaits)

    def meeting(mine: list[int], theirs: list[int]) -> object:
        waits(mine)
        return writes(theirs, 1)

    def rendezvous(memory: Tensor, _: object) -> SimpleNamespace:
        return SimpleNamespace(buffer_ptrs=[other << 32 for other in range(size)], memory=memory)

    with (
        mock.patch.object(ring_steps, "FlagWrites", writes),
        mock.patch.object(ring_steps, "FlagWaits", waits),
        mock.patch.object(ring_steps, "Meeting", meeting),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch("torch.distributed._symmetric_memory.empty", torch.empty),
        mock.patch("torch.distributed._symmetric_memory.rendezvous", rendezvous),
    ):
        for rank in range(size):
            ring_steps.Flags(PeerMemory(100, needed, torch.device("cpu"), "group"), rank, size)
    assert set(raised.values()) == {1}
    assert raised.keys() <= awaited.keys()
    never = {address & 0xFFFFFFFF for address in awaited.keys() - raised.keys()}
    complete = MOST_BLOCKS * size
    own = {complete + block * size + rank for block, rank in itertools.product(range(MOST_BLOCKS), range(size))}
    assert {(place - GRANULE) // FLAG_BYTES for place in never} <= own  # nobody tells itself, nor waits for that
    assert set(awaited.values()) == {1}
    meetings = 2 * MOST_BLOCKS * size * FLAG_BYTES + GRANULE  # theirs are behind the others
    assert lowered.keys() == {address for address in awaited if address & 0xFFFFFFFF < meetings}
    for address in raised:
        assert 0 <= (address & 0xFFFFFFFF) - GRANULE < needed * FLAG_BYTES


def test_numbers_are_rounded_by_every_rank() -> None:
    """What the other tests compare with is no accident: in bfloat16 it differs from sums that are rounded once."""
    blocks, like = (64,), {"hidden": 64, "dtype": BRAIN}
    parts = [share_of(rank, 0, 64, **like) for rank in range(4)]
    once = torch.stack(parts).float().sum(0).to(BRAIN)

    def task(transport: RingProduct, rank: int, stream: Stream) -> Any:
        return sum_on(transport, rank, stream, 0, blocks, **like)

    found = Host(4, RingProduct).run(task)[0]
    check(found, RingProduct, 4, 0, blocks, **like)
    assert not torch.equal(found[16:-16].view(64, 64), once)
    torch.testing.assert_close(found[16:-16].view(64, 64).float(), once.float(), rtol=2**-6, atol=2**-6)
