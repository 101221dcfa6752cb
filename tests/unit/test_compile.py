"""Every public function under torch.compile: one graph, the same values, the same gradients."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiers import deep
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend

from fastattention import (
    ArgumentError,
    fast_attn_func,
    fast_attn_varlen_func,
    fast_attn_with_kvcache,
    merge_attn_states,
)
from fastattention.attention.reference import reference_attention
from fastattention.attention.validation import Options, prepare_dense
from fastattention.backends.cpu.attention.backend import CpuBackend
from unit.functions import CALLS, FunctionCall, every_call

needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None, reason="inductor needs a C++ compiler, and there is no c++"
)
DIFFERENTIABLE = [call for call in CALLS if call.differentiable]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`function` as one graph, run without a C++ compiler."""
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@every_call
def test_compiled_is_eager_bit_for_bit(call: FunctionCall) -> None:
    tensors, expected_tensors = call.tensors(), call.tensors()
    with torch.no_grad():
        assert_same(compiled(call.run)(tensors), call.run(expected_tensors))
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected_tensors[name])


@pytest.mark.parametrize("call", DIFFERENTIABLE, ids=[call.name for call in DIFFERENTIABLE])
def test_compiled_gradients_are_eager_ones(call: FunctionCall) -> None:
    def gradients(run: Callable[..., tuple[Tensor, ...]]) -> dict[str, Tensor]:
        tensors = {name: x.requires_grad_(x.is_floating_point()) for name, x in call.tensors().items()}
        loss = sum((x * torch.arange(x.numel()).view(x.shape).sin()).sum() for x in run(tensors))
        assert isinstance(loss, Tensor)
        loss.backward()
        return {name: x.grad for name, x in tensors.items() if x.grad is not None}

    got, expected = gradients(compiled(call.run)), gradients(call.run)
    assert set(got) == set(expected) == set(call.shapes) - set(call.bools)
    for name, gradient in expected.items():
        assert gradient.any()
        torch.testing.assert_close(got[name], gradient)


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_compiled_gradients_come_from_the_backend_that_served_the_call(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = []

    def watched(self: CpuBackend, *arguments: Any) -> dict[str, Tensor]:
        served.append(self.name)
        return backward(self, *arguments)

    backward = CpuBackend.backward
    monkeypatch.setattr(CpuBackend, "backward", watched)
    q = torch.randn(2, 5, 4, 8, requires_grad=True)
    compiled(lambda q: fast_attn_func(q, q, q, backend=backend))(q).sum().backward()
    assert served == (["cpu"] if backend == "auto" else [])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch reads it
@pytest.mark.skipif(not hasattr(compiled_autograd, "_enable"), reason="this torch enables compiled autograd otherwise")
def test_compiled_autograd_gives_the_same_gradients() -> None:
    q = torch.randn(2, 5, 4, 8, requires_grad=True)
    right = torch.autograd.grad(fast_attn_func(q, q, q, causal=True).square().sum(), q)[0]
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="aot_eager", fullgraph=True)):
        fast_attn_func(q, q, q, causal=True).square().sum().backward()
    assert torch.equal(q.grad, right)


@deep
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own warnings
@needs_compiler
def test_inductor_gives_the_same() -> None:
    weights = torch.randn(2, 5, 4, 8)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = fast_attn_func(q * 2.0, k + 1.0, v, causal=True)
        return (out * weights).sum()

    qkv = [torch.randn(2, 5, 4, 8, requires_grad=True) for _ in range(3)]
    loss = torch.compile(block, fullgraph=True)(*qkv)
    torch.testing.assert_close(loss, block(*qkv))
    got, expected = torch.autograd.grad(loss, qkv), torch.autograd.grad(block(*qkv), qkv)
    torch.testing.assert_close(got, expected)


