"""Selected keys of latents on npu_sparse_flash_attention: arguments in the real schema, results, and refusals."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend.vendor import host_npu
from ascend.vendor.environment import skip_without_torch_npu
from ascend.vendor.recorder import Recorded, Recorder, on_meta, shapes
from fastattention import explain, fast_attn_latent_func, fast_attn_selected_func
from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.attention.problem import AttentionOutput, Inputs, Problem
from fastattention.attention.reference import reference_attention
from fastattention.attention.validation import KvCacheArguments, Options, prepare_kvcache
from fastattention.backends.ascend import backend, vendor
from fastattention.backends.ascend.vendor.operators import SELECTED, OperatorCall, run
from fastattention.backends.ascend.vendor.selected import selected_call
from fastattention.engine.operator import forget_plans, request_of
from fastattention.errors import UnsupportedError
from fastattention.testing.oracle import LSE_FLOOR, OUT_FLOOR

skip_without_torch_npu()
host_npu.install()

HEADDIM, HEADDIM_V, SCALE = 576, 512, 192**-0.5
LENGTHS_Q, LENGTHS_K = (5, 1, 0, 3), (37, 2, 4, 0)
LAYOUTS = ["rows", "varlen", "pages"]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def ends(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def latents_in(layout: str, dtype: torch.dtype) -> dict[str, Any]:
    """Latents and where they lie, with NaN between them."""
    given = [draw(length, HEADDIM, seed=number).to(dtype) for number, length in enumerate(LENGTHS_K)]
    used = torch.tensor(LENGTHS_K, dtype=torch.int32)
    if layout == "varlen":
        return {"latents": torch.cat(given), "cu_seqlens_k": ends(LENGTHS_K)}
    if layout == "rows":  # of a cache with room for more
        memory = torch.full((4, 43, HEADDIM), torch.nan, dtype=dtype)
        for row, one in zip(memory, given, strict=True):
            row[: len(one)] = one
        return {"latents": memory[:, :40], "seqused_k": used}
    pages = torch.full((14, 4, HEADDIM), torch.nan, dtype=dtype)
    order, table = iter(draw(14).argsort().tolist()), torch.full((4, 10), -5, dtype=torch.int32)
    for sequence, one in enumerate(given):
        for number, part in enumerate(one.split(4) if len(one) else ()):
            table[sequence, number] = page = next(order)
            pages[page, : len(part)] = part
    return {"latents": pages, "seqused_k": used, "block_table": table}


def arguments_of(layout: str, dtype: torch.dtype = torch.bfloat16, topk: int = 6, nheads: int = 4) -> dict[str, Any]:
    """Keys in any order, a few missing, one named twice. The first query has none."""
    chosen = []
    for number, (queries, keys) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
        order = draw(queries, max(keys, topk), seed=number).argsort(dim=1)[:, :topk].int()
        order[(order >= keys) | (draw(queries, topk, seed=number + 9) > 1.0)] = -1
        chosen.append(order)
    indices = torch.cat(chosen)
    indices[0] = -1
    indices[1, :2] = 3
    return {
        "q": draw(sum(LENGTHS_Q), nheads, HEADDIM).to(dtype), **latents_in(layout, dtype), "headdim_v": HEADDIM_V,
        "softmax_scale": SCALE, "indices": indices, "cu_seqlens_q": ends(LENGTHS_Q), "return_lse": True,
    }  # fmt: skip


def prepared(**arguments: Any) -> tuple[Problem, Inputs]:
    """The problem that a call of fast_attn_latent_func becomes."""
    _, given, options, *_ = request_of(fast_attn_latent_func, **arguments)
    return prepare_kvcache(given, options)


def check(problem: Problem, inputs: Inputs, found: AttentionOutput) -> None:
    right = reference_attention(problem, inputs)
    assert found.lse is not None
    assert right.lse is not None
    assert found.out.shape == problem.out_shape
    assert found.lse.shape == problem.lse_shape
    assert found.out.is_contiguous()
    assert found.lse.is_contiguous()
    torch.testing.assert_close(found.out.double(), right.out, rtol=0.0, atol=2 * OUT_FLOOR[problem.dtype])
    torch.testing.assert_close(found.lse.double(), right.lse, rtol=LSE_FLOOR[torch.float32], atol=1e-6)


def recorded(problem: Problem, inputs: Inputs) -> tuple[Recorded, AttentionOutput]:
    assert vendor.why_not(problem) is None
    with Recorder() as recorder:
        found = vendor.forward(problem, inputs)
    (call,) = recorder.calls
    return call, found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("topk", [1, 6, 64])  # fewer keys than slots, and more
def test_results_are_those_of_the_reference(layout: str, causal: bool, dtype: torch.dtype, topk: int) -> None:
    problem, inputs = prepared(**arguments_of(layout, dtype, topk), causal=causal)
    check(problem, inputs, recorded(problem, inputs)[1])


@pytest.mark.parametrize("nheads", [1, 128])
def test_all_numbers_of_heads(nheads: int) -> None:
    problem, inputs = prepared(**arguments_of("pages", nheads=nheads))
    check(problem, inputs, recorded(problem, inputs)[1])


def test_without_lse_none_is_asked_for() -> None:
    problem, inputs = prepared(**arguments_of("pages") | {"return_lse": False})
    call, found = recorded(problem, inputs)
    assert found.lse is None
    assert not call.arguments.get("return_softmax_lse", False)
    assert torch.equal(found.out, vendor.forward(replace(problem, return_lse=True), inputs).out)


def cache_call(**fields: Any) -> tuple[Problem, Inputs]:
    """fast_attn_with_kvcache on pages of one token. The table holds anything behind the keys of a sequence."""
    slots = torch.full((30, 1, 1, HEADDIM), torch.nan, dtype=torch.float16)
    table = torch.tensor([[4, 9, 2, 77], [-3, -3, -3, -3], [8, 1, 20, 29]], dtype=torch.int32)
    slots[[4, 9, 2, 8, 1, 20, 29]] = draw(7, 1, 1, HEADDIM).half()
    given = KvCacheArguments(
        draw(3, 1, 2, HEADDIM).half(), slots, slots[..., :HEADDIM_V], block_table=table,
        cache_seqlens=torch.tensor([3, 0, 4], dtype=torch.int32),
    )  # fmt: skip
    return prepare_kvcache(given._replace(**fields), Options(SCALE, return_lse=True))


def test_a_block_table_may_hold_anything_behind_its_keys() -> None:
    problem, inputs = cache_call()
    call, found = recorded(problem, inputs)
    check(problem, inputs, found)
    # The table names 12 of 30 slots: these are the keys, in its order.
    assert call.arguments["sparse_indices"][:, 0].tolist() == [[0, 1, 2, -1], [-1] * 4, [8, 9, 10, 11]]


def test_padding_on_the_left_moves_the_first_key() -> None:
    problem, inputs = cache_call(cache_leftpad=torch.tensor([1, 0, 4], dtype=torch.int32))
    call, found = recorded(problem, inputs)
    check(problem, inputs, found)
    assert call.arguments["sparse_indices"][0, 0].tolist() == [0, 1, -1, -1]


def test_tokens_that_the_call_appends_are_keys() -> None:
    new = draw(3, 1, 1, HEADDIM, seed=4).half()
    table = torch.tensor([[4, 9, 2, 5], [6, -3, -3, -3], [8, 1, 20, 29]], dtype=torch.int32)
    lengths = torch.tensor([3, 0, 3], dtype=torch.int32)
    changed = {"k": new, "v": new[..., :HEADDIM_V], "block_table": table, "cache_seqlens": lengths}
    problem, inputs = cache_call(**changed)
    wanted = reference_attention(*cache_call(**changed))
    found = backend_on_host().forward(problem, inputs)
    torch.testing.assert_close(found.out.double(), wanted.out, rtol=0.0, atol=2 * OUT_FLOOR[torch.float16])


def backend_on_host() -> backend.AscendBackend:
    from ascend.vendor.engine import VendorBackend

    return VendorBackend()


@pytest.mark.parametrize(("topk", "keys"), [(1, 9), (6, 43), (64, 64)], ids=["selected", "all-slots", "more-columns"])
def test_the_fewer_latents_are_copied_and_no_fewer_than_columns(topk: int, keys: int) -> None:
    problem, inputs = prepared(**arguments_of("varlen", topk=topk))
    assert (problem.total_q, inputs.k.shape[0]) == (9, 43)
    call, _ = recorded(problem, inputs)
    assert call.arguments["key"].shape[0] == keys
    assert call.arguments["value"].data_ptr() == call.arguments["key"].data_ptr()


@functools.cache
def calls() -> list[tuple[OperatorCall, Recorded]]:
    made = []
    for layout in LAYOUTS:
        for lse in (True, False):
            problem, inputs = prepared(**arguments_of(layout) | {"return_lse": lse})
            assert inputs.block_table is not None
            made.append((selected_call(problem, inputs, inputs.block_table), recorded(problem, inputs)[0]))
    return made


def test_every_argument_is_in_the_real_schema() -> None:
    (operator,) = {call.operator for _, call in calls()}
    known = {argument.name: argument for argument in operator._schema.arguments}
    positional = ["query", "key", "value", "sparse_indices", "scale_value"]
    assert [name for name, one in known.items() if not one.kwarg_only] == positional
    (made,) = {frozenset(call.arguments) for call, _ in calls()}
    assert made <= set(known)
    # Pages that our slots are not, sinks that an A2 or A3 does not take, and reserved ones.
    assert set(known) - made == {"block_table", "sinks", "pre_tokens", "next_tokens"}
    assert all(known[name].has_default_value() for name in set(known) - made)


def test_the_real_shape_inference_agrees() -> None:
    for _, call in calls():
        inferred = call.operator(**{name: on_meta(value) for name, value in call.arguments.items()})
        assert shapes(inferred) == shapes(call.results)


def test_all_queries_are_one_sequence_and_all_slots_another() -> None:
    for call, _ in calls():
        given = call.arguments
        assert given["actual_seq_lengths_query"].tolist() == [sum(LENGTHS_Q)]
        assert given["actual_seq_lengths_kv"].tolist() == [given["key"].shape[0]]
        assert {given[name].dtype for name in given if name.startswith("actual")} == {torch.int32}
        assert (given["layout_query"], given["layout_kv"]) == ("TND", "TND")
        assert (given["sparse_mode"], given["attention_mode"], given["sparse_block_size"]) == (0, 2, 1)
        assert given["scale_value"] == SCALE


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"value": torch.zeros(43, 1, HEADDIM_V, dtype=torch.bfloat16)}, "value must be the tensor key"),
        ({"attention_mode": 0}, "'attention_mode': 0"),
        ({"sparse_mode": 3}, "'sparse_mode': 3"),
        ({"sparse_indices": torch.zeros(9, 1, 44, dtype=torch.int32)}, "44 indices of 43 keys"),
    ],
    ids=["values", "attention-mode", "causal", "indices"],
)
def test_what_shape_inference_would_take_is_refused_here(changed: dict[str, Any], named: str) -> None:
    call = OperatorCall(SELECTED, calls()[2][0].arguments | changed)
    torch.ops.npu.npu_sparse_flash_attention(**{name: on_meta(value) for name, value in call.arguments.items()})
    with pytest.raises(ValueError, match=named):
        run(call)


@pytest.mark.parametrize("empty", ["queries", "slots", "columns"])
def test_nothing_to_attend_to_calls_nothing(empty: str) -> None:
    problem, inputs = cache_call()
    assert inputs.block_table is not None
    table, lengths = inputs.block_table, torch.zeros(3, dtype=torch.int32)
    sizes = {"queries": (0, 4), "slots": (3, 4), "columns": (3, 0)}
    rows = 0 if empty == "queries" else 3
    k = inputs.k[: 0 if empty == "slots" else None]
    given = KvCacheArguments(
        inputs.q[:rows], k, k[..., :HEADDIM_V], block_table=table.new_zeros(sizes[empty]), cache_seqlens=lengths[:rows]
    )
    problem, inputs = prepare_kvcache(given, Options(SCALE, return_lse=True))
    with Recorder() as recorder:
        out, lse, _ = vendor.forward(problem, inputs)
    assert recorder.calls == []
    assert lse is not None
    assert torch.equal(out, torch.zeros(rows, 1, 2, HEADDIM_V, dtype=torch.float16))
    assert lse.tolist() == [[[-torch.inf]] * 2] * rows


@pytest.mark.parametrize("shape", [(1, 1, HEADDIM), (3, 1, HEADDIM)], ids=["one-slot", "slots"])
def test_pages_of_one_token_hold_their_values(shape: tuple[int, ...]) -> None:
    latents, indices = draw(*shape).half(), torch.zeros(1, 1, 1, dtype=torch.int32)
    pages = {"block_table": torch.zeros(1, 1, dtype=torch.int32), "seqused_k": torch.ones(1, dtype=torch.int32)}
    q = draw(1, 1, 2, HEADDIM).half()
    problem, inputs = prepared(
        q=q, latents=latents, headdim_v=HEADDIM_V, softmax_scale=1.0, indices=indices, return_lse=True, **pages
    )
    check(problem, inputs, recorded(problem, inputs)[1])


def test_values_elsewhere_are_refused_with_what_to_do() -> None:
    problem, inputs = cache_call()
    with pytest.raises(UnsupportedError, match=r"v has memory of its own.*k\[\.\.\., :512\].*backend='sdpa'"):
        vendor.forward(problem, inputs._replace(v=inputs.v.clone()))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"dtype": torch.float32}, "dtype torch.float32"),
        ({"cache_dtype": torch.int8}, "cache in torch.int8"),
        ({"score_tensors": ("sinks",)}, "sinks"),
        ({"softcap": 2.0}, "softcap=2.0"),
        ({"seqlen_q": 2}, "seqlen_q=2 with page_block_size=1"),
        ({"nheads_k": 2}, "nheads_k=2 with page_block_size=1"),
        ({"headdim": 512}, "headdim=512 with page_block_size=1; npu_sparse_flash_attention takes 576"),
        ({"headdim_v": 256}, "headdim_v=256"),
        ({"nheads": 48}, "nheads=48; npu_sparse_flash_attention takes 1, 2, 4, 8, 16, 32, 64, 128"),
        ({"nheads": 256}, "nheads=256"),
        ({"window_left": 2}, "window_size on the left, 2"),
        ({"grads": ("q",)}, "no backward"),
    ],
)
def test_what_the_operator_does_not_take_is_refused(fields: dict[str, Any], named: str) -> None:
    problem = replace(cache_call()[0], **fields)
    assert named in (vendor.why_not(problem) or "served")


def test_a_window_that_hides_nothing_and_a_causal_mask_are_served() -> None:
    problem, _ = cache_call()
    for window in ((-1, 0), (3, 0), (7, 2)):
        assert vendor.why_not(replace(problem, window_left=window[0], window_right=window[1])) is None


def test_a_torch_npu_without_the_operator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor.limits, "SELECTED", "npu_no_such_attention")
    assert "no npu_no_such_attention is registered" in (vendor.why_not(cache_call()[0]) or "served")


def on_npu(layout: str) -> dict[str, Any]:
    given = arguments_of(layout)
    return {name: value.to("npu") if isinstance(value, Tensor) else value for name, value in given.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_on_npu_go_to_the_operator_and_wait_for_nothing(layout: str) -> None:
    given = on_npu(layout)
    if layout == "rows":  # a copy has no room for more tokens
        given["latents"] = torch.full((4, 43, HEADDIM), torch.nan, dtype=torch.bfloat16, device="npu")[:, :40]
        given["latents"].copy_(arguments_of(layout)["latents"])
    told = str(explain(**given, function=fast_attn_latent_func))
    assert "npu_sparse_flash_attention of torch_npu, on a copy of the latents" in told
    fast_attn_latent_func(**given)
    host_npu.waits.clear()
    out, lse = fast_attn_latent_func(**given)
    assert not host_npu.waits
    wanted = vendor.forward(*prepared(**arguments_of(layout)))
    assert wanted.lse is not None
    assert torch.equal(out.cpu(), wanted.out[:, 0])
    assert torch.equal(lse.cpu(), wanted.lse[..., 0].T)


def test_other_chips_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "device_name", lambda index: "Ascend310P3")
    ATTENTION_BACKENDS.forget_choices()
    forget_plans()
    try:
        told = str(explain(**on_npu("pages"), function=fast_attn_latent_func))
    finally:
        ATTENTION_BACKENDS.forget_choices()
        forget_plans()
    assert "vendor: this NPU is not known: chip='Ascend310P3'" in told


def test_ordinary_heads_go_elsewhere_with_a_reason() -> None:
    q, k = torch.zeros(1, 3, 4, 64, dtype=torch.float16), torch.zeros(1, 9, 2, 64, dtype=torch.float16)
    indices = torch.zeros(1, 3, 5, dtype=torch.int32)
    told = str(explain(*(x.to("npu") for x in (q, k, k, indices)), function=fast_attn_selected_func))
    assert "nheads_k=2 with page_block_size=1; npu_sparse_flash_attention takes 1" in told
