"""Repeated calls: served by a cached plan, which serves no call that validation would treat differently."""

from __future__ import annotations

import contextlib
import gc
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import fastattention
from fastattention import (
    ArgumentError,
    PackedKVStore,
    dispatch,
    explain,
    fast_attn_func,
    fast_attn_varlen_func,
    fast_attn_with_kvcache,
    get_num_threads,
    set_num_threads,
)
from fastattention.backends.cpu import plan as cpu_plan
from fastattention.backends.cpu.library import load_library
from fastattention.backends.registry import get_backend
from fastattention.problem import Layout
from fastattention.validation import KvCacheArguments, Options, prepare_kvcache

PACKAGE = Path(fastattention.__file__).parent
Call = Callable[..., Any]
Arguments = dict[str, Any]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense(**changes: Any) -> Arguments:
    return {"q": torch.randn(2, 5, 4, 8), "k": torch.randn(2, 7, 2, 8), "v": torch.randn(2, 7, 2, 8)} | changes


def varlen(**changes: Any) -> Arguments:
    tensors = {"q": torch.randn(5, 4, 8), "k": torch.randn(7, 2, 8), "v": torch.randn(7, 2, 8)}
    lengths = {"cu_seqlens_q": int32(0, 2, 5), "cu_seqlens_k": int32(0, 4, 7), "max_seqlen_q": 3, "max_seqlen_k": 4}
    return tensors | lengths | changes


def kvcache(**changes: Any) -> Arguments:
    tensors = {
        "q": torch.randn(2, 1, 4, 8), "k_cache": torch.randn(2, 16, 2, 8), "v_cache": torch.randn(2, 16, 2, 8),
        "k": torch.randn(2, 1, 2, 8), "v": torch.randn(2, 1, 2, 8), "cache_seqlens": int32(3, 5),
    }  # fmt: skip
    return tensors | changes


FUNCTIONS: dict[str, tuple[Call, Callable[..., Arguments]]] = {
    "dense": (fast_attn_func, dense),
    "varlen": (fast_attn_varlen_func, varlen),
    "kvcache": (fast_attn_with_kvcache, kvcache),
}
every_function = pytest.mark.parametrize(("function", "arguments"), FUNCTIONS.values(), ids=FUNCTIONS)


@pytest.fixture(autouse=True)
def _no_plans() -> Iterator[None]:
    dispatch.forget_plans()
    yield
    dispatch.forget_plans()


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Any call that is validated as a new one fails the test."""
    with contextlib.ExitStack() as stack:
        for name in ("prepare_prefill", "prepare_kvcache"):
            stack.enter_context(mock.patch.object(dispatch, name, side_effect=AssertionError("checked")))
        yield


def assert_new(call: Call, arguments: Arguments) -> None:
    """The call is validated, whatever comes of it."""
    with unchecked(), pytest.raises(AssertionError, match="checked"):
        call(**arguments)


def other_strides(x: Tensor) -> Tensor:
    """As x, with its second axis outermost in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@every_function
@torch.no_grad()
def test_a_repeated_call_is_not_validated_again_and_is_right(
    function: Call, arguments: Callable[..., Arguments]
) -> None:
    function(**arguments())
    again = arguments()
    caches = {name: again[name].clone() for name in again if name.endswith("_cache")}
    with unchecked():
        out = function(**again, return_lse=False)
    torch.testing.assert_close(out, function(**again | caches, backend="sdpa"))
    assert len(dispatch._plans) == 2


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


@pytest.mark.parametrize("changes", (TENSORS | SCALARS).values(), ids=TENSORS | SCALARS)
@torch.no_grad()
def test_a_dense_call_that_differs_is_validated(changes: Arguments) -> None:
    fast_attn_func(**dense())
    fast_attn_func(**dense(alibi_slopes=torch.ones(8)[::2]))
    fast_attn_func(**dense(attn_bias=torch.ones(2, 1, 5, 7)))
    fast_attn_func(**dense(sinks=torch.ones(8)[::2]))
    assert_new(fast_attn_func, dense(**changes))


