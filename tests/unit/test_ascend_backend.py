"""The ascend backend without an NPU: its refusals, its choice of implementation, and the launches of a call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastattention import ArgumentError, UnsupportedError
from fastattention.attention.problem import Inputs, Problem
from fastattention.attention.validation import KvCacheArguments, Options, prepare_dense, prepare_kvcache, prepare_varlen
from fastattention.backends.ascend import call, vendor
from fastattention.backends.ascend.backend import AscendBackend, why_not_kernels
from fastattention.backends.ascend.chips import CHIPS, Chip, find_chip
from fastattention.backends.ascend.tiling import Tiling

CHIP = CHIPS["910B2"]
TILING = Tiling(outer_tile_m=16, outer_tile_n=64, inner_tile_m=8, preload=1, multibuffer=True)


class OnNpu(AscendBackend):
    """The backend as if its tensors were on an NPU, with torch_npu and a compiler."""

    def _why_not_device(self, problem: Problem) -> str | None:
        return None

    def _why_no_operators(self) -> str | None:
        return None

    def _why_no_compiler(self) -> str | None:
        return None

    def _chip(self, problem: Problem) -> Chip:
        return CHIP


def dense(seqlen_q: int = 5, seqlen_k: int = 9, nheads: int = 4, nheads_k: int = 2, **options: Any) -> Problem:
    q = torch.zeros(2, seqlen_q, nheads, 32, dtype=torch.float16)
    k = torch.zeros(2, seqlen_k, nheads_k, 32, dtype=torch.float16)
    problem, _ = prepare_dense(q, k, k, Options(**options))
    return problem


def decode(seqlen_k: int = 4096, num_splits: int = 0) -> tuple[Problem, Inputs]:
    cache = torch.zeros(1, seqlen_k, 2, 32, dtype=torch.float16)
    arguments = KvCacheArguments(q=torch.zeros(1, 1, 8, 32, dtype=torch.float16), k_cache=cache, v_cache=cache.clone())
    return prepare_kvcache(arguments, Options(return_lse=True, num_splits=num_splits))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replaces kernels.py, which needs Triton: only the names of its kernels are used here."""
    stand_in = SimpleNamespace(attention_forward="attention_forward", merge_splits="merge_splits")
    monkeypatch.setitem(sys.modules, "fastattention.backends.ascend.kernels", stand_in)
    monkeypatch.setattr("fastattention.backends.ascend.kernels", stand_in, raising=False)
    return stand_in


def test_tensors_elsewhere_are_refused_and_every_refusal_is_told() -> None:
    assert AscendBackend().why_not(dense()) == "tensors are on cpu; the ascend backend takes tensors on npu"
    reason = OnNpu().why_not(replace(dense(), score_tensors=("attn_bias",))) or "served"
    assert "vendor: " in reason
    assert "triton: " in reason


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"dropout_p": 0.1}, "dropout_p=0.1"),
        ({"grads": ("q",)}, "gradient"),
        ({"score_tensors": ("attn_bias",)}, "attn_bias"),
        ({"headdim": 264}, "headdim=264"),
        ({"headdim_v": 264}, "headdim_v=264"),
    ],
    ids=["dropout", "gradients", "bias", "headdim", "headdim-v"],
)
def test_the_kernels_refuse_what_they_cannot_do_and_name_it(fields: dict[str, Any], named: str) -> None:
    problem = replace(dense(), **fields)
    assert named in (why_not_kernels(problem) or "served")
    assert OnNpu("triton").why_not(problem) == f"triton: {why_not_kernels(problem)}"


def test_int8_caches_are_served_and_float8_is_refused_by_both_with_a_reason() -> None:
    problem = replace(decode()[0], cache_dtype=torch.int8)
    assert OnNpu("vendor").why_not(problem) is None
    assert OnNpu("triton").why_not(problem) is None
    reason = OnNpu().why_not(replace(problem, cache_dtype=torch.float8_e4m3fn))
    assert reason == (
        "vendor: a cache in torch.float8_e4m3fn; npu_fused_infer_attention_score takes int8; "
        "triton: a cache in torch.float8_e4m3fn is not served, only in int8 and the dtype of q; use backend='sdpa'"
    )


def test_a_call_goes_to_the_vendor_where_it_is_exact_and_to_the_kernels_otherwise() -> None:
    plain, capped = dense(), dense(softcap=5.0)
    assert vendor.why_not(plain) is None
    assert vendor.why_not(capped) is not None
    assert OnNpu().implementation(plain) == "vendor"
    assert OnNpu().implementation(capped) == "triton"
    assert OnNpu("triton").implementation(plain) == "triton"
    assert OnNpu("vendor").why_not(capped) == f"vendor: {vendor.why_not(capped)}"


