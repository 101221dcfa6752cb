"""Sums and layers over GPUs, by every transport: right, and the same on all ranks, in any order of late ranks.

Skipped without two GPUs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed.layers import HIDDEN, assert_as_exact_as, causal, exact, parallel, thirds, whole
from distributed.sums import Sum, arguments_of, check, check_repeated, run_part, run_repeated
from distributed.team import GPU_PATIENCE, MOST_GPUS, Team, meet, skip_module_without_two_gpus
from fastattention import UnsupportedError
from fastattention.backends.sdpa import gpu_kernels
from fastattention.distributed import TilingAllReduce, agreement
from fastattention.distributed.row_blocks import AttentionOutProj
from fastattention.distributed.transports import TRANSPORTS
from fastattention.testing.case import DenseCase, KvCacheCase

skip_module_without_two_gpus()

TURNS = 12
CYCLES = 3_000_000  # about two milliseconds: longer than any block here


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest, pool: Callable[[], Team]) -> str:
    name: str = request.param
    reason = pool().run(refusal, name)[0]
    if reason is not None:
        pytest.skip(reason)
    return name


def dense(name: str, partition: tuple[int, ...] | str, dtype: torch.dtype, hidden: int = 72, **case: Any) -> Sum:
    return Sum(DenseCase(name=name, **case), partition, dtype, hidden=hidden)


def cached(name: str, partition: tuple[int, ...], **case: Any) -> Sum:
    return Sum(KvCacheCase(name=name, **case), partition, torch.bfloat16, hidden=72)


def refusal(transport: str) -> str | None:
    """Why a transport cannot serve these GPUs, or None."""
    try:
        run_with(dense("small", (4,), torch.bfloat16, batch_size=1, seqlen_q=4, seqlen_k=4), transport)
    except UnsupportedError as error:
        return str(error)
    return None


HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
UNEVEN = {"batch_size": 3, "seqlen_q": 17, "seqlen_k": 29}
CAUSAL = {"batch_size": 2, "seqlen_q": 33, "seqlen_k": 33, "nheads": 6, "nheads_k": 2, "causal": True}
LONG = {"batch_size": 3, "seqlen_q": 600, "seqlen_k": 600, "nheads": 4, "nheads_k": 2, "headdim": 64, "causal": True}

SUMS = [
    dense("bfloat16", (5, 23, 23), BRAIN, **UNEVEN),
    dense("float16", (5, 23, 23), HALF, **UNEVEN),
    dense("float32", (5, 23, 23), SINGLE, **UNEVEN),
    dense("one-block", (51,), BRAIN, **UNEVEN),
    dense("a-block-a-row", (1,) * 8, BRAIN, batch_size=2, seqlen_q=4, seqlen_k=4, causal=True),
    dense("rows-of-6-bytes", (5, 23, 23), BRAIN, hidden=3, **UNEVEN),
    dense("fewer-bytes-than-ranks", (1, 1), HALF, hidden=1, batch_size=1, seqlen_q=2, seqlen_k=2),
    dense("causal-gqa", (7, 13, 46), BRAIN, **CAUSAL),
    dense("causal-more-keys", (3, 15, 4), BRAIN, batch_size=2, seqlen_q=11, seqlen_k=40, causal=True),
    dense("rows-without-keys", (9, 10, 36, 25), BRAIN, batch_size=2, seqlen_q=40, seqlen_k=11, causal=True),
    dense("window", (11, 19, 52), HALF, batch_size=2, seqlen_q=41, seqlen_k=41, window=(6, 3)),
    dense("long", (500, 100, 700, 500), BRAIN, hidden=1000, **LONG),
    dense("long-float16", (1200, 600), HALF, hidden=1000, **LONG),
    cached("cache", (5, 15, 7), cache_seqlens=(40, 17, 29), seqlen_q=9, causal=True),
    cached("paged", (5, 15, 7), cache_seqlens=(40, 17, 29), seqlen_q=9, causal=True, page_block_size=16),
]
BIASED = Sum(DenseCase(name="bias", **UNEVEN), (5, 23, 23), BRAIN, bias=True, hidden=72)


@pytest.mark.parametrize("one", [*SUMS, BIASED], ids=lambda one: one.case.name)
def test_the_sum_is_right_and_the_same_on_all_ranks(gpus: Team, transport: str, one: Sum) -> None:
    one = served(one, transport)
    check(one, gpus.run(run_with, one, transport))


def served(one: Sum, transport: str) -> Sum:
    """The call in blocks, or in one block for the transport without blocks."""
    return replace(one, partition=(one.rows,)) if transport == "peer_kernel" and one.partition != "auto" else one


def run_with(one: Sum, transport: str, backend: str = "auto") -> Tensor:
    return run_part(one, "cuda", transport=transport, backend=backend)


AGAIN = [
    Sum(DenseCase(name="one-block", **UNEVEN), "auto", BRAIN, bias=True, hidden=72),
    Sum(DenseCase(name="tried-in-blocks", **LONG), "auto", BRAIN, bias=True, hidden=2496),
]


@pytest.mark.parametrize("one", AGAIN, ids=lambda one: one.case.name)
def test_a_call_like_an_earlier_one_is_right(gpus: Team, transport: str, one: Sum) -> None:
    check_repeated(one, gpus.run(partial(run_repeated, transport=transport), one, "cuda"))


GROWING = [
    dense("small", (5, 23, 23), BRAIN, **UNEVEN),
    dense("some-megabytes", (900, 300, 600), BRAIN, hidden=2048, **LONG),
    dense("small-again", (23, 23, 5), SINGLE, **UNEVEN),
    dense("larger-blocks", (1700, 100), BRAIN, hidden=2048, **LONG),
    dense("larger", (900, 300, 600), SINGLE, hidden=2048, **LONG),
    dense("small-at-last", (50, 1), HALF, **UNEVEN),
]


def run_in_a_row(sums: list[Sum], transport: str) -> list[Tensor]:
    """Makes calls in a row without waiting before the last; odd ranks are late to each."""
    calls = [arguments_of(one, "cuda") for one in sums]
    torch.cuda.synchronize()
    outs = []
    for function, arguments in calls:
        if dist.get_rank() % 2:
            torch.cuda._sleep(CYCLES)
        outs.append(function(**arguments, transport=transport))
    return [out.cpu() for out in outs]


def test_calls_of_other_sizes_follow_each_other_at_once(gpus: Team, transport: str) -> None:
    sums = [served(one, transport) for one in [*GROWING, *GROWING[::-1]]]
    for one, *outs in zip(sums, *gpus.run(run_in_a_row, sums, transport), strict=True):
        check(one, outs)


@pytest.fixture
def one(transport: str) -> Sum:
    """A call without bias: a power of two times the values gives exactly that times the result."""
    return served(dense("again", (500, 100, 700, 500), BRAIN, hidden=1000, **LONG), transport)


def check_again_and_again(one: Sum, results: list[list[Tensor]]) -> None:
    """Checks results by rank and turn: the first is right, and all others are equal to it."""
    check(one, [outs[0] for outs in results])
    for outs in results:
        for turn, out in enumerate(outs):
            assert torch.equal(out, results[0][0]), f"turn {turn}"


def run_late(one: Sum, transport: str) -> list[Tensor]:
    """Calls with changing values, in which streams and hosts of ranks are late in different patterns."""
    function, arguments = arguments_of(one, "cuda")
    late = random.Random(dist.get_rank())
    compute = AttentionOutProj.compute

    def hesitating(self: AttentionOutProj, start: int, stop: int, partial: Tensor) -> None:
        if late.random() < 0.5:
            torch.cuda._sleep(late.randrange(CYCLES))
        if late.random() < 0.3:
            time.sleep(2e-3 * late.random())
        compute(self, start, stop, partial)

    outs = []
    with mock.patch.object(AttentionOutProj, "compute", hesitating):
        for turn in range(TURNS):
            scaled = arguments | {"v": arguments["v"] * 2.0 ** (turn % 3)}
            outs.append(function(**scaled, transport=transport))
    return [(out * 0.5 ** (turn % 3)).cpu() for turn, out in enumerate(outs)]


def test_ranks_that_are_late_do_not_change_the_sum(gpus: Team, transport: str, one: Sum) -> None:
    check_again_and_again(one, gpus.run(run_late, one, transport))


def replays(call: Callable[[], Tensor], change: Callable[[int], object]) -> list[Tensor]:
    """Results of a graph of the call after each change(turn), replayed by every rank at different times."""
    meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call()
    late, outs = random.Random(dist.get_rank()), []
    for turn in range(5):
        change(turn)
        out.fill_(torch.nan)
        torch.cuda._sleep(late.randrange(CYCLES))
        graph.replay()
        outs.append(out.clone())
    meet()  # no rank destroys its graph while others replay theirs
    return outs


def run_captured(one: Sum, transport: str) -> list[Tensor]:
    """Results of the call, and of replays with changing values."""
    function, arguments = arguments_of(one, "cuda")
    arguments["transport"] = transport
    arguments["out"] = function(**arguments)
    first, values = arguments["out"].clone(), arguments["v"].clone()
    outs = replays(lambda: function(**arguments), lambda turn: arguments["v"].copy_(values * 2.0**turn))
    return [first.cpu(), *((out * 0.5**turn).cpu() for turn, out in enumerate(outs))]


@pytest.mark.parametrize("partition", [(500, 100, 700, 500), (1800,)], ids=["blocks", "one-block"])
def test_a_captured_call_is_replayed_with_other_values(gpus: Team, transport: str, partition: tuple[int, ...]) -> None:
    one = served(dense("captured", partition, BRAIN, hidden=1000, **LONG), transport)
    check_again_and_again(one, gpus.run(run_captured, one, transport))


@torch.no_grad()
def run_layer(transport: str) -> list[Tensor] | str:
    """Results of replays of a whole layer with changing tokens; or why the transport cannot serve."""
    block = whole(causal).to("cuda", BRAIN)
    made = parallel(block, dist.get_world_size(), TilingAllReduce(partition=thirds, transport=transport))
    numbers = [torch.randn(3, 611, HIDDEN, generator=torch.Generator().manual_seed(turn)) for turn in range(5)]
    tokens = [each.to("cuda", BRAIN) for each in numbers]  # the same on every rank
    x = tokens[0].clone()
    try:
        first = made(x)
    except UnsupportedError as error:
        return str(error)
    outs = [first, *replays(lambda: made(x), lambda turn: x.copy_(tokens[turn]))]
    for out, each in zip(outs, [tokens[0], *tokens], strict=True):
        assert_as_exact_as(out, block(each), exact(block, each))
    return [out.cpu() for out in outs]


@pytest.mark.parametrize("transport", ["auto", *TRANSPORTS])
def test_a_whole_layer_is_captured_and_replayed(gpus: Team, transport: str) -> None:
    first, *others = gpus.run(run_layer, transport)
    if isinstance(first, str):
        pytest.skip(first)
    for results in others:
        assert all(torch.equal(one, other) for one, other in zip(first, results, strict=True))
    assert not torch.equal(first[1], first[2])


def run_counting_kernels(one: Sum, transport: str, backend: str) -> tuple[Tensor, int]:
    """The result, and how many calls torch's kernels with lse have served."""
    with mock.patch.object(gpu_kernels, "attend", wraps=gpu_kernels.attend) as attend:
        return run_with(one, transport, backend), attend.call_count