PAGES = {"k": torch.randn(4, 16, 2, 8), "v": torch.randn(4, 16, 2, 8), "block_table": int32(0, 1)[:, None]}


@pytest.mark.parametrize(
    "changes",
    [
        {"q": torch.randn(5, 8, 8)},
        {"k": other_strides(varlen()["k"])},
        {"cu_seqlens_q": int32(0, 5)},
        {"cu_seqlens_q": torch.tensor([0, 2, 5])},
        {"cu_seqlens_k": int32(0, 0, 4, 0, 7)[::2]},
        {"max_seqlen_q": 4},
        {"max_seqlen_k": 6},
        {"max_seqlen_q": 3.0},
        PAGES,
        {"causal": True},
        {"sinks": torch.ones(4)},
    ],
    ids=[
        "q-shape", "k-strides", "batch_size", "int64", "cu_seqlens-strides", "max_seqlen_q", "max_seqlen_k", "float",
        "pages", "causal", "sinks",
    ],
)  # fmt: skip
@torch.no_grad()
def test_a_varlen_call_that_differs_is_validated(changes: Arguments) -> None:
    fast_attn_varlen_func(**varlen())
    with contextlib.suppress(ArgumentError):  # of a maximum that is no integer, which every call reads
        assert_new(fast_attn_varlen_func, varlen(**changes))
        return
    assert changes == {"max_seqlen_q": 3.0}


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
    "rotary_interleaved-type": {"rotary_interleaved": 1.0},
    "num_splits": {"num_splits": 2},
    "num_splits-type": {"num_splits": 0.0},
    "scales": {name: torch.ones(2, 16, 2) for name in ("k_scale", "v_scale")},
    "causal": {"causal": True},
    "causal-type": {"causal": 0.0},
}


@pytest.mark.parametrize("changes", CACHE_CHANGES.values(), ids=CACHE_CHANGES)
@torch.no_grad()
def test_a_call_with_a_cache_that_differs_is_validated(changes: Arguments) -> None:
    fast_attn_with_kvcache(**kvcache())
    with contextlib.suppress(ArgumentError):  # of causal=0.0, which every call reads
        assert_new(fast_attn_with_kvcache, kvcache(**changes))
        return
    assert changes == {"causal": 0.0}


SERVED_DENSE = ["k-strides", "alibi_slopes", "attn_bias-shape", "sinks", "softmax_scale", "causal", "softcap"]
SERVED_CACHES = ["cache-strides", "new-strides", "one length", "full", "lengths-strides", "cache_batch_idx", "rotary"]
SERVED_CACHES += ["cache_leftpad", "block_table", "rotary_interleaved", "num_splits", "causal"]
DIFFERENT = {
    **{f"dense-{name}": ("dense", (TENSORS | SCALARS)[name]) for name in SERVED_DENSE},
    **{f"cache-{name}": ("kvcache", CACHE_CHANGES[name]) for name in SERVED_CACHES},
    "varlen-pages": ("varlen", PAGES),
}


@pytest.mark.parametrize(("kind", "changes"), DIFFERENT.values(), ids=DIFFERENT)
@torch.no_grad()
def test_a_call_that_differs_is_right(kind: str, changes: Arguments) -> None:
    function, arguments = FUNCTIONS[kind]
    function(**arguments())
    given = arguments(**changes)
    copies = {name: given[name].clone() for name in given if name.endswith("_cache")}
    torch.testing.assert_close(function(**given), function(**given | copies, backend="sdpa"))


@pytest.mark.parametrize("changes", [{"cache_leftpad": int32(1, 2)}, {"cache_batch_idx": int32(1, 0)}])
def test_a_backend_tells_calls_apart_that_have_one_problem(changes: Arguments) -> None:
    backend = get_backend("cpu")
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
def test_a_gradient_that_is_wanted_is_not_lost(function: Call, arguments: Callable[..., Arguments]) -> None:
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


