"""Repeated calls: served by a cached plan, which checks addresses and values every time."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from fastattention import (
    ArgumentError,
    PackedKVStore,
    explain,
    fast_attn_func,
    fast_attn_varlen_func,
    fast_attn_with_kvcache,
    get_num_threads,
    set_num_threads,
)
from fastattention.attention import operators
from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.attention.problem import Inputs, Layout, Problem
from fastattention.attention.validation import KvCacheArguments, Options, prepare_kvcache, prepare_varlen
from fastattention.backends.cpu.attention import call as cpu_call
from fastattention.backends.cpu.library import load_library
from fastattention.engine.operator import Plan
from fastattention.engine.signature import CheckedOnce
from unit.plan_calls import FUNCTIONS, Arguments, Function, dense, every_function, files_of, kvcache, unchecked, varlen
from unit.samples import int32

pytestmark = pytest.mark.usefixtures("no_plans")


def num_plans() -> int:
    return len(operators.ATTENTION._plans) + len(operators.ATTENTION_KVCACHE._plans)


@every_function
@torch.no_grad()
def test_a_repeated_call_is_not_validated_again_and_is_right(
    function: Function, arguments: Callable[..., Arguments]
) -> None:
    function(**arguments())
    again = arguments()
    caches = {name: again[name].clone() for name in again if name.endswith("_cache")}
    with unchecked():
        out = function(**again, return_lse=False)
    torch.testing.assert_close(out, function(**again | caches, backend="sdpa"))
    assert num_plans() == 2


# Changes with which the plan of an earlier call would read or write wrongly without its checks.
WRONG_NUMBERS: dict[str, tuple[str, Arguments, str]] = {
    "cu_seqlens_q": ("varlen", {"cu_seqlens_q": int32(0, 4, 3)}, "cu_seqlens_q must not decrease"),
    "cu_seqlens_k": ("varlen", {"cu_seqlens_k": int32(0, 4, 9)}, "cu_seqlens_k must end at"),
    "max_seqlen_q": ("varlen", {"cu_seqlens_q": int32(0, 0, 5)}, "max_seqlen_q=3 is smaller"),
    "room": ("kvcache", {"cache_seqlens": int32(3, 16)}, r"cache_seqlens\[1\]=16 is out of range"),
    "negative": ("kvcache", {"cache_seqlens": int32(-1, 5)}, r"cache_seqlens\[0\]=-1 is out of range"),
    "one length": ("kvcache", {"cache_seqlens": 16}, r"cache_seqlens\[0\]=16"),
    "block_table": ("kvcache", {"block_table": int32(0, 2)[:, None]}, "block_table names page 2"),
    "cache_batch_idx": ("kvcache", {"cache_batch_idx": int32(1, 1)}, "must not repeat"),
}
# Good calls of another signature, whose plans serve the wrong ones.
KNOWN = {
    "one length": {"cache_seqlens": 3},
    "block_table": {"block_table": int32(0, 1)[:, None]},
    "cache_batch_idx": {"cache_batch_idx": int32(1, 0)},
}


@pytest.mark.parametrize("name", WRONG_NUMBERS)
@torch.no_grad()
def test_numbers_are_checked_in_every_call(name: str) -> None:
    kind, changes, message = WRONG_NUMBERS[name]
    function, arguments = FUNCTIONS[kind]
    function(**arguments(**KNOWN.get(name, {})))
    wrong = arguments(**changes)
    before = {name: value.clone() for name, value in wrong.items() if isinstance(value, Tensor)}
    with unchecked(), pytest.raises(ArgumentError, match=message):
        function(**wrong)
    for name, value in before.items():
        assert torch.equal(wrong[name], value)


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
def test_memory_is_looked_for_in_every_call(function: Function, arguments: Callable[..., Arguments]) -> None:
    function(**arguments())
    for name, value in arguments().items():
        if isinstance(value, Tensor):
            value.untyped_storage().resize_(0)
            with pytest.raises(ArgumentError, match=f"{name} has {value.numel()} elements and no memory"):
                function(**arguments(**{name: value}))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own warning
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
        """An object with all attributes that a plan reads."""

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
def test_writes_are_counted_in_every_call_and_reading_is_none() -> None:
    arguments = kvcache()
    for changes, writes in (({}, 1), ({}, 2), ({"k": None, "v": None}, 2)):
        fast_attn_with_kvcache(**arguments | changes)
        assert [arguments[name]._version for name in ("k_cache", "v_cache", "q")] == [writes, writes, 0]


@torch.no_grad()
def test_the_number_of_threads_is_that_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, seen = dense(), []
    fast_attn_func(**arguments)
    native = load_library().forward
    noted = lambda plan, addresses, threads: seen.append(threads) or native(plan, addresses, 1)  # noqa: E731
    monkeypatch.setattr(load_library(), "forward", noted)
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

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert wrong == []


@every_function
@torch.no_grad()
def test_a_plan_keeps_no_tensor(function: Function, arguments: Callable[..., Arguments]) -> None:
    given = arguments()
    kept = [weakref.ref(value) for value in given.values() if isinstance(value, Tensor)]
    function(**given)
    assert num_plans() == 1
    given.clear()
    gc.collect()
    assert [one() for one in kept] == [None] * len(kept)


@torch.no_grad()
def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators.ATTENTION._plans, "most", 3)
    for scale in range(1, 9):
        fast_attn_func(**dense(softmax_scale=float(scale)))
        assert num_plans() <= 3


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
def test_a_known_call_is_explained_and_not_computed(function: Function, arguments: Callable[..., Arguments]) -> None:
    given = arguments()
    function(**given)
    before = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}
    with mock.patch.object(Plan, "run", side_effect=AssertionError("computed")):
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
    assert not isinstance(ATTENTION_BACKENDS.get("sdpa").make_call(problem, mock.Mock()), cpu_call.CpuAttentionCall)


@every_function
@torch.inference_mode()
def test_a_repeated_call_enters_few_files(function: Function, arguments: Callable[..., Arguments]) -> None:
    given = arguments()
    function(**given)
    entered = files_of(lambda: function(**given))
    assert "backends/cpu/attention/call.py" in entered
    assert len(entered) <= (8 if function is fast_attn_func else 11), sorted(entered)
    assert math.isfinite(float(function(**given).sum()))


VARLEN = prepare_varlen(*varlen().values(), Options())
KVCACHE = prepare_kvcache(KvCacheArguments(**kvcache()), Options())
OFF_THE_CPU = {
    "varlen": (VARLEN, {"cu_seqlens_k": int32(0, 8, 7)}, "cu_seqlens_k must not decrease"),
    "kvcache": (KVCACHE, {"cache_seqlens": int32(3, -1)}, r"cache_seqlens\[1\]=-1 is out of range"),
}


@pytest.mark.parametrize(("call", "wrong", "error"), OFF_THE_CPU.values(), ids=OFF_THE_CPU)
def test_a_backend_that_reads_numbers_off_the_cpu_reads_none_that_are_wrong(
    call: tuple[Problem, Inputs], wrong: dict[str, Tensor], error: str
) -> None:
    """On a GPU a negative length once made torch's own kernels end the process."""
    problem, inputs = call
    served: list[Inputs] = []
    with pytest.raises(ArgumentError, match=error):
        operators._serve_checked(problem, served.append, inputs._replace(**wrong))  # type: ignore[arg-type]
    assert not served
    operators._serve_checked(problem, served.append, inputs)  # type: ignore[arg-type]
    assert served == [inputs]


