"""Gradients by the CUDA kernels, which the emulator runs on the processor, with dropout too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from unittest import mock

import emulator
import pytest
import torch
from conformance.gradients import GRADIENT_CASES, check_gradients, in_order
from emulator import EmulatedCudaBackend, path_of
from test_emulated import EmulatedEngine, Run
from tiers import Tier, covering, slow, tier_of

from fastattention import fast_attn_func, fast_attn_varlen_func
from fastattention.attention.validation import lengths
from fastattention.backends.common.gradients import COMPUTED
from fastattention.backends.cuda.attention.backward import choose_backward_launches
from fastattention.backends.cuda.attention.config import BackwardConfig, DeltaConfig
from fastattention.backends.cuda.attention.variants import training_variants_of
from fastattention.gpu_runtime.variant import Variant
from fastattention.testing.calls import problem_of
from fastattention.testing.oracle import present

DTYPES = (torch.float16, torch.bfloat16)
RUNS = [
    *(Run(case, dtype, backend) for case in GRADIENT_CASES for dtype in DTYPES for backend in emulator.EMULATED),
    # From Turing on, kernels add in any order unless a call is deterministic.
    *(
        Run(in_order(case), dtype, backend)
        for case in GRADIENT_CASES
        for dtype in DTYPES
        for backend in emulator.EMULATED
        if backend.limits.arch >= 75
    ),
]

# Tiles of biases are copied in either direction. Sums of queries of several sequences lie side by side.
EVERY_TIME = (
    "bias-copied-float16-cuda-sm80",
    "bias-copied-in-order-float16-cuda-sm80",
    "bias-copied-one-row-bfloat16-cuda-sm80",
    "varlen-window-gqa-bfloat16-cuda-sm80",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "run" in metafunc.fixturenames:
        # A kernel takes a second to compile, so `all` takes every value and not every pair.
        tier = tier_of(metafunc.config)
        runs = covering(tier if tier is Tier.DEEP else Tier.QUICK, RUNS)
        runs += [run for run in RUNS if run.name in EVERY_TIME and run not in runs]
        metafunc.parametrize("run", runs, ids=[run.name for run in runs])


@slow
def test_error_of_gradients_is_at_most_twice_that_of_torch(run: Run) -> None:
    check_gradients(EmulatedEngine(run.backend.name), run.case, run.dtype)


@pytest.mark.parametrize("backend", emulator.EMULATED, ids=[backend.name for backend in emulator.EMULATED])
def test_the_list_runs_every_kernel(backend: type[EmulatedCudaBackend]) -> None:
    ran: set[Variant] = set()
    for run in RUNS:
        problem = problem_of(run.case, run.dtype)
        problem = replace(problem, grads=present(run.case, COMPUTED))
        if run.backend is backend and backend().why_not(problem) is None:
            launches = choose_backward_launches(problem, backend.limits.arch, backend.limits)
            ran |= {launches.delta.variant, *(step.config for step in launches.passes)}
    wanted = [one for one in training_variants_of(backend.limits) if isinstance(one, BackwardConfig | DeltaConfig)]
    paths = {path_of(one) for one in ran}
    assert [one.name for one in wanted if path_of(one) not in paths and not getattr(one, "drops", False)] == []

    def rules(variants: Iterable[Variant]) -> set[tuple[bool, ...]]:
        return {one.rules for one in variants if isinstance(one, BackwardConfig)}

    assert rules(wanted) <= rules(ran)


every_backend = pytest.mark.parametrize("backend", emulator.EMULATED, ids=[b.name for b in emulator.EMULATED])


@every_backend
@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -1e9])
def test_rows_that_a_finite_mask_hides_have_the_gradients_of_equal_weights(
    backend: type[EmulatedCudaBackend], lowest: float
) -> None:
    """The lse of such rows does not tell the number of keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 16, generator=generator).half().requires_grad_() for n in (3, 40, 40))
    mask = torch.zeros(3, 40)
    mask[1] = lowest
    engine = EmulatedEngine(backend.name)
    with engine.active():
        out = fast_attn_func(q, k, v, attn_bias=mask, backend=engine.backend)
        grad_v = torch.autograd.grad(out[0, 1].sum(), v)[0]
    torch.testing.assert_close(grad_v, torch.full_like(v, 1 / 40), atol=1e-4, rtol=0)