# What would read or write elsewhere, or wrongly, if the plan of an earlier call did not look.
WRONG_NUMBERS: dict[str, tuple[str, Arguments, str]] = {
    "cu_seqlens_q": ("varlen", {"cu_seqlens_q": int32(0, 4, 3)}, "cu_seqlens_q must not decrease"),
    "cu_seqlens_k": ("varlen", {"cu_seqlens_k": int32(0, 4, 9)}, "cu_seqlens_k must end at"),
    "max_seqlen_q": ("varlen", {"cu_seqlens_q": int32(0, 0, 5)}, "max_seqlen_q=3 is smaller"),
    "room": ("kvcache", {"cache_seqlens": int32(3, 16)}, r"cache_seqlens\[1\]=16 is out of range"),
    "negative": ("kvcache", {"cache_seqlens": int32(-1, 5)}, r"cache_seqlens\[0\]=-1 is out of range"),
}


@pytest.mark.parametrize(("kind", "changes", "message"), WRONG_NUMBERS.values(), ids=WRONG_NUMBERS)
@torch.no_grad()
def test_numbers_are_checked_in_every_call(kind: str, changes: Arguments, message: str) -> None:
    function, arguments = FUNCTIONS[kind]
    function(**arguments())
    wrong = arguments(**changes)
    before = {name: value.clone() for name, value in wrong.items() if isinstance(value, Tensor)}
    with unchecked(), pytest.raises(ArgumentError, match=message):
        function(**wrong)
    for name, value in before.items():
        assert torch.equal(wrong[name], value)


@torch.no_grad()
def test_indices_and_one_length_are_checked_in_every_call() -> None:
    tables = {"block_table": int32(0, 1)[:, None]}
    fast_attn_with_kvcache(**kvcache(**tables))
    fast_attn_with_kvcache(**kvcache(cache_seqlens=3))
    fast_attn_with_kvcache(**kvcache(cache_batch_idx=int32(1, 0)))
    with unchecked():
        with pytest.raises(ArgumentError, match="block_table names page 2"):
            fast_attn_with_kvcache(**kvcache(block_table=int32(0, 2)[:, None]))
        with pytest.raises(ArgumentError, match=r"cache_seqlens\[0\]=16"):
            fast_attn_with_kvcache(**kvcache(cache_seqlens=16))
        with pytest.raises(ArgumentError, match="must not repeat"):
            fast_attn_with_kvcache(**kvcache(cache_batch_idx=int32(1, 1)))


@torch.no_grad()
def test_caches_that_share_memory_are_found_in_every_call() -> None:
    fast_attn_with_kvcache(**kvcache())
    shared = torch.randn(2, 16, 2, 8)
    before = shared.clone()
    with unchecked(), pytest.raises(ArgumentError, match="got other numbers"):
        fast_attn_with_kvcache(**kvcache(k_cache=shared, v_cache=shared))
    assert torch.equal(shared, before)


@every_function
@torch.no_grad()
def test_memory_is_looked_for_in_every_call(function: Call, arguments: Callable[..., Arguments]) -> None:
    function(**arguments())
    for name, value in arguments().items():
        if isinstance(value, Tensor):
            value.untyped_storage().resize_(0)
            with pytest.raises(ArgumentError, match=f"{name} has {value.numel()} elements and no memory"):
                function(**arguments(**{name: value}))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # by torch, of its own
