"""Arguments of the operators: against the real schemas and shape inference, and calls that must never be made."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tiers import slow
from torch import Tensor

from ascend.vendor.cases import runs
from ascend.vendor.environment import skip_without_torch_npu
from ascend.vendor.recorder import Recorded, Recorder, on_meta, shapes
from fastattention.backends.ascend import vendor
from fastattention.backends.ascend.vendor.operators import INFERENCE, TRAINING, OperatorCall, run
from fastattention.errors import UnsupportedError
from fastattention.testing.calls import build_call
from fastattention.testing.case import DenseCase, KvCacheCase, Memory

skip_without_torch_npu()


@functools.cache
def calls() -> dict[str, Recorded]:
    """The single call of an operator, if any, that each case makes."""
    made = {}
    for case, dtype in runs(torch.float16):
        problem, inputs = build_call(case, dtype).prepare()
        with Recorder() as recorder:
            vendor.forward(problem, inputs._replace(k_new=None, v_new=None))
        assert len(recorder.calls) <= 1, case.name
        if recorder.calls:
            made[case.name] = recorder.calls[0]
    return made


@slow
def test_every_mapping_is_among_the_cases() -> None:
    made = {call.mapping for call in calls().values()}
    # fmt: off
    expected = {
        *((TRAINING, layout, mode, sinks) for layout in ("BSND", "TND") for mode in (0, 3, 4) for sinks in ("", "sinks")
          if (layout, mode, sinks) != ("BSND", 4, "sinks")),  # covered with TND
        *((INFERENCE, layout, mode, rest) for layout in ("BSND", "BNSD") for mode in (3, 4)
          for rest in ("", "corrected", "pages, corrected")),
        *((INFERENCE, layout, 0, rest) for layout in ("BSND", "BNSD")
          for rest in ("one query", "one query, own mask", "pages, one query", "pages, one query, own mask")),
        *((INFERENCE, layout, 0, f"int8, {rest}") for layout in ("BSND", "BNSD")
          for rest in ("one query", "one query, own mask", "pages, one query", "pages, one query, own mask")),
        (INFERENCE, "BSND", 0, ""),
    }
    # fmt: on
    assert sorted(expected - made) == []


def test_every_argument_is_in_the_real_schema() -> None:
    for name, call in calls().items():
        known = {argument.name for argument in call.operator._schema.arguments}
        assert set(call.arguments) <= known, name


def test_the_real_shape_inference_agrees() -> None:
    for name, call in calls().items():
        inferred = call.operator(**{key: on_meta(value) for key, value in call.arguments.items()})
        if not call.arguments.get("softmax_lse_flag", True):
            assert shapes(inferred) == shapes(call.results)[:1], name
        else:
            assert shapes(inferred) == shapes(call.results), name


def test_a_mode_has_its_mask_and_no_mask_is_as_large_as_the_scores() -> None:
    for name, call in calls().items():
        mode, mask = call.arguments.get("sparse_mode", 0), call.arguments.get("atten_mask")
        assert mode == 0 or mask is not None, name
        if mode == 0 and mask is not None:  # one row of keys for the one query of a sequence
            assert call.mapping[3].endswith("one query, own mask"), name
            assert mask.shape[:3] == (call.arguments["query"].shape[0], 1, 1), name


def attention_call(**changed: Any) -> OperatorCall:
    q, k = torch.zeros(1, 3, 4, 16), torch.zeros(1, 3, 2, 16)
    return OperatorCall(
        TRAINING, {"query": q, "key": k, "value": k, "head_num": 4, "input_layout": "BSND", "scale": 1.0} | changed
    )


def test_an_unchanged_call_runs() -> None:
    out, *_ = run(attention_call())
    assert out.shape == (1, 3, 4, 16)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"sparse_mode": 3}, "needs atten_mask"),
        ({"sparse_mode": 4, "atten_mask": torch.ones(3, 3, dtype=torch.bool)}, "mask tile"),
        ({"sparse_mode": 3, "atten_mask": torch.ones(2048, 2048)}, "mask tile"),
        ({"sparse_mode": 1}, "sparse_mode=1"),
        ({"key": torch.zeros(1, 3, 3, 16)}, "4 query heads cannot share 3"),
    ],
    ids=["no-mask", "mask-of-the-scores", "mask-of-floats", "another-mode", "heads"],
)
def test_what_the_vendor_would_take_is_refused_here(changed: dict[str, Any], named: str) -> None:
    call = attention_call(**changed)
    on_the_device = {name: on_meta(value) for name, value in call.arguments.items()}
    torch.ops.npu.npu_fusion_attention(**on_the_device)  # takes it
    with pytest.raises(ValueError, match=named):
        run(call)


def test_this_torch_npu_has_what_is_needed() -> None:
    assert vendor.why_unavailable() is None


def test_a_torch_npu_without_an_argument_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vendor.operators._NEWER_ARGUMENTS, TRAINING, ("softmax_layout", "no_such_argument"))
    assert "no_such_argument" in (vendor.why_unavailable() or "")


def test_pages_beyond_int32_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor.cache, "MAX_PAGED_ELEMENTS", 100)
    case = KvCacheCase(name="pages", cache_seqlens=(40,), page_block_size=16)
    with pytest.raises(UnsupportedError, match=r"elements of k_cache: \d+.*at most 100.*triton"):
        vendor.forward(*build_call(case, torch.float16).prepare())


MEMORIES: list[tuple[Memory, bool]] = [("contiguous", False), ("heads_major", False), ("sliced_heads", True)]


@pytest.mark.parametrize(("memory", "copied"), MEMORIES, ids=[memory for memory, _ in MEMORIES])
@pytest.mark.parametrize("page_block_size", [None, 128], ids=["rows", "pages"])
@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_only_caches_that_lie_in_another_way_are_copied(
    seqlen_q: int, page_block_size: int | None, memory: Memory, copied: bool
) -> None:
    case = KvCacheCase(name="cache", seqlen_q=seqlen_q, cache_seqlens=(100, 45), memory_k=memory, causal=True,
                       page_block_size=page_block_size)  # fmt: skip
    problem, inputs = build_call(case, torch.float16).prepare()
    with Recorder() as recorder:
        vendor.forward(problem, inputs)
    (call,) = recorder.calls
    assert (call.arguments["key"].data_ptr() != inputs.k.data_ptr()) is copied


def test_lengths_are_ends_without_the_leading_zero() -> None:
    given = calls()["varlen"].arguments
    # The lengths are (1, 40, 0, 3, 130, 17) queries and (9, 33, 5, 0, 130, 64) keys, without sequences that lack
    # either.
    assert given["actual_seq_qlen"] == [1, 41, 171, 188]
    assert given["actual_seq_kvlen"] == [9, 42, 172, 236]


def test_a_dense_call_that_inference_does_not_take_goes_to_training() -> None:
    case = DenseCase(name="headdim", seqlen_q=9, seqlen_k=12, headdim=20)
    with Recorder() as recorder:
        vendor.forward(*build_call(case, torch.float16).prepare())
    assert [call.name for call in recorder.calls] == [TRAINING]


def test_nothing_to_attend_to_calls_nothing() -> None:
    for name in ("empty-batch", "no-queries", "no-keys", "varlen-no-keys", "varlen-all-empty", "cache-empty"):
        assert name not in calls()


def test_the_mask_tile_is_one_tensor_for_all_calls() -> None:
    masks = [call.arguments["atten_mask"] for call in calls().values() if call.arguments.get("sparse_mode", 0)]
    assert len(masks) > 20
    assert len({mask.data_ptr() for mask in masks if isinstance(mask, Tensor)}) == 1
