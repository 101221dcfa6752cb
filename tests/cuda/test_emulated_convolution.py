"""The kernels of the causal convolution, emulated: results, gradients, updates, alignment, and the order of CTAs."""

from __future__ import annotations

from dataclasses import replace

import emulator
import pytest
import torch
from convolution.cases import CASES, UPDATES
from convolution.check import check_backward, check_forward, check_large_values, check_update
from emulated_convolution import EmulatedConvolution
from tiers import covering, tier_of
from torch import Tensor

from fastattention.backends.cuda.convolution.config import DTYPES, convolution_variants
from fastattention.backends.cuda.convolution.heuristics import divide
from fastattention.convolution.validation import prepare
from fastattention.testing.convolution import ConvolutionCase, weights_of_results
from fastattention.testing.memory import guarded

# A CTA has four warps where they keep all multiprocessors busy, else one. Ranges of tokens are short on many.
SMS = {"wide": 0, "narrow": 1000}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A kernel takes a second to compile, so the lists are sampled."""
    if {"case", "tiles", "dtype"} <= set(metafunc.fixturenames):
        cases = UPDATES if "axes" in metafunc.fixturenames else CASES
        runs = [(name, tiles, dtype) for name in cases for tiles in SMS for dtype in DTYPES]
        chosen = covering(
            tier_of(metafunc.config),
            runs,
            each=lambda run: run[0],
            parameters=lambda run: {"case": cases[run[0]], "tiles": run[1], "dtype": run[2]},
        )
        metafunc.parametrize(
            ("case", "tiles", "dtype"),
            [(cases[name], tiles, dtype) for name, tiles, dtype in chosen],
            ids=[f"{name}-{tiles}-{str(dtype).removeprefix('torch.')}" for name, tiles, dtype in chosen],
        )


def test_results_are_right(case: ConvolutionCase, tiles: str, dtype: torch.dtype) -> None:
    check_forward(EmulatedConvolution(SMS[tiles]), case, dtype)


def test_gradients_are_right(case: ConvolutionCase, tiles: str, dtype: torch.dtype) -> None:
    check_backward(EmulatedConvolution(SMS[tiles]), case, dtype)


@pytest.mark.parametrize("axes", ["", "channels", "gaps"], ids=["contiguous", "channels-last", "gaps"])
def test_updates_are_right(case: ConvolutionCase, tiles: str, dtype: torch.dtype, axes: str) -> None:
    check_update(EmulatedConvolution(SMS[tiles]), case, dtype, axes)


@pytest.mark.parametrize("silu", [True, False], ids=["silu", "linear"])
def test_large_values_saturate(silu: bool) -> None:
    check_large_values(EmulatedConvolution(1000), silu)


def gradients(backend: EmulatedConvolution, case: ConvolutionCase, offset: int = 0) -> list[Tensor]:
    """Results and gradients, of tensors `offset` elements away from alignment."""
    given = case.tensors(torch.float16)
    given = given._replace(x=guarded(given.x, offset))
    problem, inputs = prepare(given, case.options)
    problem = replace(problem, grads=("x", "weight", "bias", "initial_state"))
    output = backend.make_call(problem, inputs)(inputs)
    grads = weights_of_results(problem)
    assert grads.out is not None
    found = backend.backward(problem, inputs, output, grads._replace(out=guarded(grads.out, offset)))
    return [*output, *found.values()]


@pytest.mark.parametrize("channels", [64, 62], ids=["aligned-rows", "odd-rows"])
def test_memory_may_begin_anywhere(channels: int) -> None:
    case = ConvolutionCase(seqlen=19, channels=channels)
    wanted = gradients(EmulatedConvolution(1000), case)
    for offset in range(1, 4):
        found = gradients(EmulatedConvolution(1000), case, offset)
        assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


def test_results_do_not_depend_on_the_order_of_ctas_and_warps() -> None:
    case = ConvolutionCase(seqlens=(40, 0, 3, 64), channels=200)
    wanted = gradients(EmulatedConvolution(1000), case)
    for seed in (1, 2):
        with emulator.shuffled(seed):
            found = gradients(EmulatedConvolution(1000), case)
        assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


def test_nothing_is_launched_for_nothing() -> None:
    backend = EmulatedConvolution(1000)
    for case in (ConvolutionCase(batch_size=0), ConvolutionCase(seqlens=()), ConvolutionCase(channels=0)):
        out, *_ = gradients(backend, case)
        assert out.numel() == 0
    assert backend.launches == []


@pytest.mark.parametrize(
    ("case", "updates", "wanted"),
    [
        (ConvolutionCase(batch_size=8, seqlen=4096, channels=8192), False, (4, 256, 128, 16)),
        (ConvolutionCase(batch_size=1, seqlen=4096, channels=1024), False, (1, 16, 256, 8)),
        (ConvolutionCase(batch_size=4, seqlen=1, channels=8192), True, (1, 1, 4, 64)),
        (ConvolutionCase(batch_size=128, seqlen=1, channels=8192), True, (4, 1, 128, 16)),
        (ConvolutionCase(seqlens=(100, 0, 156), channels=17), False, (1, 16, 19, 1)),
    ],
    ids=["training", "prompt", "decode", "many", "varlen"],
)
def test_ranges_keep_multiprocessors_busy(
    case: ConvolutionCase, updates: bool, wanted: tuple[int, int, int, int]
) -> None:
    shape = replace(case, batch_size=1, seqlen=1, channels=1) if case.seqlens is None else case
    problem, _ = prepare(shape.tensors(torch.float16), case.options)
    if case.seqlens is None:
        sizes = {"batch_size": case.batch_size, "num_sequences": case.batch_size, "seqlen": case.seqlen}
        problem = replace(problem, channels=case.channels, updates=updates, **sizes)  # type: ignore[arg-type]
    division = divide(problem, num_sms=132)
    found = division.num_warps, division.range_tokens, division.num_ranges, division.channel_tiles
    assert found == wanted


def test_the_list_runs_every_kernel() -> None:
    problems = [(case, dtype) for case in CASES.values() for dtype in DTYPES]
    chosen = {
        (prepare(case.tensors(dtype), case.options)[0].width, dtype, divide(problem, num_sms).num_warps)
        for case, dtype in problems
        for problem in [prepare(case.tensors(dtype), case.options)[0]]
        for num_sms in SMS.values()
    }
    variants = {(one.width, one.dtype, one.num_warps) for one in convolution_variants()}  # type: ignore[attr-defined]
    assert chosen == variants
