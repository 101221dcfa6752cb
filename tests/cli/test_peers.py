"""Every available peer computes exact attention, and the comparison with float64 notices a peer that does not."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fastattention.cli.bench.accuracy import max_error
from fastattention.cli.bench.measure import measure
from fastattention.cli.bench.peers import ALL_PEERS, FASTATTENTION, SDPA, Peer, PreparedPeer
from fastattention.cli.bench.suite import overhead
from fastattention.cli.bench.workload import DTYPES, BenchWorkload, make_tensors

PREFILL = BenchWorkload("prefill", "float32", (33,), (33,), 4, 4, 32, causal=True)
CASES = {
    "prefill": PREFILL,
    "prefill of two": BenchWorkload("prefill", "float32", (33, 33), (33, 33), 4, 4, 32),
    "decode": BenchWorkload("decode", "float32", (1,), (70,), 4, 4, 32, causal=True),
    "grouped decode": BenchWorkload("decode", "float32", (1, 1), (70, 70), 8, 2, 32, causal=True),
    "backward": BenchWorkload("backward", "float32", (40, 40), (40, 40), 4, 2, 32),
    "backward causal": BenchWorkload("backward", "float32", (40,), (40,), 4, 4, 32, causal=True),
    "packed": BenchWorkload("packed", "float32", (5, 1, 40), (5, 1, 40), 4, 4, 32, causal=True),
}
# float32 is exact to rounding. Other dtypes round inputs of the second product or results: three bits of a value near
# one. ggml adds up float16 values in float16.
TOLERANCES = {"float32": 1e-5, "bfloat16": 8 * 2.0**-8, "float16": 8 * 2.0**-11}


QUESTIONS = [
    pytest.param(peer, workload, id=f"{peer.name} {case}")
    for peer in ALL_PEERS
    for case, workload in CASES.items()
    if peer.applies_to(workload)
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("peer", "workload"), QUESTIONS)
def test_peer_computes_attention(peer: Peer, workload: BenchWorkload, dtype: str) -> None:
    workload = dataclasses.replace(workload, dtype=dtype)
    reason = peer.why_unavailable() or peer.why_not(workload)
    if reason is not None:
        pytest.skip(f"{peer.name}: {reason}")
    tensors = make_tensors(workload)
    prepared = peer.prepare(workload, tensors)
    prepared.call()  # a second call must not depend on leftovers of the first
    out = prepared.output(prepared.call())
    assert out.shape == tensors.q.shape
    assert max_error(workload, tensors, out) < TOLERANCES[dtype]


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_head_of_the_last_row_is_noticed(case: str) -> None:
    workload = CASES[case]
    tensors = make_tensors(workload)
    prepared = FASTATTENTION.prepare(workload, tensors)
    out = prepared.output(prepared.call()).clone()
    out[..., -1, -1, 0] += 0.5
    assert max_error(workload, tensors, out) == pytest.approx(0.5, abs=1e-4)


def test_a_forgotten_mask_is_noticed() -> None:
    tensors = make_tensors(PREFILL)
    unmasked = dataclasses.replace(PREFILL, causal=False)
    prepared = SDPA.prepare(unmasked, tensors)
    assert max_error(PREFILL, tensors, prepared.output(prepared.call())) > 0.1


def test_a_peer_that_fails_says_why_and_stops_nobody() -> None:
    def prepare(*_: object) -> PreparedPeer:
        raise RuntimeError("out of memory: tried 9 GiB\nand a long trace")

    broken = dataclasses.replace(SDPA, name="broken", prepare=prepare)
    unable = dataclasses.replace(SDPA, name="unable", why_not=lambda workload: "wants another shape")
    results = {one.peer: one for one in measure(PREFILL, [FASTATTENTION, broken, unable], seconds=0.0)}
    assert list(results) == ["fastattention", "broken", "unable"]
    assert results["fastattention"].timing is not None
    assert results["broken"].reason == "RuntimeError: out of memory: tried 9 GiB"
    assert results["unable"].reason == "wants another shape"
    assert results["unable"].timing is results["broken"].timing is None


def test_eager_is_asked_only_where_the_square_is_small() -> None:
    eager = next(peer for peer in ALL_PEERS if peer.name == "torch eager")
    assert eager.applies_to(overhead()[0])
    assert not eager.applies_to(dataclasses.replace(PREFILL, seqlens_q=(4096,), seqlens_k=(4096,)))


def test_work_is_counted_as_the_field_counts_it() -> None:
    full = BenchWorkload("prefill", "bfloat16", (100,), (100,), 2, 2, 64)
    assert full.flops == 4 * 100 * 100 * 2 * 64
    assert dataclasses.replace(full, causal=True).flops == full.flops / 2
    assert full.limit == "bf16_dot"
    decode = BenchWorkload("decode", "float16", (1, 1), (50, 50), 8, 2, 64, causal=True)
    assert decode.cache_bytes == 2 * 2 * 50 * 2 * 64 * torch.float16.itemsize
    assert decode.flops == 4 * 2 * 50 * 8 * 64
    assert decode.limit == "dram_read"
