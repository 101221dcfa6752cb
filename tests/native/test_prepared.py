"""Calls that are prepared and run later: they give the results of a call, on any thread, or report an error."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from fastattention import fast_attn_with_kvcache
from fastattention.attention.validation import KvCacheArguments, Options
from fastattention.errors import ArgumentError
from fastattention.offload.cpu_attention import prepare_attention
from fastattention.offload.device import CpuWork

PAGES, PAGE_SIZE, BATCH_SIZE, NHEADS, NHEADS_K, HEADDIM = 40, 16, 2, 6, 2, 24
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])


class Problem:
    """A paged cache, and memory for queries that come later."""

    def __init__(self, dtype: torch.dtype, seqlen_q: int = 1) -> None:
        self.k, self.v = torch.randn(2, PAGES, PAGE_SIZE, NHEADS_K, HEADDIM).to(dtype)
        self.late_q = torch.randn(BATCH_SIZE, seqlen_q, NHEADS, HEADDIM).to(dtype)
        self.q = torch.full_like(self.late_q, torch.nan)
        self.table = torch.randperm(PAGES, dtype=torch.int32).view(BATCH_SIZE, -1)
        self.seqlens = torch.tensor([300, 17], dtype=torch.int32)
        self.out = torch.full_like(self.q, 7.0)
        self.lse = torch.full((BATCH_SIZE, NHEADS, seqlen_q), 7.0)

    def prepare(self) -> CpuWork:
        arguments = KvCacheArguments(self.q, self.k, self.v, cache_seqlens=self.seqlens, block_table=self.table)
        return prepare_attention(arguments, Options(softcap=2.0), self.out, self.lse, num_threads=2)

    def expected(self) -> tuple[Tensor, Tensor]:
        out, lse = fast_attn_with_kvcache(
            self.late_q, self.k, self.v, cache_seqlens=self.seqlens, block_table=self.table, softcap=2.0,
            backend="cpu", return_lse=True,
        )  # fmt: skip
        return out, lse

    def check(self) -> None:
        out, lse = self.expected()
        assert torch.equal(self.out, out)
        assert torch.equal(self.lse, lse)


def call_address(work: CpuWork) -> None:
    """Calls the function, as CUDA does."""
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work.function)(work.argument)
    work.check()


@DTYPES
@pytest.mark.parametrize("seqlen_q", [1, 9])
@pytest.mark.parametrize("run", [lambda work: work.run(), call_address], ids=["run", "address"])
def test_queries_may_come_after_preparation(run: object, dtype: torch.dtype, seqlen_q: int) -> None:
    assert callable(run)
    problem = Problem(dtype, seqlen_q)
    work = problem.prepare()
    problem.q.copy_(problem.late_q)
    run(work)
    problem.check()


def test_calls_of_several_threads_are_all_right() -> None:
    problems = [Problem(torch.bfloat16) for _ in range(8)]
    works = [problem.prepare() for problem in problems]
    for problem in problems:
        problem.q.copy_(problem.late_q)
    with ThreadPoolExecutor(24) as pool:
        list(pool.map(call_address, 3 * works))
    for problem in problems:
        problem.check()


def test_what_a_call_would_refuse_is_refused() -> None:
    problem = Problem(torch.float32)
    problem.table[0, 0] = PAGES
    with pytest.raises(ArgumentError, match="block_table"):
        problem.prepare()
    problem.table[0, 0] = 0
    problem.seqlens[0] = PAGES * PAGE_SIZE
    with pytest.raises(ArgumentError, match="cache_seqlens"):
        problem.prepare()


WITHOUT_MEMORY = """
import resource, torch
from fastattention.offload.cpu_attention import prepare_attention
from fastattention.attention.validation import KvCacheArguments, Options

q, k = torch.zeros(1, 2048, 8, 256), torch.zeros(1, 8192, 1, 256)
out, lse = torch.zeros_like(q), torch.zeros(1, 8, 2048)
work = prepare_attention(KvCacheArguments(q, k, k, cache_seqlens=8192), Options(), out, lse, num_threads=1)
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 20), -1))
try:
    work.run()
except MemoryError as error:
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    assert out.isnan().all() and lse.isnan().all()
    print(error)
"""


def test_without_memory_results_are_nan_and_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_MEMORY], capture_output=True, text=True)
    assert "memory to attend on the CPU" in done.stdout, done.stderr