def test_transforms_and_modes_are_seen_after_plain_calls() -> None:
    arguments = dense()
    q, k, v = arguments.values()
    expected = fast_attn_func(q, k, v)
    with unchecked():
        fast_attn_func(q, k, v)
    leaf = q.clone().requires_grad_()
    fast_attn_func(leaf, k, v).sum().backward()
    torch.testing.assert_close(torch.func.grad(lambda x: fast_attn_func(x, k, v).sum())(q), leaf.grad)
    torch.testing.assert_close(torch.vmap(fast_attn_func)(q[None], k[None], v[None])[0], expected)
    with forward_ad.dual_level():
        out = fast_attn_func(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
        assert forward_ad.unpack_dual(out).tangent is not None
    with FakeTensorMode() as mode:
        assert isinstance(fast_attn_func(*(mode.from_tensor(x) for x in (q, k, v))), FakeTensor)

    class Names(TorchDispatchMode):
        seen: list[str]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    names = Names()
    names.seen = []
    with names:
        torch.testing.assert_close(fast_attn_func(q, k, v), expected)
    assert "fastattention.attention.default" in names.seen


@torch.no_grad()
def test_a_negated_view_is_not_read_as_it_lies_in_memory() -> None:
    arguments = dense()
    fast_attn_func(**arguments)
    q = torch._neg_view(arguments["q"])
    torch.testing.assert_close(fast_attn_func(**arguments | {"q": q}), fast_attn_func(**arguments | {"q": -q.neg()}))


@torch.no_grad()
def test_a_subclass_that_looks_like_a_known_tensor_goes_its_own_way() -> None:
    class Marked(Tensor):
        pass

    arguments = dense()
    fast_attn_func(**arguments)
    assert type(fast_attn_func(**arguments | {"q": arguments["q"].as_subclass(Marked)})) is Marked
    parameter = torch.nn.Parameter(arguments["q"], requires_grad=False)
    with unchecked():
        assert type(fast_attn_func(**arguments | {"q": parameter})) is Tensor


@torch.no_grad()
def test_what_only_looks_like_a_tensor_is_refused_after_tensors() -> None:
    class Like:
        """Has all that a plan looks at."""

        def __init__(self, x: Tensor) -> None:
            self.shape, self.dtype, self.device, self.stride = x.shape, x.dtype, x.device, x.stride
            self.is_neg, self.is_meta, self.requires_grad, self.data_ptr = x.is_neg, False, False, x.data_ptr

    fast_attn_func(**dense())
    for name in ("q", "k", "v"):
        with pytest.raises(ArgumentError, match=f"{name} must be a torch.Tensor, got Like"):
            fast_attn_func(**dense(**{name: Like(dense()[name])}))


def test_a_plan_made_in_inference_mode_serves_other_calls_too() -> None:
    with torch.inference_mode():
        assert fast_attn_func(**dense()).is_inference()
    with unchecked():
        assert not fast_attn_func(**dense()).is_inference()


@torch.no_grad()
def test_results_follow_the_tensors_and_not_the_defaults() -> None:
    fast_attn_func(**dense())
    arguments = dense()
    before = torch.get_default_dtype()
    with unchecked(), torch.device("meta"):
        torch.set_default_dtype(torch.float64)
        try:
            out = fast_attn_func(**arguments)
        finally:
            torch.set_default_dtype(before)
    assert (out.device.type, out.dtype, out.is_contiguous()) == ("cpu", torch.float32, True)


@torch.no_grad()
def test_writes_are_counted_in_every_call() -> None:
    arguments = kvcache()
    fast_attn_with_kvcache(**arguments)
    versions = [arguments[name]._version for name in ("k_cache", "v_cache", "q")]
    with unchecked():
        fast_attn_with_kvcache(**arguments)
    assert [arguments[name]._version for name in ("k_cache", "v_cache", "q")] == [
        versions[0] + 1, versions[1] + 1, versions[2],
    ]  # fmt: skip


@torch.no_grad()
def test_the_number_of_threads_is_that_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, seen = dense(), []
    fast_attn_func(**arguments)
    native = load_library().forward
    monkeypatch.setattr(
        load_library(), "forward", lambda plan, addresses, threads: seen.append(threads) or native(plan, addresses, 1)
    )
    try:
        for count in (3, 1):
            set_num_threads(count)
            fast_attn_func(**arguments)
    finally:
        set_num_threads(None)
    fast_attn_func(**arguments)
    assert seen == [3, 1, get_num_threads()]


@torch.no_grad()
def test_a_library_that_is_loaded_anew_serves_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = dense()
    fast_attn_func(**arguments)
    monkeypatch.setenv("FASTATTENTION_CPU_ISA", "generic")
    load_library.cache_clear()
    seen = []
    native = load_library().forward
    monkeypatch.setattr(load_library(), "forward", lambda *call: seen.append(call) or native(*call))
    try:
        fast_attn_func(**arguments)
    finally:
        load_library.cache_clear()
    assert len(seen) == 1


@torch.no_grad()
def test_memory_that_runs_out_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = dense()
    fast_attn_func(**arguments)
    monkeypatch.setattr(load_library(), "forward", lambda plan, addresses, threads: 1)
    with pytest.raises(MemoryError, match="packed keys and values"):
        fast_attn_func(**arguments)


@torch.no_grad()
def test_profilers_see_the_backend_of_a_repeated_call() -> None:
    arguments = dense()
    fast_attn_func(**arguments)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, unchecked():
        fast_attn_func(**arguments)
    assert "fastattention::cpu" in [event.key for event in profile.key_averages()]


@torch.no_grad()
def test_threads_share_a_plan() -> None:
    fast_attn_func(**dense())
    calls = [dense() for _ in range(4)]
    wrong: list[int] = []

    def work(index: int) -> None:
        expected = fast_attn_func(**calls[index], backend="sdpa")
        for _ in range(200):
            if not torch.allclose(fast_attn_func(**calls[index]), expected, atol=1e-5):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@every_function
@torch.no_grad()
def test_a_plan_keeps_no_tensor(function: Call, arguments: Callable[..., Arguments]) -> None:
    given = arguments()
    kept = [weakref.ref(value) for value in given.values() if isinstance(value, Tensor)]
    function(**given)
    assert len(dispatch._plans) == 1
    given.clear()
    gc.collect()
    assert [one() for one in kept] == [None] * len(kept)


@torch.no_grad()
def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch._plans, "most", 3)
    for scale in range(1, 9):
        fast_attn_func(**dense(softmax_scale=float(scale)))
        assert len(dispatch._plans) <= 3


