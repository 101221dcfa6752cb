"""Transforms of torch.func, tracers and counters: their results for a call are those for plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from fastattention import (
    UnsupportedError,
    fast_attn_func,
    fast_attn_varlen_func,
    fast_attn_with_kvcache,
    merge_attn_states,
)
from fastattention.attention.backend import ATTENTION_BACKENDS
from unit.functions import CALLS, FunctionCall, every_call

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
BACKENDS = [
    "auto",
    *(
        name
        for name in ATTENTION_BACKENDS.order
        if name in ("cpu", "sdpa") and not ATTENTION_BACKENDS.get(name).why_unavailable()
    ),
]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ((q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2)


def drawn(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    return q, k, v


Q, K, V = drawn(3, 2, 5, 2, 8)  # the first axis is mapped, where one is


def squares(attention: Attention) -> Callable[..., Tensor]:
    return lambda *tensors: attention(*tensors).square().sum()


MAPPED: dict[str, Callable[[Attention], Any]] = {
    "all": lambda f: func.vmap(f)(Q, K, V),
    "queries": lambda f: func.vmap(f, in_dims=(0, None, None))(Q, K[0], V[0]),
    "keys": lambda f: func.vmap(f, in_dims=(None, 0, 0))(Q[0], K, V),
    "twice": lambda f: func.vmap(func.vmap(f))(Q[None], K[None], V[None]),
    "another-axis": lambda f: func.vmap(f, in_dims=3, out_dims=1)(*(x.movedim(0, 3) for x in (Q, K, V))),
}
DIFFERENTIATED: dict[str, Callable[[Attention], Any]] = {
    "grad": lambda f: func.grad(squares(f), argnums=(0, 1, 2))(Q[0], K[0], V[0]),
    "grad-of-each": lambda f: func.vmap(func.grad(squares(f), argnums=(0, 1, 2)))(Q, K, V),
    "grad-of-mapped": lambda f: func.grad(lambda q: func.vmap(squares(f))(q, K, V).sum())(Q),
    "vjp": lambda f: func.vjp(f, Q[0], K[0], V[0])[1](Q[1]),
    "jvp": lambda f: func.jvp(f, (Q[0], K[0], V[0]), (Q[1], K[1], V[1])),
    "jacrev": lambda f: func.jacrev(lambda q: f(q, K[0], V[0]).sum((1, 2, 3)))(Q[0]),
    "jacfwd": lambda f: func.jacfwd(lambda q: f(q, K[0], V[0]).sum((1, 2, 3)))(Q[0]),
    "hessian": lambda f: func.hessian(lambda q: squares(f)(q, K[0, :1], V[0, :1]))(Q[0, :1]),
    "batched-gradients": lambda f: of_several_gradients(f),
}


def of_several_gradients(attention: Attention) -> Tensor:
    q = Q[0].clone().requires_grad_()
    return torch.autograd.grad(attention(q, K[0], V[0]), q, Q, is_grads_batched=True)[0]


def assert_close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MAPPED)
def test_vmap(name: str, backend: str) -> None:
    assert_close(MAPPED[name](lambda q, k, v: fast_attn_func(q, k, v, backend=backend)), MAPPED[name](plain))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of torch's own kernels
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_derivatives(name: str, backend: str) -> None:
    found = DIFFERENTIATED[name](lambda q, k, v: fast_attn_func(q, k, v, backend=backend))
    assert_close(found, DIFFERENTIATED[name](plain))


def test_a_backend_without_derivatives_says_so_within_a_transform() -> None:
    with pytest.raises(UnsupportedError, match="operations of torch alone"):
        func.grad(squares(lambda q, k, v: fast_attn_func(q, k, v, backend="cpu")))(Q[0], K[0], V[0])


@every_call
@torch.no_grad()
def test_vmap_of_every_function_is_a_loop(call: FunctionCall) -> None:
    """Maps every tensor by itself, then all of them."""
    indices = set(call.indices)
    appends = "k" in call.shapes and "k_cache" in call.shapes
    caches = {"k_cache", "v_cache", "k_scale", "v_scale"} & set(call.shapes)
    alone = [{name} for name in call.shapes if name not in caches and not appends]
    for names in (*alone, (set(call.shapes) | indices) - (indices if appends else set())):
        stacked = {
            name: torch.stack([x, x if name in indices or x.dtype is torch.int8 else x.roll(1, 0)])
            for name, x in call.tensors().items()
            if name in names
        }
        looped = [{**call.tensors(), **{name: x[i].clone() for name, x in stacked.items()}} for i in range(2)]
        expected = [
            torch.stack(parts) for parts in zip(*(call.run(tensors, "auto") for tensors in looped), strict=True)
        ]
        rest = {name: x for name, x in call.tensors().items() if name not in names}
        found = func.vmap(lambda mapped, rest=rest: call.run({**mapped, **rest}, "auto"))(stacked)
        assert_close(found, tuple(expected))
        for name in caches & names:
            assert torch.equal(stacked[name], torch.stack([tensors[name] for tensors in looped]))


@pytest.mark.parametrize("wanted", [("q",), ("k", "v"), ("q", "k", "v", "sinks"), ("sinks",)], ids=" ".join)
def test_gradients_through_vmap_are_those_of_a_loop(wanted: tuple[str, ...]) -> None:
    """The operator within vmap does not see which mapped tensors require a gradient."""
    tensors = {"q": Q[0], "k": K, "v": V, "sinks": torch.tensor([0.3, -1.0])}
    leaves = {name: x.clone().requires_grad_(name in wanted) for name, x in tensors.items()}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = fast_attn_func(q, k, v, causal=True, sinks=leaves["sinks"])
        return out

    q, k, v, _ = leaves.values()
    sums = (
        func.vmap(attention, in_dims=(None, 0, 0))(q, k, v).square().sum(),
        torch.stack([attention(q, *pair) for pair in zip(k, v, strict=True)]).square().sum(),
    )
    got, right = (torch.autograd.grad(each, [leaves[name] for name in wanted]) for each in sums)
    torch.testing.assert_close(got, right)


@pytest.mark.parametrize("bias", [False, True])
def test_a_trace_gives_gradients_that_were_not_wanted_when_it_was_made(bias: bool) -> None:
    tensors = [Q[0], K[0], V[0], *([torch.randn(1, 5)] if bias else [])]

    def attention(*tensors: Tensor) -> Tensor:
        q, k, v, *rest = tensors
        out: Tensor = fast_attn_func(q, k, v, attn_bias=rest[0] if rest else None)
        return out

    # The bias of the trace requires a gradient, so the sdpa backend serves its call.
    traced_with = [x.clone().requires_grad_(index == (3 if bias else 0)) for index, x in enumerate(tensors)]
    graph = make_fx(attention)(*traced_with)
    leaves = [x.clone().requires_grad_(index < 3) for index, x in enumerate(tensors)]
    got, right = (torch.autograd.grad(f(*leaves).square().sum(), leaves[:3]) for f in (graph, attention))
    torch.testing.assert_close(got, right)


@pytest.mark.parametrize("transform", [func.grad, lambda f: lambda x: func.vjp(f, x)[1](torch.tensor(1.0))[0]])
def test_a_merge_has_derivatives(transform: Callable[..., Any]) -> None:
    def loss(q: Tensor) -> Tensor:
        parts = [fast_attn_func(q, K[0][:, part], V[0][:, part], return_lse=True) for part in (slice(2), slice(2, 5))]
        return merge_attn_states([out for out, _ in parts], [lse for _, lse in parts])[0].square().sum()

    q = Q[0].clone().requires_grad_()
    torch.testing.assert_close(transform(loss)(Q[0]), torch.autograd.grad(loss(q), q)[0])


def test_vmap_refuses_to_append_to_a_cache_that_is_not_mapped() -> None:
    call = next(call for call in CALLS if call.name == "kvcache_append")
    tensors = call.tensors()
    k = torch.stack([tensors.pop("k")] * 2)
    with pytest.raises(UnsupportedError, match="vmap does not map k_cache"):
        func.vmap(lambda k: fast_attn_with_kvcache(**tensors, **call.scalars, k=k))(k)


@every_call
def test_functionalize(call: FunctionCall) -> None:
    if call.differentiable:
        assert_close(func.functionalize(call.run)(call.tensors()), call.run(call.tensors()))
        return
    with pytest.raises(UnsupportedError, match="functionalize does not follow"):
        func.functionalize(call.run)(call.tensors())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@every_call
@torch.no_grad()
def test_a_trace_computes_the_same_of_other_numbers(call: FunctionCall) -> None:
    """Uses torch.jit.trace, which once recorded uninitialized memory."""
    indices = {name: x for name, x in call.tensors().items() if name in call.indices}

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        result = call.function(**dict(zip(call.shapes, tensors, strict=True)), **indices, **call.scalars)
        return tuple(x + 0 for x in (result if isinstance(result, tuple) else (result,)))

    first, second = ([x.clone() for n, x in call.tensors().items() if n in call.shapes] for _ in range(2))
    traced = torch.jit.trace(run, tuple(first), check_trace=False)
    second = [x if x.dtype is torch.int8 else x.flip(0) for x in second]
    assert_close(traced(*[x.clone() for x in second]), run(*[x.clone() for x in second]))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_of_a_merge() -> None:
    outs, lses = Q[:2, :, :, :, :], torch.randn(2, 2, 2, 5)
    traced = torch.jit.trace(lambda outs: merge_attn_states(outs, lses)[0] + 0, outs)
    assert_close(traced(outs.flip(0)), merge_attn_states(outs.flip(0), lses)[0])


def test_export_is_one_operator_and_computes_the_same() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return fast_attn_func(q, k, v, causal=True)  # type: ignore[no-any-return]

    program = torch.export.export(Layer(), (Q[0], K[0], V[0]))
    called = [node for node in program.graph.nodes if "fastattention" in str(node.target)]
    assert len(called) == 1
    assert_close(program.module()(Q[1], K[1], V[1]), Layer()(Q[1], K[1], V[1]))


def flops(function: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masked", [{}, {"causal": True}, {"window_size": (2, 0)}], ids=str)
def test_flops_are_those_that_torch_counts(masked: dict[str, Any], backend: str) -> None:
    q, k, v = drawn(2, 6, 4, 8)
    shape = q.transpose(1, 2).shape
    counted = flops(lambda: fast_attn_func(q, k, v, **masked, backend=backend))
    assert counted == sdpa_flop_count(shape, shape, shape) == 4 * 2 * 4 * 6 * 6 * 8


def test_flops_of_training_are_those_that_torch_counts() -> None:
    q, k, v = (x.requires_grad_() for x in drawn(2, 6, 4, 8))
    shape = q.transpose(1, 2).shape
    by_torch = sdpa_flop_count(shape, shape, shape) + sdpa_backward_flop_count(shape, shape, shape, shape)
    assert flops(lambda: squares(fast_attn_func)(q, k, v).backward()) == by_torch


def test_flops_of_sequences_and_caches_count_their_own_lengths() -> None:
    q, k, v = drawn(7, 4, 8)
    cu_seqlens = torch.tensor([0, 2, 7], dtype=torch.int32)
    assert flops(lambda: fast_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens)) == 4 * (2 * 2 + 5 * 5) * 4 * 8
    q, k_cache, v_cache = torch.randn(2, 1, 4, 8), torch.randn(2, 10, 4, 8), torch.randn(2, 10, 4, 8)
    cache_seqlens = torch.tensor([3, 5], dtype=torch.int32)
    new = torch.randn(2, 1, 4, 8)
    counted = flops(lambda: fast_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=cache_seqlens))
    assert counted == 4 * (4 + 6) * 4 * 8


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_profilers_see_a_range_with_the_name_of_the_backend() -> None:
    with torch.no_grad(), torch.profiler.profile() as profile:
        fast_attn_func(Q[0], K[0], V[0], backend="sdpa")
    assert "fastattention::sdpa" in [event.key for event in profile.key_averages()]