class OnAnotherNpu(OnNpu):
    def _chip(self, problem: Problem) -> Chip:
        return find_chip("Ascend950PR_9599")


def test_an_npu_whose_tiles_are_not_known_is_a_reason_and_no_surprise() -> None:
    reason = OnAnotherNpu("triton").why_not(dense()) or "served"
    assert "this NPU is not known" in reason
    assert "Ascend950PR_9599" in reason
    assert OnAnotherNpu().implementation(dense()) == "vendor"
    with pytest.raises(UnsupportedError, match=r"vendor: .*softcap.*; triton: this NPU"):
        OnAnotherNpu().implementation(dense(softcap=5.0))


def test_explain_says_who_and_why_not_the_operators() -> None:
    assert OnNpu().how(dense()) == "operators of torch_npu"
    capped = dense(softcap=5.0)
    assert OnNpu().how(capped) == f"our Triton kernels (vendor: {vendor.why_not(capped)})"
    assert OnNpu("triton").how(capped) == "our Triton kernels"
    problem, _ = decode()
    both = "operators of torch_npu, or our Triton kernels where those would copy the cache"
    assert OnNpu().how(problem) == OnNpu().how(replace(problem, cache_dtype=torch.int8)) == both
    assert OnNpu("vendor").how(problem) == "operators of torch_npu"
    several = replace(problem, cache_dtype=torch.int8, seqlen_q=4)
    assert "our Triton kernels (vendor: nheads_k=2 and dtype torch.float16 with seqlen_q=4" in OnNpu().how(several)


def pages(**layout: Any) -> tuple[Problem, Inputs]:
    """Two sequences of up to 32 tokens in pages of 16, which are a view of one pool of keys and values."""
    pool = torch.zeros(5, 2, 16, 2, 32, dtype=torch.float16)
    k, v = (pool[:, 0], pool[:, 1]) if layout.pop("interleaved") else (pool[:, 0].clone(), pool[:, 1].clone())
    table = torch.zeros(2, 2, dtype=torch.int32)
    q = torch.zeros(2, 1, 8, 32, dtype=torch.float16)
    arguments = KvCacheArguments(
        q=q, k_cache=k, v_cache=v, cache_seqlens=torch.tensor([5, 32], dtype=torch.int32), block_table=table, **layout
    )
    return prepare_kvcache(arguments, Options())


@pytest.mark.parametrize(
    ("layout", "implementation"),
    [
        ({"interleaved": False}, "vendor"),
        ({"interleaved": True}, "triton"),
        ({"interleaved": False, "cache_leftpad": torch.tensor([0, 3], dtype=torch.int32)}, "triton"),
    ],
    ids=["pages", "interleaved-pages", "leftpad"],
)
def test_caches_that_the_operators_would_copy_go_to_the_kernels(layout: dict[str, Any], implementation: str) -> None:
    problem, inputs = pages(**layout)
    assert OnNpu().implementation(problem) == "vendor"
    assert OnNpu().implementation(problem, inputs) == implementation
    assert OnNpu("vendor").implementation(problem, inputs) == "vendor"


def test_more_varlen_keys_than_the_operators_count_go_to_the_kernels() -> None:
    half = 2**19
    offsets_q = torch.tensor([0, 1, 3], dtype=torch.int32)
    offsets_k = torch.tensor([0, half, 2 * half + 1], dtype=torch.int32)
    q = torch.zeros(3, 1, 16, dtype=torch.float16)
    k = q[:1].expand(2 * half + 1, 1, 16)
    problem, inputs = prepare_varlen(q, k, k, offsets_q, offsets_k, 2, half + 1, Options())
    assert OnNpu().implementation(problem) == "vendor"
    assert OnNpu().implementation(problem, inputs) == "triton"