@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("backend", ["cuda", "sdpa"])
def test_blocks_that_begin_within_causal_sequences(
    gpus: Team, transport: str, backend: str, dtype: torch.dtype
) -> None:
    # Two blocks begin within a sequence: at 200 and 1100.
    one = served(dense("within", (200, 900, 700), dtype, hidden=256, **LONG), transport)
    results = gpus.run(run_counting_kernels, one, transport, backend)
    check(one, [out for out, _ in results])
    assert {calls > 0 for _, calls in results} == {backend == "sdpa" and len(one.partition) > 1}


def run_planned(one: Sum, transport: str) -> tuple[Tensor, Tensor, tuple[int, ...], str]:
    """Results of two calls, and the agreed partition and transport."""
    known = agreement.agreement_of(dist.group.WORLD)
    before = set(known.agreed)
    outs = [run_with(one, transport) for _ in range(2)]
    [key] = set(known.agreed) - before
    return *outs, known.agreed[key].eager.partition.rows, known.agreed[key].eager.transport.name


def planned_by(gpus: Team, transport: str) -> str:
    """The transport that all ranks agree on. Checks that the call and a second one are right."""
    sizes = {"batch_size": 4, "seqlen_q": 1024, "seqlen_k": 1024, "nheads": 4, "nheads_k": 2, "headdim": 64}
    one = dense(f"planned-by-{transport}", "auto", BRAIN, hidden=2048, causal=True, **sizes)
    results = gpus.run(run_planned, one, transport)
    check(one, [first for first, *_ in results])
    check(one, [second for _, second, *_ in results])
    [(rows, name)] = {(rows, name) for *_, rows, name in results}
    assert sum(rows) == one.rows
    return str(name)


