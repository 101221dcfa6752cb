"""The main loops of the kernels have no bank conflicts, by the emulator's count."""

from __future__ import annotations

from dataclasses import replace

import emulator
import pytest
import torch
from emulated_indexer import EmulatedIndexer
from emulator import EmulatedCudaBackend, Wavefronts
from indexer.check import run
from tiers import sampled

from fastattention.attention.problem import Inputs, OutputGradients, Problem
from fastattention.attention.validation import KvCacheArguments, Options, prepare_dense, prepare_kvcache
from fastattention.backends.cuda.indexer import heuristics
from fastattention.quantized import quantize
from fastattention.testing.indexer import IndexerCase

CAPACITY = 1024  # tokens of a cache
KINDS = ("loads", "stores", "matrices", "copies")


Counts = dict[str, Wavefronts]


def wavefronts(backend: EmulatedCudaBackend, problem: Problem, inputs: Inputs) -> Counts:
    """Wavefronts of a call's last kernel, that of attention."""
    backend.forward(problem, inputs)
    report = backend.reports[-1]
    return {kind: getattr(report, kind) for kind in KINDS}


def of_forward(
    backend: EmulatedCudaBackend, headdim: int, seqlen_q: int, seqlen_k: int, qk_dtype: str | None = None
) -> Counts:
    """Wavefronts of a forward whose tiles are all full."""
    q = torch.randn(1, seqlen_q, 1, headdim, dtype=torch.float16)
    k = torch.randn(1, seqlen_k, 1, headdim, dtype=torch.float16)
    return wavefronts(backend, *prepare_dense(q, k, k, options=Options(qk_dtype=qk_dtype)))


def of_decode(
    backend: EmulatedCudaBackend, headdim: int, rows: int, seqlen_k: int, cache: torch.dtype = torch.float16
) -> Counts:
    """Wavefronts of a decode by one CTA, with as many heads of queries as a tile has rows."""
    q = torch.randn(1, 1, rows, headdim, dtype=torch.float16)
    k, scale = torch.randn(1, CAPACITY, 1, headdim).half(), None
    if cache is not torch.float16:
        k, scale = quantize(k, cache)
    arguments = KvCacheArguments(q, k, k, cache_seqlens=seqlen_k, k_scale=scale, v_scale=scale)
    return wavefronts(backend, *prepare_kvcache(arguments, Options(num_splits=1)))


def assert_main_loop_has_no_conflicts(less: Counts, more: Counts) -> None:
    """Compares runs with more and fewer keys, whose difference is only the main loop."""
    counted = {kind: more[kind].counted - less[kind].counted for kind in KINDS}
    ideal = {kind: more[kind].ideal - less[kind].ideal for kind in KINDS}
    assert counted == ideal
    assert counted["loads"] + counted["matrices"] > 0
    assert counted["stores"] + counted["copies"] > 0


@sampled
@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("backend", [emulator.EmulatedSm70(), emulator.EmulatedSm75(), emulator.EmulatedSm80()],
                         ids=["sm70", "sm75", "sm80"])  # fmt: skip
def test_main_loop_has_no_bank_conflicts(backend: EmulatedCudaBackend, headdim: int) -> None:
    less, more = (of_forward(backend, headdim, 128, seqlen_k) for seqlen_k in (192, 256))
    assert_main_loop_has_no_conflicts(less, more)


@sampled
@pytest.mark.parametrize("headdim", [96, 128, 256])
@pytest.mark.parametrize("backend", [emulator.EmulatedSm75(), emulator.EmulatedSm80()], ids=["sm75", "sm80"])
def test_main_loop_of_int8_products_has_no_bank_conflicts(backend: EmulatedCudaBackend, headdim: int) -> None:
    """Rows of 64 bytes and less, as at headdim 64, are written with conflicts: two at a time are 16 bytes apart."""
    less, more = (of_forward(backend, headdim, 128, seqlen_k, "int8") for seqlen_k in (192, 256))
    assert_main_loop_has_no_conflicts(less, more)


def of_backward(backend: EmulatedCudaBackend, headdim: int, seqlen_q: int, seqlen_k: int, gradients: str) -> Counts:
    """Wavefronts of the kernel that computes some gradients of a call whose tiles are all full."""
    q, k = (torch.randn(1, n, 1, headdim, dtype=torch.float16) for n in (seqlen_q, seqlen_k))
    problem, inputs = prepare_dense(q, k, k, options=Options())
    problem = replace(problem, grads=tuple(gradients))
    result = backend.forward(problem, inputs)
    backend.reports.clear()
    backend.backward(problem, inputs, result, OutputGradients(torch.randn_like(result.out), None))
    return {kind: getattr(backend.reports[1], kind) for kind in KINDS}  # the first report is that of delta


