"""int8 caches on torch_npu's operator: its arguments, refusals, and copies of scales.

Their results are tested by the list of cases, in test_conformance.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend.vendor.environment import skip_without_torch_npu
from ascend.vendor.recorder import Recorded, Recorder, on_meta, shapes
from fastattention.backends.ascend import vendor
from fastattention.testing.calls import build_call
from fastattention.testing.case import KvCacheCase

skip_without_torch_npu()


def call_of(dtype: torch.dtype, **case: Any) -> tuple[Recorded, Any]:
    problem, inputs = build_call(KvCacheCase(name="int8", stored="int8", **case), dtype).prepare()
    assert vendor.why_not(problem) is None
    with Recorder() as recorder:
        vendor.forward(problem, inputs)
    (call,) = recorder.calls
    return call, inputs


@pytest.mark.parametrize(
    ("case", "mode", "shape"),
    [({}, 3, (2, 2, 103)), ({"page_block_size": 32}, 5, None), ({"seqlen_q": 4, "nheads_k": 1}, 1, (2, 103))],
    ids=["rows", "pages", "queries"],
)
def test_scales_are_handed_over_as_the_schema_has_them(
    case: dict[str, Any], mode: int, shape: tuple[int, ...] | None
) -> None:
    call, inputs = call_of(torch.bfloat16, cache_seqlens=(100, 45), **case)
    given = call.arguments
    assert (given["key_antiquant_mode"], given["value_antiquant_mode"]) == (mode, mode)
    assert set(given) <= {argument.name for argument in call.operator._schema.arguments}
    assert shapes(call.operator(**{key: on_meta(value) for key, value in given.items()})) == shapes(call.results)
    for name in ("key_antiquant_scale", "value_antiquant_scale"):
        assert given[name].shape == (shape or (inputs.k.shape[0], 2, 32))
        assert given[name].dtype is torch.float32
        assert given[name].is_contiguous()


@pytest.mark.parametrize("page_block_size", [None, 32], ids=["rows", "pages"])
@pytest.mark.parametrize("heads_first", [True, False])
def test_scales_are_copied_unless_they_lie_heads_first(page_block_size: int | None, heads_first: bool) -> None:
    case = KvCacheCase(name="int8", stored="int8", cache_seqlens=(100, 45), page_block_size=page_block_size,
                       memory_k="heads_major" if heads_first else "contiguous")  # fmt: skip
    problem, inputs = build_call(case, torch.float16).prepare()
    assert inputs.k_scale is not None
    assert inputs.v_scale is not None
    if heads_first:
        order = (inputs.k_scale, inputs.v_scale)
        k_scale, v_scale = (scale.transpose(1, 2).contiguous().transpose(1, 2) for scale in order)
        inputs = inputs._replace(k_scale=k_scale, v_scale=v_scale)
    with Recorder() as recorder:
        vendor.forward(problem, inputs)
    given = recorder.calls[0].arguments["key_antiquant_scale"]
    assert inputs.k_scale is not None
    assert (given.data_ptr() == inputs.k_scale.data_ptr()) is heads_first
    copied = page_block_size is not None and not heads_first
    assert ("scales of pages" in (vendor.why_rather_not(problem, inputs) or "")) is copied


@pytest.mark.parametrize(
    ("case", "dtype", "named"),
    [
        ({"headdim": 48}, torch.float16, "headdim=48 must be a multiple of 32"),
        ({"page_block_size": 16}, torch.float16, "page_block_size=16"),
        ({"seqlen_q": 17, "nheads_k": 1}, torch.bfloat16, "more than 16 queries with seqlen_q=17"),
        ({"seqlen_q": 4, "nheads_k": 1}, torch.float16, "dtype torch.float16"),
        ({"seqlen_q": 4, "nheads_k": 1, "page_block_size": 128}, torch.bfloat16, "block_table"),
        ({"seqlen_q": 4}, torch.float16, "nheads_k=2 and dtype torch.float16 with seqlen_q=4"),
        ({"softcap": 2.0}, torch.float16, "softcap=2.0"),
        ({"stored": "float8"}, torch.float16, "a cache in torch.float8_e4m3fn"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_quantized_cache_that_is_not_served_is_refused(case: dict[str, Any], dtype: torch.dtype, named: str) -> None:
    words = {"name": "refused", "stored": "int8", "cache_seqlens": (40, 50), **case}
    problem, _ = build_call(KvCacheCase(**words), dtype).prepare()
    assert named in (vendor.why_not(problem) or "served")
