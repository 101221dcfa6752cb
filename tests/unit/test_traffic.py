"""Main-memory traffic of calls, against values worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fastattention import explain, fast_attn_varlen_func, fast_attn_with_kvcache
from fastattention.attention.problem import Layout, Problem
from fastattention.backends.common.tile_range import TileRange
from fastattention.backends.common.traffic import Extent, io_bound, token_bytes, traffic_of
from fastattention.backends.cuda.attention.backend import CudaBackend
from fastattention.backends.cuda.attention.launches import choose_launches
from fastattention.backends.cuda.attention.traffic import tiled_keys
from fastattention.engine.explain import Bytes, Traffic
from fastattention.gpu_runtime import module
from fastattention.gpu_runtime.chips import CHIPS, Limits
from unit.samples import int32, problem_of

MIB = 2**20
H100 = CHIPS["H100"]
# 4 CTAs at a time, which is 4 tiles of 128 queries at headdim 128; a quarter of L2 holds 16 of its float16 tokens.
SMALL = H100._replace(num_sms=2, l2_bytes=32 * 1024)
# float16, 16 heads of 128: 16 MiB for each of q, k, v and out.
PROBLEM = problem_of(seqlen_q=4096, nheads=16, nheads_k=16, softmax_scale=128**-0.5)
ONE_HEAD: dict[str, Any] = {"seqlen_q": 1024, "seqlen_k": 1024, "total_q": 1024, "nheads": 1, "nheads_k": 1}


def traffic(problem: Problem, limits: Limits = H100, lengths: dict[tuple[int, int], int] | None = None) -> Traffic:
    extent = Extent(lengths or {(problem.seqlen_q, problem.seqlen_k): problem.batch_size})
    keys = tiled_keys(problem, extent, choose_launches(problem, limits.arch, limits), limits)
    return traffic_of(problem, extent, "cuda", keys, limits.on_chip_bytes)


@pytest.mark.parametrize(
    ("changes", "moved"),
    [
        ({}, Bytes(48 * MIB, 16 * MIB)),
        ({"seqlen_q": 1024, "seqlen_k": 1024, "total_q": 1024, "window_right": 0}, Bytes(12 * MIB, 4 * MIB)),
        ({"nheads_k": 4}, Bytes((16 + 4 + 4) * MIB, 16 * MIB)),
        ({"headdim_v": 64}, Bytes((16 + 16 + 8) * MIB, 8 * MIB)),
        ({"return_lse": True}, Bytes(48 * MIB, 16 * MIB + 4 * 16 * 4096)),
        ({"batch_size": 3, "total_q": 3 * 4096}, Bytes(3 * 48 * MIB, 3 * 16 * MIB)),
        # The queries see the last 1024 + 512 keys.
        ({"seqlen_q": 1024, "total_q": 1024, "window_left": 512}, Bytes((4 + 2 * 6) * MIB, 4 * MIB)),
    ],
    ids=["dense", "causal", "GQA", "narrow values", "lse", "batch", "window"],
)
def test_what_fits_the_l2_cache_moves_once(changes: dict[str, Any], moved: Bytes) -> None:
    found = traffic(dataclasses.replace(PROBLEM, **changes))
    assert found.tiled == found.compulsory == moved
    assert found.lower_bound == moved.total


def test_the_last_heads_of_a_causal_call_read_keys_again() -> None:
    """The tiles of 16 heads are as many as run twice at once. Rows 2048 to 4095 run first, then those before."""
    found = traffic(dataclasses.replace(PROBLEM, window_right=0))
    assert found.tiled == Bytes((16 + 32 + 16) * MIB, 16 * MIB)


@pytest.mark.parametrize(
    ("changes", "limits", "keys"),
    [
        ({}, SMALL, 2 * 1024),  # two waves of four tiles
        ({"window_right": 0}, SMALL, 1024 + 512),  # rows 512 to 1023 first, then those before
        ({"window_left": 127, "window_right": 0}, SMALL, (1024 - 385) + 512),
        ({}, SMALL._replace(num_sms=4), 1024),  # one wave
        ({"nheads": 2}, SMALL, 4 * 1024),  # tiles of both heads on one key head, two in a wave
        ({"nheads": 8}, SMALL, 16 * 1024),  # eight heads on one key head take two waves for every tile
        ({"window_right": 0}, SMALL._replace(l2_bytes=2 * MIB), 1024),
        ({"window_left": 127, "window_right": 0}, SMALL._replace(l2_bytes=2 * MIB), 1024),
        ({"seqlen_q": 0, "total_q": 0}, SMALL, 0),
        ({"seqlen_k": 0}, SMALL, 0),
    ],
    ids=["full", "causal", "window", "one wave", "GQA", "MQA", "causal in L2", "window in L2", "no queries", "no keys"],
)
def test_keys_that_do_not_fit_come_once_a_wave(changes: dict[str, Any], limits: Limits, keys: int) -> None:
    problem = dataclasses.replace(PROBLEM, **ONE_HEAD | changes)
    found = traffic(problem, limits)
    queries = problem.total_q * problem.nheads * 256
    assert found.tiled == Bytes(queries + keys * 512, queries)
    assert found.tiled.total >= found.compulsory.total


def test_sequences_count_with_their_own_lengths() -> None:
    problem = dataclasses.replace(PROBLEM, **ONE_HEAD, layout=Layout.VARLEN, batch_size=3)
    problem = dataclasses.replace(problem, total_q=1024 + 2 * 256)
    found = traffic(problem, SMALL, {(1024, 1024): 1, (256, 512): 2})
    assert found.tiled == Bytes(1536 * 256 + (2 * 1024 + 2 * 512) * 512, 1536 * 256)
    assert found.compulsory.read == 1536 * 256 + 2048 * 512
    assert found.standard.written == 1536 * 256 + 2 * 2 * (1024 * 1024 + 2 * 256 * 512)


def test_a_decode_reads_its_cache_once() -> None:
    changes: dict[str, Any] = {"layout": Layout.KVCACHE, "batch_size": 4, "seqlen_q": 1, "total_q": 4, "nheads_k": 2}
    problem = dataclasses.replace(PROBLEM, **changes, seqlen_new=1)
    assert choose_launches(problem, 80, SMALL).split is not None
    found = traffic(problem, SMALL, {(1, 1001): 3, (1, 4096): 1})
    token = 2 * 256 * 2
    assert found.tiled == Bytes(4 * 16 * 256 + (3 * 1001 + 4096) * token, 4 * 16 * 256 + 4 * token)


def test_a_quantized_token_has_two_scales() -> None:
    problem = dataclasses.replace(PROBLEM, nheads_k=2, cache_dtype=torch.int8)
    assert token_bytes(problem, Extent({})) == 2 * (128 + 128 + 2 * 4)


def test_values_within_the_keys_are_not_read_twice() -> None:
    problem = dataclasses.replace(PROBLEM, nheads_k=1, headdim=576, headdim_v=512)
    assert token_bytes(problem, Extent({}, values_in_keys=True)) == 576 * 2
    assert token_bytes(problem, Extent({})) == (576 + 512) * 2


def test_standard_attention_moves_scores_and_probabilities_twice() -> None:
    scores = 16 * 4096**2 * 2
    assert traffic(PROBLEM).standard == Bytes(48 * MIB + 2 * scores, 16 * MIB + 2 * scores)
    assert traffic(dataclasses.replace(PROBLEM, window_right=0)).standard == traffic(PROBLEM).standard


def test_traffic_is_printed_in_a_line() -> None:
    said = "main-memory traffic of cuda: 64.00 MiB; lower bound 64.00 MiB; standard attention 2.06 GiB"
    assert str(traffic(PROBLEM)) == said


def test_the_io_bound_is_pairs_times_squared_headdim_over_fast_words() -> None:
    problem = dataclasses.replace(PROBLEM, **ONE_HEAD)
    words = 2**19  # of 2 bytes
    extent = Extent({(1024, 1024): 1})
    assert io_bound(problem, extent, 2 * words) == 2 * 1024**2 * 128**2 // words
    causal = dataclasses.replace(problem, window_right=0)
    assert io_bound(causal, extent, 2 * words) == 2 * (1024 * 1025 // 2) * 128**2 // words
    assert io_bound(problem, Extent({(1024, 1024): 3}), 2 * words) == 3 * io_bound(problem, extent, 2 * words)


def test_a_long_head_has_the_io_bound() -> None:
    """It exceeds 4 M / d tokens."""
    assert H100.on_chip_bytes == 50 * MIB + 132 * (228 + 256) * 1024
    shortest = 4 * (H100.on_chip_bytes // 2) // 128
    for seqlen, is_larger in ((shortest - 128, False), (shortest + 128, True)):
        changes = ONE_HEAD | {"seqlen_q": seqlen, "seqlen_k": seqlen, "total_q": seqlen}
        found = traffic(dataclasses.replace(PROBLEM, **changes))
        assert (found.io_bound > found.compulsory.total) == is_larger
        assert found.lower_bound == max(found.io_bound, found.compulsory.total)


@pytest.mark.parametrize("seqlens", [(5, 9), (9, 5), (7, 7), (1, 4), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (0, 3), (3, 1), (20, 20), (-1, 2), (2, -1)], ids=str)
def test_pairs_are_those_that_the_mask_shows(seqlens: tuple[int, int], window: tuple[int, int]) -> None:
    mask = TileRange(*seqlens, *window)
    pairs = sum(max(0, mask.row_end(row) - mask.row_begin(row)) for row in range(seqlens[0]))
    problem = dataclasses.replace(PROBLEM, **ONE_HEAD, window_left=window[0], window_right=window[1])
    assert io_bound(problem, Extent({seqlens: 1}), 1) == pairs * 128**2 * 4


def test_the_cuda_backend_knows_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "device_limits", lambda index: SMALL)
    problem, extent = dataclasses.replace(PROBLEM, **ONE_HEAD), Extent({(1024, 1024): 1})
    assert CudaBackend().traffic(problem, extent) == traffic(problem, SMALL)
    assert CudaBackend().traffic(dataclasses.replace(problem, score_tensors=("attn_bias",)), extent) is None


def test_explain_counts_a_dense_call() -> None:
    q, kv = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8)
    found = explain(q, kv, kv.clone(), backend="sdpa").traffic
    assert found.backend == "sdpa"
    assert found.tiled is None
    assert found.io_bound is None
    assert found.compulsory == Bytes(q.nbytes + 2 * kv.nbytes, q.nbytes)
    assert found.lower_bound == 2 * q.nbytes + 2 * kv.nbytes
    assert str(found) == "main-memory traffic of sdpa: not modelled; lower bound 4.25 KiB; standard attention 8.62 KiB"
    assert explain(q, kv, kv).traffic.compulsory.read == q.nbytes + kv.nbytes  # type: ignore[union-attr]


def test_explain_reads_the_lengths_of_a_varlen_call() -> None:
    q, kv = torch.randn(5, 4, 8), torch.randn(7, 2, 8)
    offsets = int32(0, 2, 5), int32(0, 4, 7)
    found = explain(q, kv, kv.clone(), *offsets, function=fast_attn_varlen_func).traffic
    assert found.lower_bound == 2 * q.nbytes + 2 * kv.nbytes
    assert found.standard.total - found.lower_bound == 4 * (2 * 4 + 3 * 3) * 4 * 4


def test_explain_reads_the_lengths_of_a_cache() -> None:
    q, k, v = torch.randn(2, 1, 4, 8), torch.randn(2, 16, 2, 8), torch.randn(2, 16, 2, 8)
    new = torch.randn(2, 1, 2, 8)
    found = explain(
        q, k, v, new, new, cache_seqlens=int32(3, 5), cache_leftpad=int32(0, 2), function=fast_attn_with_kvcache
    ).traffic
    token = 2 * 2 * 8 * 4
    assert found.compulsory == Bytes(q.nbytes + (4 + 4) * token, q.nbytes + 2 * token)


def test_explain_leaves_out_what_it_cannot_count() -> None:
    q = torch.randn(1, 3, 2, 8)
    assert explain(q, q, q, attn_bias=torch.zeros(3, 3)).traffic is None
    assert explain(q, q, q, backend="cuda").traffic is None  # it serves no tensors on a CPU