@sampled
@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("gradients", ["k", "v", "q"])
@pytest.mark.parametrize("backend", [emulator.EmulatedSm70(), emulator.EmulatedSm75(), emulator.EmulatedSm80()],
                         ids=["sm70", "sm75", "sm80"])  # fmt: skip
def test_nor_has_that_of_a_backward(backend: EmulatedCudaBackend, gradients: str, headdim: int) -> None:
    lengths = [(n, 128) if gradients != "q" else (128, n) for n in (192, 384)]
    less, more = (of_backward(backend, headdim, *seqlens, gradients) for seqlens in lengths)
    assert_main_loop_has_no_conflicts(less, more)


@sampled
@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("backend", [emulator.EmulatedSm75(), emulator.EmulatedSm80()], ids=["sm75", "sm80"])
def test_nor_has_that_of_a_backward_which_sums_gradients_of_queries(backend: EmulatedCudaBackend, headdim: int) -> None:
    less, more = (of_backward(backend, headdim, seqlen_q, 128, "qkv") for seqlen_q in (192, 384))
    assert_main_loop_has_no_conflicts(less, more)


@sampled
@pytest.mark.parametrize(("headdim", "seqlen_q"), [(64, 64), (128, 64), (128, 256), (256, 64), (256, 128)])
def test_nor_has_it_with_volta_s_other_tiles(headdim: int, seqlen_q: int) -> None:
    less, more = (of_forward(emulator.EmulatedSm70(), headdim, seqlen_q, seqlen_k) for seqlen_k in (192, 256))
    assert_main_loop_has_no_conflicts(less, more)


@sampled
@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("backend", [emulator.EmulatedSm75(), emulator.EmulatedSm80()], ids=["sm75", "sm80"])
def test_the_main_loop_of_a_decode_has_no_bank_conflicts(backend: EmulatedCudaBackend, rows: int, headdim: int) -> None:
    less, more = (of_decode(backend, headdim, rows, seqlen_k) for seqlen_k in (CAPACITY // 2, CAPACITY))
    assert_main_loop_has_no_conflicts(less, more)


@sampled
@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])
def test_nor_has_it_with_a_quantized_cache(cache: torch.dtype, headdim: int) -> None:
    """Few rows have their queries in registers. Queries of more rows are read with conflicts, two lanes a bank."""
    backend = emulator.EmulatedSm80()
    less, more = (of_decode(backend, headdim, 16, seqlen_k, cache) for seqlen_k in (CAPACITY // 2, CAPACITY))
    assert_main_loop_has_no_conflicts(less, more)


def of_indexer(chip: str, headdim: int, seqlen_q: int, seqlen_k: int, kernel: int = 0) -> Counts:
    """Wavefronts of the kernel that scores keys, or of the one that chooses them, with all keys of a query in a CTA."""
    backend = EmulatedIndexer(chip, num_sms=0)
    run(backend, IndexerCase(seqlen_q=seqlen_q, seqlen_k=seqlen_k, headdim=headdim, nheads=64).arguments(torch.float16))
    return {kind: getattr(backend.reports[kernel], kind) for kind in KINDS}


@sampled
@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("seqlen_q", [1, 2, 4, 8])
@pytest.mark.parametrize("chip", ["P100", "V100", "T4", "A100"])
def test_nor_has_that_of_an_indexer(chip: str, seqlen_q: int, headdim: int) -> None:
    less, more = (of_indexer(chip, headdim, seqlen_q, seqlen_k) for seqlen_k in (512, 1024))
    assert_main_loop_has_no_conflicts(less, more)


@pytest.mark.parametrize("narrow_keys", [1 << 14, 0], ids=["narrow", "wide"])
def test_nor_has_the_choice_of_its_keys(monkeypatch: pytest.MonkeyPatch, narrow_keys: int) -> None:
    monkeypatch.setattr(heuristics, "_NARROW_KEYS", narrow_keys)
    loads = of_indexer("A100", 64, 1, 1024, kernel=1)["loads"]
    assert loads.counted == loads.ideal > 0
