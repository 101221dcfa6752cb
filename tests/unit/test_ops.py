"""The operators that replace a call while it is traced, under torch's own checks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tiers import sampled
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import fastattention
from fastattention import ArgumentError, UnsupportedError, fast_attn_func, fast_attn_with_kvcache
from unit.functions import FunctionCall, every_call
from unit.samples import int32

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def scalars(**changes: Any) -> tuple[Any, ...]:
    """The arguments of `fastattention::attention` after dropout_seed, in order."""
    values = {
        "block_mask": None, "tile_index": None, "tile_bits": None, "k_scale": None, "v_scale": None,
        "max_seqlen_q": None, "max_seqlen_k": None, "softmax_scale": None, "causal": False,
        "window_left": -1, "window_right": -1, "softcap": 0.0, "dropout_p": 0.0, "deterministic": False, "block_m": 0,
        "block_n": 0, "qk_dtype": None, "return_lse": False, "backend": "sdpa",
    }  # fmt: skip
    return tuple((values | changes).values())


def attention_samples() -> dict[str, tuple[Any, ...]]:
    """Arguments of `fastattention::attention`."""
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 16)
    varlen = (q[0], k[0], v[0], int32(0, 2, 5), int32(0, 7, 7))
    pages = (torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2, 8), int32([0, 2], [1, 0]))
    per_head = (torch.rand(4), torch.randn(2, 1, 5, 7), torch.randn(4))

    def grads(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.clone().requires_grad_() for x in tensors)

    none = (None,) * 3
    return {
        "dense": (q, k, v, *none, *none, None, *scalars()),
        "dense_everything": (
            q, k, v, *none, *per_head, None,
            *scalars(causal=True, window_left=4, softcap=3.0, softmax_scale=0.3, return_lse=True),
        ),
        "blocks": (
            *grads(q, k, v), *none, *none, None,
            *scalars(block_mask=torch.ones(1, 4, 1, 1) > 0, block_m=64, block_n=128),
        ),
        "dense_strided": (
            q[:, ::2], k.transpose(1, 2).contiguous().transpose(1, 2), v[..., ::2], *none, *none, None, *scalars(),
        ),
        "gradients": (*grads(q, k, v), *none, *none, None, *scalars(causal=True)),
        "some_gradients": (q, *grads(k), v, *none, None, *grads(per_head[1]), None, None, *scalars(return_lse=True)),
        "gradients_everything": (
            *grads(q, k, v), *none, *grads(*per_head), torch.tensor(3),
            *scalars(causal=True, softcap=3.0, dropout_p=0.2, deterministic=True, return_lse=True),
        ),
        "varlen": (*varlen, None, *none, None, *scalars(max_seqlen_q=3, max_seqlen_k=7)),
        "varlen_gradients": (
            *grads(*varlen[:3]), *varlen[3:], None, *none, None, *scalars(causal=True, return_lse=True),
        ),
        "paged": (q[0], *pages[:2], int32(0, 2, 5), int32(0, 7, 8), pages[2], *none, None, *scalars()),
        "paged_gradients": (
            *grads(q[0], *pages[:2]), int32(0, 2, 5), int32(0, 7, 8), pages[2], *none, None, *scalars(return_lse=True),
        ),
    }  # fmt: skip


def kvcache_samples() -> dict[str, tuple[Any, ...]]:
    """Arguments of `fastattention::attention_kvcache`."""
    q, new = torch.randn(2, 2, 4, 8), torch.randn(2, 2, 2, 8)
    dense, pages = torch.randn(3, 8, 2, 8), torch.randn(5, 4, 2, 8)
    tables = (torch.randn(8, 2), torch.randn(8, 2))
    lengths = int32(3, 5)
    tail = (None, True, -1, -1, 0.0, False, True, 0, "sdpa")
    tail_with_lse = (0.4, False, 3, 0, 2.0, True, False, 2, "sdpa")
    none, nothing = (None,) * 3, (None,) * 5
    stored = torch.randint(-127, 128, (3, 8, 2, 8), dtype=torch.int8)
    scales = (torch.rand(3, 8, 2), torch.rand(3, 8, 2))
    return {
        "read": (q, dense[:2], dense[:2].clone(), None, None, None, None, lengths, None, None, None, *nothing, *tail),
        "full": (q, dense[:2], dense[:2].clone(), *none, None, None, None, None, None, *nothing, *tail),
        "append": (
            q, dense, dense.clone(), new, new, *tables, lengths, int32(2, 0), int32(1, 0), None, *nothing, *tail,
        ),
        "append_paged": (
            q, pages, pages.clone(), new, new, *tables, lengths, None, int32(1, 0), int32([0, 4], [1, 2]),
            torch.rand(4), torch.randn(2, 8), torch.randn(4), None, None, *tail_with_lse,
        ),
        "read_int8": (
            q, stored, stored.clone(), None, None, None, None, lengths, int32(2, 0), None, None, *none, *scales, *tail,
        ),
        "append_int8": (
            q, stored, stored.clone(), new, new, *tables, lengths, int32(2, 0), int32(1, 0), None, *none, *scales,
            *tail,
        ),
        "append_float8": (
            q, *(torch.randn(3, 8, 2, 8).to(torch.float8_e4m3fn) for _ in range(2)), new, new, None, None, lengths,
            int32(2, 0), None, None, *none, *scales, *tail,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("sample", list(attention_samples()))
def test_attention_passes_opcheck(sample: str) -> None:
    torch.library.opcheck(torch.ops.fastattention.attention, attention_samples()[sample])


@pytest.mark.parametrize(("block_m", "block_n"), [(0, 64), (32, 64), (64, 48), (-64, 64), (64, 2**25)])
def test_the_operator_refuses_sizes_of_blocks_that_no_function_gives(block_m: int, block_n: int) -> None:
    q, mask = torch.randn(1, 5, 2, 8), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    arguments = scalars(block_mask=mask, block_m=block_m, block_n=block_n)
    with pytest.raises(ArgumentError, match=f"block_m={block_m} and block_n={block_n}"):
        torch.ops.fastattention.attention(q, q, q, *(None,) * 7, *arguments)


@pytest.mark.parametrize("sample", list(kvcache_samples()))
def test_attention_kvcache_passes_opcheck(sample: str) -> None:
    # torch's check of schemas multiplies arguments, which it cannot do with float8. The schema is that of int8.
    tests = [test for test in OPCHECKS if not (sample.endswith("float8") and test == "test_schema")]
    torch.library.opcheck(torch.ops.fastattention.attention_kvcache, kvcache_samples()[sample], test_utils=tests)


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
def test_attention_backward_passes_opcheck(with_lse: bool, is_saved: bool, backend: str) -> None:
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    out, lse = fast_attn_func(q, k, v, return_lse=True) if is_saved else (None, None)
    grad_lse = torch.randn(2, 4, 5) if with_lse else None
    arguments = (torch.randn_like(q), grad_lse, q, k, v, *(None,) * 12, out, lse, *scalars()[5:-2], "q v", backend)
    torch.library.opcheck(torch.ops.fastattention.attention_backward, arguments)


@every_call
def test_fake_and_meta_results_look_like_real_ones(call: FunctionCall) -> None:
    real = call.run(call.tensors())
    mode = FakeTensorMode()
    with mode:
        fake = call.run({name: mode.from_tensor(x) for name, x in call.tensors().items()})
    meta = call.run({name: x.to("meta") for name, x in call.tensors().items()})
    assert all(x.is_meta for x in meta)
    for results in (fake, meta):
        assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in real]
    assert all(x.is_contiguous() for x in (*fake, *real))


@sampled
@every_call
@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_a_traced_graph_is_one_operator_and_computes_the_same(call: FunctionCall, tracing_mode: str) -> None:
    names = list(call.tensors())
    graph = make_fx(lambda *tensors: call.run(dict(zip(names, tensors, strict=True))), tracing_mode=tracing_mode)(
        *call.tensors().values()
    )
    targets = [str(node.target) for node in graph.graph.nodes if "fastattention" in str(node.target)]
    assert len(targets) == 1
    written, expected_written = call.tensors(), call.tensors()
    for got, expected in zip(graph(*written.values()), call.run(expected_written), strict=True):
        assert torch.equal(got, expected)
    for name, x in written.items():
        assert torch.equal(x, expected_written[name])


class OtherTensor(torch.Tensor):
    """A subclass without a behaviour of its own."""


def test_a_tensor_subclass_is_served_through_the_operator() -> None:
    q = torch.randn(1, 3, 2, 8)
    out = fast_attn_func(q.as_subclass(OtherTensor), q, q, backend="sdpa")
    assert torch.equal(torch.as_tensor(out), fast_attn_func(q, q, q, backend="sdpa"))
    k = torch.randn(1, 3, 2, 4)
    with pytest.raises(ArgumentError, match="k has headdim 4 and q has 8"):
        fast_attn_func(q.as_subclass(OtherTensor), k, k, backend="sdpa")


@pytest.mark.parametrize("shape", [(7,), (5, 1), (4, 5, 7), (1, 4, 5, 7), (2, 1, 1, 7), (2, 4, 5, 7)], ids=str)
@pytest.mark.parametrize("per_sequence", [False, True])
def test_traced_gradients_of_what_broadcasts_have_its_shape(shape: tuple[int, ...], per_sequence: bool) -> None:
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    slopes = torch.rand((2, 4) if per_sequence else (4,), requires_grad=True)
    given = (torch.randn(shape, requires_grad=True), slopes, torch.randn(4, requires_grad=True))

    def gradients() -> tuple[Tensor, ...]:
        bias, slopes, sinks = given
        out = fast_attn_func(q, k, v, causal=True, attn_bias=bias, alibi_slopes=slopes, sinks=sinks)
        return torch.autograd.grad(out.square().sum(), given)

    expected = gradients()
    with FlopCounterMode(display=False):  # as under torch.compile, the call is an operator of torch
        got = gradients()
    torch.testing.assert_close(got, expected)
    names = "alibi_slopes attn_bias sinks"
    tensors = (q, k, v, None, None, None, slopes, given[0], given[2], None, *scalars()[:5], None, None)
    arguments = [x.detach() if isinstance(x, Tensor) else x for x in tensors]
    arguments = [torch.randn_like(q), None, *arguments, *scalars()[5:-2], names, "auto"]
    torch.library.opcheck(torch.ops.fastattention.attention_backward, arguments, test_utils="test_faketensor")


def test_gradients_through_the_operator_under_a_dispatch_mode() -> None:
    q = torch.randn(1, 3, 2, 8, requires_grad=True)
    expected = torch.autograd.grad(fast_attn_func(q, q, q, causal=True).sin().sum(), q)
    with FlopCounterMode(display=False):
        got = torch.autograd.grad(fast_attn_func(q, q, q, causal=True).sin().sum(), q)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("backend", [["sdpa"], None, "abacus"], ids=str)
def test_a_backend_that_is_none_is_refused_before_the_operator_runs(backend: Any) -> None:
    with FakeTensorMode():
        q, cache = torch.empty(1, 3, 2, 8), torch.empty(1, 8, 2, 8)
        for call in (
            lambda: fast_attn_func(q, q, q, backend=backend),
            lambda: fast_attn_with_kvcache(q, cache, cache.clone(), backend=backend),
        ):
            with pytest.raises(ArgumentError, match=re.escape(f"backend={backend!r} is not known; choose 'auto'")):
                call()


def test_gradients_through_a_cache_are_refused() -> None:
    q = torch.randn(1, 3, 2, 8).as_subclass(OtherTensor).requires_grad_()
    cache = torch.randn(1, 8, 2, 8)
    with pytest.raises(UnsupportedError, match="has no backward and an argument requires a gradient"):
        fast_attn_with_kvcache(q, cache, cache.clone(), backend="sdpa")


def test_the_dropout_mask_cannot_be_traced_but_lse_can() -> None:
    q = torch.randn(1, 3, 2, 8).as_subclass(OtherTensor)
    with pytest.raises(UnsupportedError, match=r"return_attn_probs with dropout_p=0.5.*return_lse"):
        fast_attn_func(q, q, q, dropout_p=0.5, return_attn_probs=True, backend="sdpa")
    out, lse = fast_attn_func(q, q, q, dropout_p=0.5, return_lse=True, backend="sdpa")
    assert out.shape == (1, 3, 2, 8)
    assert lse.shape == (1, 2, 3)


def test_explain_says_that_it_cannot_explain_what_is_traced() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 3, 2, 8)
        with pytest.raises(ArgumentError, match="fake"):
            fastattention.explain(q, q, q)


def test_a_call_on_the_meta_device_is_checked() -> None:
    q = torch.empty(2, 5, 4, 8, device="meta")
    with pytest.raises(ArgumentError, match="k has headdim 16"):
        fast_attn_func(q, torch.empty(2, 7, 2, 16, device="meta"), torch.empty(2, 7, 2, 16, device="meta"))
    with pytest.raises(ArgumentError, match="k is on cpu"):
        fast_attn_func(q, torch.empty(2, 7, 2, 8), torch.empty(2, 7, 2, 8))


def test_a_backward_that_needs_what_an_append_has_overwritten_is_an_error() -> None:
    weight = torch.randn(8, requires_grad=True)
    q, cache = torch.randn(1, 1, 2, 8), torch.randn(1, 8, 2, 8)
    product = (cache * weight).sum()
    with torch.no_grad():
        fast_attn_with_kvcache(q, cache, cache.clone(), q, q, cache_seqlens=3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_caches_that_were_made_in_inference_mode_are_appended_to_anywhere() -> None:
    with torch.inference_mode():
        caches = [torch.zeros(1, 8, 2, 8) for _ in range(2)]
    q = torch.randn(1, 1, 2, 8)
    with torch.no_grad():
        fast_attn_with_kvcache(q, *caches, q, q, cache_seqlens=3)
    assert torch.equal(caches[0][:, 3:4], q)