@pytest.mark.usefixtures("kernels")
def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes the current device, which may be another one."""
    current = ["another"]

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        current.append(str(chosen))
        yield
        current.pop()

    launched_on = []

    class OnSecondNpu(OnNpu):
        def _launch(self, launch: call.Launch) -> None:
            launched_on.append(current[-1])

    # A device named as by torch, without its library.
    second = torch.device("privateuseone", 1)
    monkeypatch.setattr(torch, second.type, SimpleNamespace(device=device), raising=False)
    problem, inputs = decode(num_splits=3)
    OnSecondNpu("triton").forward(replace(problem, device=second), inputs)
    assert launched_on == [str(second)] * 2


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTENTION_ASCEND", "triton")
    assert OnNpu().implementation(dense()) == "triton"
    monkeypatch.setenv("FASTATTENTION_ASCEND", "ours")
    with pytest.raises(ArgumentError, match="FASTATTENTION_ASCEND='ours' must be vendor or triton"):
        OnNpu().implementation(dense())


def test_a_short_decode_is_split_over_all_cores() -> None:
    problem, _ = decode()
    assert call.choose_num_splits(problem, TILING, CHIP) == CHIP.num_cores // 2  # two key heads
    assert call.choose_num_splits(replace(problem, seqlen_k=100), TILING, CHIP) == 2  # tiles of 64 keys
    assert call.choose_num_splits(replace(problem, num_splits=3), TILING, CHIP) == 3
    assert call.choose_num_splits(replace(problem, batch_size=100), TILING, CHIP) == 1
    assert call.choose_num_splits(replace(problem, seqlen_q=2), TILING, CHIP) == 1


@pytest.mark.usefixtures("kernels")
def test_rows_of_a_decode_are_heads() -> None:
    problem, inputs = decode(num_splits=1)
    (launch,) = call.prepare(problem, inputs, TILING, CHIP).launches
    assert launch.constants["ROWS_ARE_HEADS"]
    assert launch.arguments["mask"] is None
    expected = {
        "nheads": 2, "group_size": 4, "num_m_tiles": 1, "q_stride_row": 32, "q_stride_head": 128,
        "lse_stride_row": 1, "lse_stride_head": 4,
    }  # fmt: skip
    assert launch.arguments.items() >= expected.items()


@pytest.mark.usefixtures("kernels")
def test_splits_are_merged_by_a_second_kernel() -> None:
    problem, inputs = decode(num_splits=3)
    prepared = call.prepare(problem, inputs, TILING, CHIP)
    forward, merge = prepared.launches
    assert forward.arguments["out"] is merge.arguments["partial_out"]
    assert forward.arguments["lse"] is merge.arguments["partial_lse"]
    assert merge.arguments["partial_out"].shape == (3, 1, 1, 8, 32)
    assert merge.arguments["partial_out"].dtype is torch.float32
    output = call.finish(prepared.output)
    assert output.lse.shape == problem.lse_shape
    assert output.lse.is_contiguous()


@pytest.mark.usefixtures("kernels")
def test_repeated_rows_are_copied() -> None:
    """Triton-Ascend divides by the stride between rows."""
    q = torch.zeros(1, 5, 2, 32, dtype=torch.float16)
    k = torch.zeros(1, 1, 2, 32, dtype=torch.float16).expand(1, 9, 2, 32)
    problem, inputs = prepare_dense(q, k, k, Options())
    assert inputs.k.stride(1) == 0
    (launch,) = call.prepare(problem, inputs, TILING, CHIP).launches
    assert launch.arguments["k_stride_row"] == 64


@pytest.mark.usefixtures("kernels")
def test_a_table_without_pages_becomes_one_that_can_be_read() -> None:
    problem, inputs = decode(num_splits=1)
    inputs = inputs._replace(block_table=torch.zeros(1, 0, dtype=torch.int32))
    (launch,) = call.prepare(replace(problem, page_block_size=16), inputs, TILING, CHIP).launches
    table = launch.arguments["block_table"]
    assert isinstance(table, torch.Tensor)
    assert table.tolist() == [[0]]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("seqlen_k", [9, 0])
def test_nothing_is_launched_for_no_queries(seqlen_k: int) -> None:
    problem = dense(0, seqlen_k)
    prepared = prepare(problem)
    assert prepared.launches == []
    assert prepared.output.out.shape == problem.out_shape


@pytest.mark.usefixtures("kernels")
def test_a_window_wider_than_the_sequences_stays_within_int32() -> None:
    (launch,) = prepare(dense(window_left=2**31 - 1, window_right=2**31 - 1)).launches
    assert launch.arguments["window_left"] == launch.arguments["window_right"] == 14


def prepare(problem: Problem) -> call.Prepared:
    q = torch.zeros(problem.batch_size, problem.seqlen_q, problem.nheads, problem.headdim, dtype=problem.dtype)
    k = torch.zeros(problem.batch_size, problem.seqlen_k, problem.nheads_k, problem.headdim, dtype=problem.dtype)
    return call.prepare(problem, Inputs(q, k, k), TILING, CHIP)
