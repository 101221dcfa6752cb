"""Tests figures of benchmarks/overlap.py from a trace, and that its benchmark runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import overlap
import pytest
import ranks
import tiled_allreduce
import torch
import torch.distributed as dist
from overlap import Activity, common, length, union
from tiers import deep
from tiled_allreduce_trace import activities as activities_of
from tiled_allreduce_trace import after_mark


@pytest.mark.parametrize(
    ("intervals", "merged"),
    [
        ([], []),
        ([(3, 4), (0, 1)], [(0, 1), (3, 4)]),
        ([(0, 2), (2, 3)], [(0, 3)]),
        ([(0, 9), (1, 2), (3, 4)], [(0, 9)]),
        ([(0, 2), (1, 5), (4, 6), (8, 9)], [(0, 6), (8, 9)]),
    ],
)
def test_a_union_counts_no_moment_twice(intervals: Any, merged: Any) -> None:
    assert union(intervals) == merged
    moments = {moment for start, end in intervals for moment in range(start, end)}
    assert length(union(intervals)) == len(moments)


@pytest.mark.parametrize(
    ("these", "others", "both"),
    [
        ([], [(0, 1)], []),
        ([(0, 1)], [(1, 2)], []),
        ([(0, 4)], [(1, 2), (3, 9)], [(1, 2), (3, 4)]),
        ([(0, 2), (3, 5), (6, 8)], [(1, 7)], [(1, 2), (3, 5), (6, 7)]),
        ([(0, 2), (4, 6)], [(0, 2), (4, 6)], [(0, 2), (4, 6)]),
    ],
)
def test_what_two_unions_have_in_common(these: Any, others: Any, both: Any) -> None:
    assert common(these, others) == both
    assert common(others, these) == both


COMPUTE = (
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_128x128x128",
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(Params)",
    "cutlass3x_sm90_tensorop_s64x128x16gemm_bf16",
    "void pytorch_flash::flash_fwd_kernel<>(pytorch_flash::Flash_fwd_params)",
    "fastattention_merge",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>",
)
COMMUNICATION = (
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclSymkDevKernel_AllReduce_RSxLD_AGxST_bf16",
    "Memcpy PtoP (Device -> Device)",
    "Memcpy DtoD (Device -> Device)",
    "void c10d::symmetric_memory::one_shot_all_reduce_kernel<c10::BFloat16>",
    "fastattention_all_reduce",
)
NO_WORK = (
    "cudaLaunchKernel", "cudaEventRecord", "cuLaunchKernelEx", "cuMemcpyAsync", "cuStreamBatchMemOp", "Stream Sync",
    "Stream Wait Event", "Context Sync", "nccl:all_reduce", "ProfilerStep#1",
)  # fmt: skip


def test_names_tell_compute_from_communication_and_from_calls() -> None:
    for name in COMPUTE:
        assert overlap.is_work(name), name
        assert not overlap.is_communication(name), name
    for name in COMMUNICATION:
        assert overlap.is_work(name), name
        assert overlap.is_communication(name), name
    for name in NO_WORK:
        assert not overlap.is_work(name), name


def activities(*spans: tuple[str, float, float]) -> list[Activity]:
    return [Activity(*span) for span in spans]


def test_communication_is_exposed_while_nothing_computes() -> None:
    found = overlap.overlap(
        activities(
            ("flash_fwd_kernel", 1.0, 4.0),
            ("Memcpy PtoP", 3.0, 6.0),
            ("Memcpy PtoP", 3.0, 5.5),  # of another link
            ("nvjet_gemm", 5.0, 7.0),
            ("ncclDevKernel_AllReduce", 6.5, 9.0),
            ("cudaLaunchKernel", 0.0, 20.0),
        )
    )
    assert found == (8.0, 5.0, 5.5, 3.0)
    assert found.hidden == pytest.approx(1 - 3.0 / 5.5)
    assert found.inflation(4.0) == 0.25


def test_one_after_the_other_hides_nothing() -> None:
    found = overlap.overlap(activities(("gemm", 0.0, 2.0), ("ncclDevKernel_AllReduce", 2.0, 5.0)))
    assert found == (5.0, 2.0, 3.0, 3.0)
    assert found.hidden == overlap.overlap(activities(("gemm", 0.0, 2.0))).hidden == 0.0


def test_a_call_is_what_follows_the_mark() -> None:
    mark = ("at::cuda::(anonymous namespace)::spin_kernel(long)", 2.0, 3.0)
    found = activities(("ncclDevKernel_Barrier", 0.0, 1.0), mark, ("gemm", 3.0, 4.0))
    assert after_mark(found) == found[2:]


def event(name: str, device: str, start: int, duration: int) -> SimpleNamespace:
    answers = {"name": name, "device_type": f"DeviceType.{device}", "start_ns": start, "duration_ns": duration}
    return SimpleNamespace(**{key: lambda value=value: value for key, value in answers.items()})


def test_times_of_a_trace_begin_with_the_first_on_the_device_and_lose_no_nanosecond() -> None:
    begin = 1_700_000_000_123_456_789
    events = [
        event("gemm", "CUDA", begin + 2_001, 3),
        event("cudaLaunchKernel", "CPU", begin - 500, 100),
        event("ncclDevKernel", "CUDA", begin, 1_000),
    ]
    profiler: Any = SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events)))
    assert activities_of(profiler) == [("ncclDevKernel", 0.0, 1e-6), ("gemm", 2_001 / 1e9, 2_004 / 1e9)]


@deep
def test_the_benchmark_measures_every_case_on_processes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTENTION_CACHE", str(tmp_path / "cache"))
    cases = tuple(tiled_allreduce.Case("7B", *sizes) for sizes in ((2, 5, 5), (1, 1, 9), (1, 2, 9)))
    options = tiled_allreduce.Options(cases, rounds=1, graphs=False, trace=False, output=tmp_path, dtype=torch.float32)
    ranks.run_ranks(tiled_allreduce.measure, [options], 2, "cpu", 240.0)
    record = json.loads((tmp_path / "tiled_allreduce_tp2.json").read_text())
    assert record["world_size"] == 2
    for case, row in zip(cases, record["rows"], strict=True):
        sizes = (case.model, case.batch_size, case.seqlen_q)
        assert (row["model"], row["batch_size"], row["seqlen_q"]) == sizes
        rows = [case.batch_size * case.seqlen_q]
        assert row["plans"]["auto"]["eager"] == {"rows": rows, "attended": [], "transport": "c10d"}
        assert {"ring_product", "peer_kernel", "two-shot"} <= set(row["refused"])
        assert {*row["seconds"]["eager"]} - {"async"} == {
            "serial", "default", "auto", "c10d", "attention", "product", "compute", "all-reduce",
        }  # fmt: skip
        assert all(row["difference"]["eager"][name] < 1e-5 for name in ("default", "auto", "c10d"))
        assert row["derived"]["eager"]["bound"] > 0.0


def fail_on_rank_1(device: torch.device) -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("broken")
    dist.barrier()


def stay(device: torch.device) -> None:
    torch.multiprocessing.get_context().Event().wait()


@deep
def test_a_rank_that_fails_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ranks.RankFailedError, match=r"rank [01] failed with exit status 1"):
        ranks.run_ranks(fail_on_rank_1, [], 2, "cpu", 60.0)
    assert "RuntimeError: broken" in capfd.readouterr().err


@deep
def test_ranks_have_a_time_limit() -> None:
    with pytest.raises(ranks.RankFailedError, match=r"ranks \[0, 1\] have not ended in time"):
        ranks.run_ranks(stay, [], 2, "cpu", 5.0)
