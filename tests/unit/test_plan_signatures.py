"""A cached plan serves no call that validation would treat differently."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fastattention import ArgumentError, fast_attn_func, fast_attn_varlen_func, fast_attn_with_kvcache
from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.attention.validation import KvCacheArguments, Options, prepare_kvcache
from unit.plan_calls import (
    FUNCTIONS,
    Arguments,
    Function,
    assert_new,
    dense,
    every_function,
    kvcache,
    other_strides,
    unchecked,
    varlen,
)
from unit.samples import int32

pytestmark = pytest.mark.usefixtures("no_plans")


TENSORS = {
    **{f"{name}-shape": {name: dense()[name].repeat(1, 2, 1, 1)} for name in ("q", "k", "v")},
    **{f"{name}-strides": {name: other_strides(dense()[name])} for name in ("q", "k", "v")},
    **{f"{name}-dtype": {name: dense()[name].bfloat16()} for name in ("q", "k", "v")},
    **{f"{name}-device": {name: dense()[name].to("meta")} for name in ("k", "v")},
    "alibi_slopes": {"alibi_slopes": torch.ones(4)},
    "alibi_slopes-shape": {"alibi_slopes": torch.ones(2, 4)},
    "attn_bias": {"attn_bias": torch.ones(2, 4, 5, 7)},
    "attn_bias-shape": {"attn_bias": torch.ones(7)},
    "attn_bias-strides": {"attn_bias": torch.ones(2, 4, 7, 5).mT},
    "attn_bias-dtype": {"attn_bias": torch.ones(2, 4, 5, 7).bfloat16()},
    "block_mask": {"block_mask": torch.ones(1, 4, 1, 1) > 0},
    "block_mask-shape": {"block_mask": torch.ones(2, 4, 1, 1) > 0},
    "sinks": {"sinks": torch.ones(4)},
    "sinks-dtype": {"sinks": torch.ones(4).double()},
}
SCALARS: dict[str, Arguments] = {
    "softmax_scale": {"softmax_scale": 0.5},
    "causal": {"causal": True},
    "window-left": {"window_size": (2, -1)},
    "window-right": {"window_size": (-1, 2)},
    "softcap": {"softcap": 2.0},
    "dropout_p": {"dropout_p": 0.5},
    "deterministic": {"deterministic": True},
    "return_lse": {"return_lse": True},
    "backend": {"backend": "sdpa"},
    "unknown backend": {"backend": "moon"},
    "no name": {"backend": ["auto"]},
}


@torch.no_grad()
def test_another_size_of_blocks_is_another_plan() -> None:
    kept = torch.ones(1, 1, 1, 1) > 0
    fast_attn_func(**dense(block_mask=kept, block_size=64))
    assert_new(fast_attn_func, dense(block_mask=kept, block_size=192))


PAGES = {"k": torch.randn(4, 16, 2, 8), "v": torch.randn(4, 16, 2, 8), "block_table": int32(0, 1)[:, None]}


VARLEN_CHANGES: dict[str, Arguments] = {
    "q-shape": {"q": torch.randn(5, 8, 8)},
    "k-strides": {"k": other_strides(varlen()["k"])},
    "batch_size": {"cu_seqlens_q": int32(0, 5)},
    "int64": {"cu_seqlens_q": torch.tensor([0, 2, 5])},
    "cu_seqlens-strides": {"cu_seqlens_k": int32(0, 0, 4, 0, 7)[::2]},
    "max_seqlen_q": {"max_seqlen_q": 4},
    "max_seqlen_k": {"max_seqlen_k": 6},
    "pages": PAGES,
    "causal": {"causal": True},
    "sinks": {"sinks": torch.ones(4)},
}


@torch.no_grad()
def test_a_derived_maximum_that_differs_is_another_problem() -> None:
    found = {"max_seqlen_q": None, "max_seqlen_k": None}
    fast_attn_varlen_func(**varlen(**found))
    with unchecked():
        fast_attn_varlen_func(**varlen(**found))
    longer = varlen(**found, cu_seqlens_q=int32(0, 1, 5), cu_seqlens_k=int32(0, 1, 7))
    bias = torch.randn(4, 5, 6)
    assert_new(fast_attn_varlen_func, longer)
    out = fast_attn_varlen_func(**longer, attn_bias=bias)
    torch.testing.assert_close(out, fast_attn_varlen_func(**longer, attn_bias=bias, backend="sdpa"))


CACHE_CHANGES: dict[str, Arguments] = {
    "cache-shape": {name: torch.randn(2, 17, 2, 8) for name in ("k_cache", "v_cache")},
    "cache-strides": {"k_cache": other_strides(kvcache()["k_cache"])},
    "cache-last-axis": {"k_cache": torch.randn(2, 16, 8, 2).mT},
    "cache-expanded": {"v_cache": torch.randn(1, 16, 2, 8).expand(2, -1, -1, -1)},
    "new-strides": {"k": other_strides(torch.randn(2, 3, 2, 8))[:, :1]},
    "no-append": {"k": None, "v": None},
    "one length": {"cache_seqlens": 3},
    "full": {"k": None, "v": None, "cache_seqlens": None},
    "lengths-dtype": {"cache_seqlens": int32(3, 5).long()},
    "lengths-shape": {"cache_seqlens": int32(3)},
    "lengths-strides": {"cache_seqlens": int32(3, 0, 5)[::2]},
    "cache_batch_idx": {"cache_batch_idx": int32(1, 0)},
    "cache_leftpad": {"cache_leftpad": int32(1, 0)},
    "block_table": {"block_table": int32(0, 1)[:, None]},
    "rotary": {name: torch.ones(16, 2) for name in ("rotary_cos", "rotary_sin")},
    "rotary_interleaved": {"rotary_interleaved": False},
    "num_splits": {"num_splits": 2},
    "scales": {name: torch.ones(2, 16, 2) for name in ("k_scale", "v_scale")},
    "causal": {"causal": True},
}


# Values of a wrong type: every call reads them, so plans of earlier calls refuse them.
NO_INTEGERS = {
    "varlen-max_seqlen_q-type": ("varlen", {"max_seqlen_q": 3.0}),
    "cache-rotary_interleaved-type": ("kvcache", {"rotary_interleaved": 1.0}),
    "cache-num_splits-type": ("kvcache", {"num_splits": 0.0}),
    "cache-causal-type": ("kvcache", {"causal": 0.0}),
}
CHANGES = {
    **{f"dense-{name}": ("dense", changes) for name, changes in (TENSORS | SCALARS).items()},
    **{f"varlen-{name}": ("varlen", changes) for name, changes in VARLEN_CHANGES.items()},
    **{f"cache-{name}": ("kvcache", changes) for name, changes in CACHE_CHANGES.items()},
}
# Calls that come before, beside one without changes.
KNOWN: dict[str, list[Arguments]] = {
    "dense": [
        {"alibi_slopes": torch.ones(8)[::2]},
        {"attn_bias": torch.ones(2, 1, 5, 7)},
        {"sinks": torch.ones(8)[::2]},
        {"block_mask": torch.ones(1, 1, 1, 1) > 0},
    ]
}


@pytest.mark.parametrize(("kind", "changes"), (CHANGES | NO_INTEGERS).values(), ids=CHANGES | NO_INTEGERS)
@torch.no_grad()
def test_a_call_that_differs_is_validated(kind: str, changes: Arguments) -> None:
    function, arguments = FUNCTIONS[kind]
    for known in ({}, *KNOWN.get(kind, [])):
        function(**arguments(**known))
    if (kind, changes) in NO_INTEGERS.values():
        with unchecked(), pytest.raises((AssertionError, ArgumentError)):
            function(**arguments(**changes))
    else:
        assert_new(function, arguments(**changes))


SERVED_DENSE = ["k-strides", "alibi_slopes", "attn_bias-shape", "sinks", "softmax_scale", "causal", "softcap"]
SERVED_CACHES = ["cache-strides", "new-strides", "one length", "full", "lengths-strides", "cache_batch_idx", "rotary"]
SERVED_CACHES += ["cache_leftpad", "block_table", "rotary_interleaved", "num_splits", "causal"]
SERVED = [f"dense-{name}" for name in SERVED_DENSE] + [f"cache-{name}" for name in SERVED_CACHES] + ["varlen-pages"]


@pytest.mark.parametrize("name", SERVED)
@torch.no_grad()
def test_a_call_that_differs_is_right(name: str) -> None:
    kind, changes = CHANGES[name]
    function, arguments = FUNCTIONS[kind]
    function(**arguments())
    given = arguments(**changes)
    copies = {name: given[name].clone() for name in given if name.endswith("_cache")}
    torch.testing.assert_close(function(**given), function(**given | copies, backend="sdpa"))


@pytest.mark.parametrize("changes", [{"cache_leftpad": int32(1, 2)}, {"cache_batch_idx": int32(1, 0)}])
def test_a_backend_tells_calls_apart_that_have_one_problem(changes: Arguments) -> None:
    backend = ATTENTION_BACKENDS.get("cpu")
    shared = kvcache(q=torch.randn(2, 1, 4, 8), k=None, v=None)
    (plain, inputs), (other, other_inputs) = (
        prepare_kvcache(KvCacheArguments(**shared | change), Options()) for change in ({}, changes)
    )
    assert plain == other
    backend.forward(plain, inputs)
    out = backend.forward(other, other_inputs).out
    torch.testing.assert_close(out, fast_attn_with_kvcache(**shared | changes, backend="sdpa"))


@torch.no_grad()
def test_half_precisions_are_told_apart() -> None:
    fast_attn_func(**{name: x.half() for name, x in dense().items()})
    assert_new(fast_attn_func, {name: x.bfloat16() for name, x in dense().items()})


@torch.no_grad()
def test_an_append_to_a_full_cache_is_refused_after_one_length() -> None:
    fast_attn_with_kvcache(**kvcache(cache_seqlens=3))
    with pytest.raises(ArgumentError, match="cache_seqlens=None with k and v given"):
        fast_attn_with_kvcache(**kvcache(cache_seqlens=None))


@torch.no_grad()
def test_a_number_in_the_place_of_a_tensor_is_refused_after_one_length() -> None:
    nothing_new = {"k": None, "v": None, "cache_seqlens": 3}
    fast_attn_with_kvcache(**kvcache(**nothing_new))
    for name in ("k", "cache_batch_idx", "sinks"):
        with pytest.raises(ArgumentError, match=f"{name} must be a torch.Tensor, got int"):
            fast_attn_with_kvcache(**kvcache(**nothing_new | {name: 3}))


@every_function
def test_a_gradient_that_is_wanted_is_not_lost(function: Function, arguments: Callable[..., Arguments]) -> None:
    with torch.no_grad():
        function(**arguments())
    with_grad = arguments()
    with_grad["q"].requires_grad_()
    assert_new(function, with_grad)
    with torch.no_grad(), unchecked():
        function(**with_grad)
    if function is not fast_attn_with_kvcache:
        assert function(**with_grad).requires_grad
        with torch.no_grad(), unchecked():
            assert not function(**with_grad).requires_grad