def test_plans_are_agreed_on(gpus: Team, transport: str) -> None:
    assert planned_by(gpus, transport) == transport


def test_the_transport_is_chosen_with_the_plan(gpus: Team) -> None:
    assert planned_by(gpus, "auto") in TRANSPORTS


def run_beside_the_current_device(one: Sum, transport: str) -> Tensor:
    own = torch.cuda.current_device()
    torch.cuda.set_device((own + 1) % torch.cuda.device_count())
    try:
        return run_part(one, f"cuda:{own}", transport=transport)
    finally:
        torch.cuda.set_device(own)


def test_the_current_device_may_be_another(gpus: Team, transport: str) -> None:
    """Streams and flags belong to the tensors' device."""
    one = served(dense("elsewhere", (900, 300, 600), BRAIN, hidden=2048, **LONG), transport)
    for _ in range(2):
        check(one, gpus.run(run_beside_the_current_device, one, transport))


TIMEOUT = 20.0  # of a group in which a rank is missing: its first call compiles kernels, on all ranks at once


@pytest.fixture
def abandoned(pool: Callable[[], Team], new_team: Callable[..., Team]) -> Iterator[Team]:
    """Separate ranks, because an abandoned sum makes them unusable; skipped where there are none."""
    reason = pool().run(refusal, "peer_kernel")[0]
    if reason is not None:
        pytest.skip(reason)
    size = min(MOST_GPUS, torch.cuda.device_count())
    ranks = new_team(size, TIMEOUT, backend="nccl", patience=GPU_PATIENCE)
    yield ranks
    ranks.healthy = False  # they are killed, because CUDA no longer ends by itself


def run_alone(one: Sum, transport: str) -> str:
    """The error of a call that no other rank makes. The ranks have agreed on it before."""
    try:
        run_with(one, transport)
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("transport", "partition", "end"),
    [("ring_product", (5, 23, 23), "died"), ("ring_product", (51,), "died"), ("peer_kernel", (51,), "CUDA")],
    ids=["ring-blocks", "ring-one-block", "kernel"],
)
def test_a_call_fails_when_a_rank_never_comes(
    abandoned: Team, transport: str, partition: tuple[int, ...], end: str
) -> None:
    """The team's patience is longer than the timeout of the group, after which a rank counts as hung."""
    one = dense("abandoned", partition, BRAIN, **UNEVEN)
    for _ in range(2):
        check(one, abandoned.run(run_with, one, transport))
    assert GPU_PATIENCE > 2 * TIMEOUT
    for error in abandoned.outcomes(run_alone, one, transport, ranks=range(abandoned.size - 1)):
        assert end in str(error), f"the call of a rank has ended with {error!r}"