@torch.no_grad()
def test_tensors_that_kernels_cannot_read_are_copied_in_every_call() -> None:
    for function, made in ((fast_attn_func, dense), (fast_attn_varlen_func, varlen)):
        for _ in range(2):
            arguments = made()
            changes = {"q": arguments["q"].mT.contiguous().mT, "sinks": torch.randn(8).double()[::2]}
            changes |= {"attn_bias": torch.randn(7 if made is dense else 4)}
            expected = function(**arguments | changes, backend="sdpa")
            torch.testing.assert_close(function(**arguments | changes), expected)


@torch.no_grad()
def test_a_packed_store_has_plans_of_its_own() -> None:
    store = PackedKVStore(2, 16, 2, 8, dtype=torch.float32)
    q, k, v = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8)
    first = store.attend(q, k, v)
    with unchecked():
        store.attend(q, k, v)
    torch.testing.assert_close(store.attend(q), first)  # all tokens are the same
    assert store.seqlens.tolist() == [2, 2]


@every_function
@torch.no_grad()
def test_a_known_call_is_explained_and_not_computed(function: Call, arguments: Callable[..., Arguments]) -> None:
    given = arguments()
    function(**given)
    before = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}
    with mock.patch.object(dispatch.Plan, "run", side_effect=AssertionError("computed")):
        assert explain(**given, function=function).backend == "cpu"
    for name, value in before.items():
        assert torch.equal(given[name], value)


@torch.no_grad()
def test_other_backends_have_plans_too() -> None:
    arguments = dense()
    first = fast_attn_func(**arguments, backend="sdpa")
    with unchecked():
        assert torch.equal(fast_attn_func(**arguments, backend="sdpa"), first)
    problem = explain(**arguments).problem
    assert problem.layout is Layout.DENSE
    assert not isinstance(get_backend("sdpa").plan(problem, mock.Mock()), cpu_plan.CpuPlan)


def files_of(call: Callable[[], object]) -> set[str]:
    """The files of the package whose functions a call enters."""
    entered: set[str] = set()

    def enter(frame: Any, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered.add(str(path.relative_to(PACKAGE)))

    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(before)
    return entered


@every_function
@torch.inference_mode()
def test_a_repeated_call_enters_few_files(function: Call, arguments: Callable[..., Arguments]) -> None:
    given = arguments()
    function(**given)
    entered = files_of(lambda: function(**given))
    assert "backends/cpu/plan.py" in entered
    assert len(entered) <= 7, sorted(entered)
    assert math.isfinite(float(function(**given).sum()))