def test_off_the_cpu_rows_may_follow_the_last_sequence() -> None:
    problem, inputs = VARLEN
    served: list[Inputs] = []
    shorter = inputs._replace(cu_seqlens_q=int32(0, 2, 4))
    operators._serve_checked(problem, served.append, shorter)  # type: ignore[arg-type]
    assert served == [shorter]
    with pytest.raises(ArgumentError, match="cu_seqlens_q must end at the number of tokens, 5, got 6"):
        operators._serve_checked(problem, served.append, inputs._replace(cu_seqlens_q=int32(0, 3, 6)))  # type: ignore[arg-type]


def test_a_check_runs_once_for_calls_alike() -> None:
    """One that fails runs again, and so does that of a tensor without data."""
    runs = []

    @CheckedOnce
    def check(x: Tensor, most: float) -> None:
        runs.append(most)
        if x.shape[0] > most:
            raise ArgumentError("x is too long")

    x = torch.zeros(3, 2)
    for _ in range(2):
        check((x,), 3.0)
        check((x.clone(),), 3.0)
    assert runs == [3.0]
    for other in (x.T, x[:, :1], x.double()):
        check((other,), 3.0)
    assert runs == [3.0] * 4
    for _ in range(2):
        with pytest.raises(ArgumentError):
            check((x,), 2.0)
    assert runs == [3.0] * 4 + [2.0] * 2
    for _ in range(2):
        check((x.to("meta"),), 3.0)
    assert runs == [3.0] * 4 + [2.0] * 2 + [3.0] * 2
