"""A whole layer of attention over GPUs, captured in a CUDA graph; skipped without two GPUs."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed.layers import HIDDEN, assert_as_exact_as, causal, exact, parallel, thirds, whole
from distributed.team import Team, meet, skip_module_without_two_gpus
from fastattention import UnsupportedError
from fastattention.distributed import TilingAllReduce
from fastattention.distributed.transports import TRANSPORTS

skip_module_without_two_gpus()

BATCH_SIZE, SEQLEN = 3, 611
TURNS = 5
CYCLES = 3_000_000  # about two milliseconds: longer than a layer here


def numbers(turn: int) -> Tensor:
    """The same on every rank."""
    x = torch.randn(BATCH_SIZE, SEQLEN, HIDDEN, generator=torch.Generator().manual_seed(turn))
    return x.to("cuda", torch.bfloat16)


@torch.no_grad()
def run_captured(transport: str) -> list[Tensor] | str:
    """Results of replays with other tokens each, all of them right; or why the transport serves nothing."""
    block = whole(causal).to("cuda", torch.bfloat16)
    made = parallel(block, dist.get_world_size(), TilingAllReduce(plan=thirds, transport=transport))
    x = numbers(0)
    try:
        first = made(x)
    except UnsupportedError as error:
        return str(error)
    assert_as_exact_as(first, block(x), exact(block, x))
    meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = made(x)
    late, outs = random.Random(dist.get_rank()), []
    for turn in range(TURNS):
        x.copy_(numbers(turn))
        out.fill_(torch.nan)
        torch.cuda._sleep(late.randrange(CYCLES))  # type: ignore[no-untyped-call]
        graph.replay()
        outs.append(out.clone())
        assert_as_exact_as(outs[-1], block(x), exact(block, x))
    results = [each.cpu() for each in outs]
    dist.barrier()  # no rank destroys its graph while others replay theirs
    torch.cuda.synchronize()
    return results


@pytest.mark.parametrize("transport", ["auto", *TRANSPORTS])
def test_a_whole_layer_is_captured_and_replayed(gpus: Team, transport: str) -> None:
    first, *others = gpus.run(run_captured, transport)
    if isinstance(first, str):
        pytest.skip(first)
    assert len(first) == TURNS
    for results in others:
        assert all(torch.equal(one, other) for one, other in zip(first, results, strict=True))
    assert not torch.equal(first[0], first[1])
