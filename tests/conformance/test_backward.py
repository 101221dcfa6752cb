"""Our backwards: their bits, the tensors that they keep, and chunks that wait for each other."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from conformance.engines import Engine
from conformance.gradients import every_backward
from fastattention import fast_attn_func, fast_attn_varlen_func, merge_attn_states, set_num_threads
from fastattention.attention.backend import ATTENTION_BACKENDS

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 0.06}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def gradients_of(out: Tensor, sources: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad(out, sources, weights.to(out.dtype))


def assert_near(got: tuple[Tensor, ...], right: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    for ours, exact in zip(got, right, strict=True):
        error = float((ours.double() - exact.double()).abs().max())
        assert error <= TOLERANCES[dtype] * max(1.0, float(exact.abs().max()))


KEPT = torch.rand(1, 1, 15, 18, generator=torch.Generator().manual_seed(0)) < 0.25
# One head whose chunks of keys wait for each other; a window and a block mask, which skip chunks; groups; a batch of
# several waves.
CALLS = {
    "one-head": ((1, 1000, 1, 64), (1, 1000, 1, 64), {"causal": True}),
    "window": ((1, 900, 2, 32), (1, 1100, 2, 32), {"window_size": (150, 20)}),
    "blocks": ((1, 900, 1, 32), (1, 1100, 1, 32), {"block_mask": KEPT, "block_size": 64}),
    "few-keys": ((1, 700, 4, 40), (1, 70, 1, 40), {}),
    "waves": ((96, 3, 2, 64), (96, 5, 2, 64), {"causal": True}),
    "wide": ((1, 130, 1, 256), (1, 300, 1, 256), {"softcap": 3.0}),
}
every_call = pytest.mark.parametrize("name", CALLS)


@every_call
@every_dtype
@every_backward
def test_gradients_are_those_of_torch_with_any_number_of_threads(engine: Engine, dtype: torch.dtype, name: str) -> None:
    q_shape, k_shape, options = CALLS[name]
    sources = tensors(q_shape, k_shape, k_shape, dtype=dtype)
    found = []
    with engine.active():
        for num_threads in (1, 2, 5):
            set_num_threads(num_threads)
            try:
                found.append(gradients_of(fast_attn_func(*sources, backend=engine.backend, **options), sources))
            finally:
                set_num_threads(None)
    assert all(torch.equal(one, other) for others in found[1:] for one, other in zip(found[0], others, strict=True))
    exact = [tensor.detach().double().float().requires_grad_() for tensor in sources]
    assert_near(found[0], gradients_of(fast_attn_func(*exact, backend="sdpa", **options), exact), dtype)


@every_backward
def test_the_gradient_of_a_sink_is_the_sum_over_all_rows(engine: Engine) -> None:
    *sources, sinks = tensors((2, 300, 4, 32), (2, 200, 2, 32), (2, 200, 2, 32), (4,))
    with engine.active():
        ours = gradients_of(fast_attn_func(*sources, sinks=sinks, causal=True, backend=engine.backend), [sinks])
    right = gradients_of(fast_attn_func(*sources, sinks=sinks, causal=True, backend="sdpa"), [sinks])
    assert_near(ours, right, torch.float32)


@every_backward
def test_memory_that_another_call_left_is_not_read(engine: Engine) -> None:
    sources = tensors((1, 200, 2, 64), (1, 300, 2, 64), (1, 300, 2, 64))
    poison = [tensor.detach().mul(torch.nan).requires_grad_() for tensor in sources]
    with engine.active():
        first = gradients_of(fast_attn_func(*sources, causal=True, backend=engine.backend), sources)
        assert all(grad.isnan().any() for grad in gradients_of(fast_attn_func(*poison, backend=engine.backend), poison))
        again = gradients_of(fast_attn_func(*sources, causal=True, backend=engine.backend), sources)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@every_backward
@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -1e9])
def test_rows_that_a_finite_mask_hides_have_the_gradients_of_equal_weights(engine: Engine, lowest: float) -> None:
    """The lse of such rows does not tell the number of keys."""
    q, k, v = tensors((1, 3, 1, 16), (1, 40, 1, 16), (1, 40, 1, 16))
    mask = torch.zeros(3, 40)
    mask[1] = lowest
    with engine.active():
        out = fast_attn_func(q, k, v, attn_bias=mask, backend=engine.backend)
        grad_v = torch.autograd.grad(out[0, 1].sum(), v)[0]
    torch.testing.assert_close(grad_v, torch.full_like(v, 1 / 40))


@every_backward
def test_a_finite_mask_hides_rows_of_kept_blocks_alone(engine: Engine) -> None:
    q, k, v = tensors((1, 3, 1, 16), (1, 200, 1, 16), (1, 200, 1, 16))
    lowest = torch.full((3, 200), torch.finfo(torch.float32).min)
    kept = torch.tensor([True, False, True, True]).view(1, 1, 1, 4)
    with engine.active():
        out = fast_attn_func(q, k, v, attn_bias=lowest, block_mask=kept, block_size=64, backend=engine.backend)
        grad_v = torch.autograd.grad(out[0, 1].sum(), v)[0]
    expected = torch.full_like(v, 1 / (200 - 64))
    expected[:, 64:128] = 0.0
    torch.testing.assert_close(grad_v, expected)


def test_nothing_of_the_size_of_the_scores_is_kept() -> None:
    q, k, v = tensors((1, 500, 2, 32), (1, 600, 2, 32), (1, 600, 2, 32))
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fast_attn_func(q, k, v, backend="cpu")
    assert sorted(kept) == sorted([(1, 500, 2, 32), (1, 600, 2, 32), (1, 600, 2, 32), (1, 500, 2, 32), (1, 2, 500)])


def test_tensors_of_a_graph_that_is_gone_are_freed() -> None:
    q, k, v = tensors((1, 5, 1, 8), (1, 5, 1, 8), (1, 5, 1, 8))
    copy = q * 1.0
    watched = weakref.ref(copy)
    out = fast_attn_func(copy, k, v, backend="cpu")
    del copy
    assert watched() is not None
    del out
    assert watched() is None


def test_a_changed_input_is_an_error() -> None:
    q, k, v = tensors((1, 5, 1, 8), (1, 5, 1, 8), (1, 5, 1, 8))
    keys = k * 1.0
    out = fast_attn_func(q, keys, v, backend="cpu")
    with torch.no_grad():
        keys.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_gradient_that_is_expanded_or_missing_is_served() -> None:
    q, k, v = tensors((1, 50, 2, 16), (1, 60, 2, 16), (1, 60, 2, 16))
    out, lse = fast_attn_func(q, k, v, return_lse=True, backend="cpu")
    by_sum = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)  # of strides 0
    by_ones = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(by_sum, by_ones, strict=True))
    by_lse = torch.autograd.grad(lse.sum(), (q, k, v), allow_unused=True, materialize_grads=True)
    assert not by_lse[2].any()
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.25
    right = torch.autograd.grad(scores.logsumexp(-1).sum(), (q, k))
    torch.testing.assert_close(by_lse[:2], right)


def test_merged_parts_have_the_gradients_of_the_whole() -> None:
    q, k, v = tensors((2, 40, 4, 16), (2, 90, 2, 16), (2, 90, 2, 16))
    parts = [fast_attn_func(q, k[:, cut], v[:, cut], return_lse=True) for cut in (slice(0, 33), slice(33, None))]
    outs, lses = zip(*parts, strict=True)
    merged = gradients_of(merge_attn_states(outs, lses)[0], [q, k, v])
    assert_near(merged, gradients_of(fast_attn_func(q, k, v), [q, k, v]), torch.float32)


def test_checkpointing_and_autocast_change_no_bit() -> None:
    q, k, v = tensors((1, 70, 2, 32), (1, 70, 2, 32), (1, 70, 2, 32))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = fast_attn_func(q, k, v, 0.2, causal=True)
        return out

    torch.manual_seed(3)
    plain = gradients_of(attention(q, k, v), [q, k, v])
    torch.manual_seed(3)
    again = gradients_of(checkpoint(attention, q, k, v, use_reentrant=False), [q, k, v])
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = gradients_of(attention(q, k, v), [q, k, v])
    for others in (again, under_autocast):
        assert all(torch.equal(one, other) for one, other in zip(plain, others, strict=True))


def test_empty_sequences_have_gradients_of_nothing() -> None:
    q, k, v = tensors((6, 2, 16), (9, 2, 16), (9, 2, 16))
    offsets_q, offsets_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 0, 4, 6], [0, 3, 9, 9]))
    out = fast_attn_varlen_func(q, k, v, offsets_q, offsets_k, backend="cpu")
    grad_q, grad_k, grad_v = gradients_of(out, [q, k, v])
    assert grad_q[:4].any()
    assert not grad_q[4:].any()  # their sequence has no keys
    for grad in (grad_k, grad_v):
        assert not grad[:3].any()  # no queries
        assert grad[3:].any()


def test_only_backends_with_a_backward_say_so() -> None:
    assert ATTENTION_BACKENDS.get("cpu").has_backward
    with pytest.raises(NotImplementedError, match="sdpa has no backward"):
        ATTENTION_BACKENDS.get("sdpa").backward(None, None, None, None)  # type: ignore[arg-type]