@every_backend
def test_a_finite_mask_hides_rows_of_kept_blocks_alone(backend: type[EmulatedCudaBackend]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 16, generator=generator).half().requires_grad_() for n in (3, 200, 200))
    lowest = torch.full((3, 200), torch.finfo(torch.float32).min)
    kept = torch.tensor([True, False, True, True]).view(1, 1, 1, 4)
    engine = EmulatedEngine(backend.name)
    with engine.active():
        out = fast_attn_func(q, k, v, attn_bias=lowest, block_mask=kept, block_size=64, backend=engine.backend)
        grad_v = torch.autograd.grad(out[0, 1].sum(), v)[0]
    expected = torch.full_like(v, 1 / (200 - 64))
    expected[:, 64:128] = 0.0
    torch.testing.assert_close(grad_v, expected, atol=1e-4, rtol=0)


@every_backend
@pytest.mark.parametrize("asked_of", ["the call", "torch"])
def test_deterministic_gradients_do_not_depend_on_the_order_of_ctas(
    backend: type[EmulatedCudaBackend], asked_of: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 300, 2, 64, generator=generator).half().requires_grad_() for _ in range(3))
    weights = torch.randn(q.shape, generator=generator).half()
    engine, found = EmulatedEngine(backend.name), []
    torch.use_deterministic_algorithms(asked_of == "torch")
    try:
        with engine.active():
            for seed in (0, 1, 2):
                with emulator.shuffled(seed):
                    out = fast_attn_func(q, k, v, deterministic=asked_of == "the call", backend=engine.backend)
                    found.append(torch.autograd.grad(out, (q, k, v), weights))
    finally:
        torch.use_deterministic_algorithms(False)
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


@every_backend
@pytest.mark.parametrize("of_out", [1.0, 1e-8, 0.0])
def test_gradients_of_bfloat16_neither_vanish_nor_overflow_in_float16(
    backend: type[EmulatedCudaBackend], of_out: float
) -> None:
    """Gradients are as small and as large as bfloat16 allows, from out and from lse, which may differ."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 20, 1, 32, generator=generator).bfloat16().requires_grad_() for _ in range(3))
    weights = torch.randn(q.shape, generator=generator).bfloat16() * of_out
    engine, found = EmulatedEngine(backend.name), []
    with engine.active():
        results = fast_attn_func(q, k, v, backend=engine.backend, return_lse=True)
        for unit in (1.0, 2.0**-40, 2.0**90):
            weighted = weights * unit, torch.full_like(results[1], unit)
            grads = torch.autograd.grad(results, (q, k, v), weighted, retain_graph=True)
            found.append([grad.double() / unit for grad in grads])
    assert all(grad.isfinite().all() for grad in found[0])
    assert found[0][0].any()
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


@every_backend
def test_a_sink_of_minus_infinity_has_no_gradient(backend: type[EmulatedCudaBackend]) -> None:
    """The batch also has rows without keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 32, generator=generator).half() for n in (5, 2, 2))
    sinks = torch.tensor([-torch.inf, 0.5], requires_grad=True)
    engine = EmulatedEngine(backend.name)
    with engine.active():
        out = fast_attn_func(q, k, v, sinks=sinks, causal=True, backend=engine.backend)
        (grad,) = torch.autograd.grad(out.float().square().sum(), sinks)
    assert grad[0] == 0
    assert grad[1].isfinite()
    assert grad[1] != 0


@every_backend
def test_tokens_behind_the_last_sequence_have_no_gradient(backend: type[EmulatedCudaBackend]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(50, 2, 32, generator=generator).half().requires_grad_() for _ in range(3))
    offsets = torch.tensor([0, 10, 10, 37], dtype=torch.int32)
    engine = EmulatedEngine(backend.name)
    unchecked = mock.patch.object(lengths, "are_checked", return_value=False)  # as on a GPU
    with engine.active(), unchecked:
        out = fast_attn_varlen_func(q, k, v, offsets, offsets, 27, 27, causal=True, backend=engine.backend)
        found = torch.autograd.grad(out.float().sum(), (q, k, v))
    for grad in found:
        assert not grad[37:].any()
        assert grad[:37].any()