def test_a_merge_is_part_of_a_graph() -> None:
    """Its backward is part of a graph too."""
    outs, lses = torch.randn(3, 2, 5, 4, 8).requires_grad_(), torch.randn(3, 2, 4, 5).requires_grad_()

    def merged(function: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        out, lse = function(outs, lses)
        return out, lse, *torch.autograd.grad((out.sin().sum() + lse.sin().sum()), (outs, lses))

    assert_same(merged(compiled(merge_attn_states)), merged(merge_attn_states))


def dense_of(seqlen_q: int, seqlen_k: int) -> tuple[Any, ...]:
    k = torch.randn(2, seqlen_k, 2, 8)
    return torch.randn(2, seqlen_q, 4, 8), k, k


def varlen_of(*lengths: int) -> tuple[Any, ...]:
    cu_seqlens, q = torch.tensor([0, *lengths]).cumsum(0).int(), torch.randn(sum(lengths), 4, 8)
    return q, q, q, cu_seqlens, cu_seqlens, max(lengths), max(lengths)


@pytest.mark.parametrize(
    ("function", "arguments", "lengths"),
    [
        (fast_attn_func, dense_of, [(3, 7), (5, 11), (9, 6)]),
        (fast_attn_varlen_func, varlen_of, [(2, 3), (4, 1), (2, 9)]),
    ],
    ids=["dense", "varlen"],
)
def test_one_graph_serves_all_lengths(
    function: Callable[..., Any], arguments: Callable[..., tuple[Any, ...]], lengths: list[tuple[int, int]]
) -> None:
    graphs = CompileCounterWithBackend("aot_eager")
    of_any_length = torch.compile(function, fullgraph=True, backend=graphs, dynamic=True)
    counts = []
    for pair in lengths:
        given = arguments(*pair)
        assert torch.equal(of_any_length(*given, causal=True), function(*given, causal=True))
        counts.append(graphs.frame_count)
    assert counts == [counts[0]] * 3


def test_a_decoding_loop_is_one_graph_and_fills_the_cache() -> None:
    graphs = CompileCounterWithBackend("aot_eager")
    step = torch.compile(fast_attn_with_kvcache, fullgraph=True, backend=graphs)
    caches = [torch.zeros(2, 8, 2, 8) for _ in range(4)]
    with torch.no_grad():
        for position in range(4):
            q, k, v = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8)
            lengths = torch.tensor([position, position + 2], dtype=torch.int32)
            got = step(q, *caches[:2], k, v, cache_seqlens=lengths, causal=True)
            assert torch.equal(got, fast_attn_with_kvcache(q, *caches[2:], k, v, cache_seqlens=lengths, causal=True))
    assert graphs.frame_count == 1
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])
    assert caches[0][1, 2:6].all()
    assert not caches[0][1, 6:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compiled_gradients_are_as_good_as_those_of_plain_torch(dtype: torch.dtype) -> None:
    """The error is at most three times that of the reference in the same precision, and half a unit of rounding.

    Gradients of slopes and sinks are sums over the scores of a head: with as many further roundings, up and down by
    chance.
    """
    q, k, v = torch.randn(2, 33, 4, 32), torch.randn(2, 47, 2, 32), torch.randn(2, 47, 2, 32)
    sinks, slopes, bias = torch.randn(4), torch.rand(4), torch.randn(33, 47)
    grad_out, grad_lse = torch.randn(2, 33, 4, 32), torch.randn(2, 4, 33)
    options = Options(causal=True, softcap=5.0, return_lse=True)
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)] + [x.requires_grad_() for x in (slopes, bias, sinks)]

    def gradients(run: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        out, lse = run(*leaves)
        outputs = [out, lse]
        weights = [grad_out.to(out.dtype), grad_lse.to(lse.dtype)]
        return [gradient.double() for gradient in torch.autograd.grad(outputs, leaves, weights)]

    def named(scores: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return dict(zip(("alibi_slopes", "attn_bias", "sinks"), scores, strict=True))

    def reference(compute_dtype: torch.dtype | None) -> list[Tensor]:
        return gradients(
            lambda q, k, v, *scores: reference_attention(
                *prepare_dense(q, k, v, options, **named(scores)), compute_dtype
            )[:2]
        )

    def run_compiled(q: Tensor, k: Tensor, v: Tensor, *scores: Tensor) -> Any:
        return compiled(fast_attn_func)(q, k, v, causal=True, softcap=5.0, return_lse=True, **named(scores))

    exact, plain, got = reference(torch.float64), reference(None), gradients(run_compiled)
    for name, true, torch_s, ours in zip(("q", "k", "v", "alibi", "bias", "sinks"), exact, plain, got, strict=True):
        by_chance = {"alibi": 2 * 33 * 47, "sinks": 2 * 33}.get(name, 0) ** 0.5
        units = torch.finfo(dtype).eps + by_chance * torch.finfo(torch.float32).eps
        floor = 0.5 * units * float(true.abs().max())
        assert float((ours - true).abs().max()) <= 3 * float((torch_s - true).abs().max()) + floor, name


def test_dropout_draws_a_new_mask_each_time_and_repeats_with_torch_s_seed() -> None:
    q = torch.randn(1, 9, 2, 8)
    function = compiled(lambda q: fast_attn_func(q, q, q, dropout_p=0.5))
    torch.manual_seed(3)
    first, second = function(q), function(q)
    torch.manual_seed(3)
    assert torch.equal(function(q), first)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(fast_attn_func(q, q, q, dropout_p=0.5), first)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own warnings
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_backward_drops_what_forward_dropped(compiler: str) -> None:
    """With one-hot values, out equals the dropped weights, and the gradient of v is their transpose."""
    q, k = torch.randn(1, 6, 1, 8), torch.randn(1, 8, 1, 8)
    v = torch.eye(8)[None, :, None].requires_grad_()
    function = torch.compile(lambda q, k, v: fast_attn_func(q, k, v, dropout_p=0.5), fullgraph=True, backend=compiler)
    out = function(q, k, v)
    weights = out[0, :, 0]  # (seqlen_q, seqlen_k)
    assert 0 < int((weights == 0).sum()) < weights.numel()
    grad_out = torch.randn_like(out)
    (grad_v,) = torch.autograd.grad(out, v, grad_out)
    torch.testing.assert_close(grad_v[0, :, 0], weights.detach().T @ grad_out[0, :, 0])


def test_a_compiled_function_can_be_differentiated_for_some_inputs_only() -> None:
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    k.requires_grad_()
    got = torch.autograd.grad(compiled(fast_attn_func)(q, k, v).sin().sum(), k)
    torch.testing.assert_close(got, torch.autograd.grad(fast_attn_func(q, k, v).sin().sum(), k))


@pytest.mark.parametrize(
    "changes", [{"softmax_scale": 1}, {"softcap": 3}, {"window_size": [2, 1]}], ids=lambda x: str(*x)
)
def test_integers_and_lists_are_read_in_the_graph_too(changes: dict[str, Any]) -> None:
    q = torch.randn(1, 9, 2, 8)
    assert torch.equal(compiled(fast_attn_func)(q, q, q, **changes), fast_attn_func(q, q, q, **changes))


def test_a_wrong_shape_is_refused_as_in_eager() -> None:
    q, k = torch.randn(1, 9, 3, 8), torch.randn(1, 9, 2, 8)
    with pytest.raises(ArgumentError, match="nheads=3 of q must be a positive multiple of nheads_k=2"):
        compiled(fast_attn_func)(q, k, k)
