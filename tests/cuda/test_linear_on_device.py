"""Linear attention by CUDA kernels on the GPUs of this machine; skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.check import assert_small_errors
from linear.cases import CASES
from linear.check import as_in_float16, check
from torch import Tensor

from fastattention import UnsupportedError
from fastattention.backends.cuda.linear.step_config import DTYPES
from fastattention.gpu_runtime.chips import ARCHS
from fastattention.linear.backend import LINEAR_BACKENDS
from fastattention.linear.operator import LINEAR_ATTENTION
from fastattention.linear.problem import LinearInputs, LinearOutput
from fastattention.linear.validation import prepare
from fastattention.testing.linear import LinearCase, expected_gradients, linear_gradients, run_rule
from fastattention.testing.memory import nan_in_fresh_memory

if LINEAR_BACKENDS.get("cuda").why_unavailable() is not None:
    pytest.skip("needs a GPU", allow_module_level=True)


def target() -> int:
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    return 10 * major + minor


def moved(tensors: tuple[Tensor | None, ...], device: str) -> list[Any]:
    return [None if x is None else x.to(device) for x in tensors]


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch <= target()])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunked", [True, False], ids=["chunks", "tokens"])
@pytest.mark.parametrize("name", CASES)
def test_results_are_right_and_repeat(
    monkeypatch: pytest.MonkeyPatch, name: str, chunked: bool, dtype: torch.dtype, arch: int
) -> None:
    monkeypatch.setenv("FASTATTENTION_CUDA_ARCH", str(arch))
    case, backend = CASES[name], LINEAR_BACKENDS.get("cuda")
    problem, inputs = prepare(case.tensors(dtype, "cuda"), case.options(chunked))
    if (reason := backend.why_not(problem)) is not None:
        pytest.skip(reason)
    call = backend.make_call(problem, inputs)
    with nan_in_fresh_memory():
        result, again = call(inputs), call(inputs)
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(result, again, strict=True))
    on_cpu = case.tensors(dtype), case.options(chunked)
    check(*prepare(*on_cpu), LinearOutput(*moved(result, "cpu")))


@pytest.mark.parametrize("varlen", [False, True], ids=["batch", "varlen"])
@pytest.mark.parametrize("rule", ["delta", "head", "key", "kda", "ssd"])
def test_a_captured_decode_replays_with_new_numbers(rule: str, varlen: bool) -> None:
    """It also reads the state of the step before, as in models."""
    shape: dict[str, Any] = {"seqlens": (1, 1, 1)} if varlen else {"batch_size": 3}
    case = LinearCase(rule, seqlen=1, headdim_k=128, headdim_v=128, initial_state=True, **shape)
    inputs = case.tensors(torch.bfloat16, "cuda")
    state = inputs.initial_state
    assert state is not None
    run_rule(inputs, case.rule, False, "cuda")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, after = run_rule(inputs, case.rule, False, "cuda")
        state.copy_(after)
    expected_state = state.clone()
    for _ in range(5):
        for tensor in (inputs.q, inputs.k, inputs.v):
            tensor.normal_()
        expected, expected_state = run_rule(inputs._replace(initial_state=expected_state), case.rule, False, "cuda")
        graph.replay()
        assert torch.equal(out, expected)
        assert torch.equal(state, expected_state)


def test_work_is_in_order_with_the_current_stream() -> None:
    case = CASES["delta-one-token"]
    inputs = case.tensors(torch.float16, "cuda")
    expected = run_rule(inputs._replace(v=2 * inputs.v), case.rule, False, "cuda")[0] + 0  # loads all kernels
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        out, _ = run_rule(inputs._replace(v=2 * inputs.v), case.rule, False, "cuda")
        result = out + 0
        assert not stream.query()  # no call has waited
    stream.synchronize()
    assert torch.equal(result, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_of_one_process_agree() -> None:
    case = CASES["key-one-token"]
    results = [
        run_rule(case.tensors(torch.float16, f"cuda:{index}"), case.rule, False, "cuda")[0] for index in range(2)
    ]
    assert torch.equal(results[0].cpu(), results[1].cpu())


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch <= target()])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in CASES if name != "kda-headdim-1"])  # all of it is rounded off
def test_gradients_are_right_and_repeat(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, arch: int
) -> None:
    monkeypatch.setenv("FASTATTENTION_CUDA_ARCH", str(arch))
    case, given = CASES[name], CASES[name].tensors(dtype, "cuda")
    options = case.options(chunked=True)

    def call(inputs: LinearInputs) -> LinearOutput:
        return LinearOutput(*LINEAR_ATTENTION(inputs, options, "cuda"))

    with nan_in_fresh_memory():
        found, again = linear_gradients(call, given), linear_gradients(call, given)
    assert all(torch.equal(found[one], again[one]) for one in found)
    wanted = expected_gradients(*prepare(case.tensors(dtype), options))
    if arch < 80:
        wanted = as_in_float16(wanted)
    assert_small_errors(wanted, {one: x.cpu() for one, x in found.items()})


def test_gradients_of_float32_are_refused_with_a_reason() -> None:
    case = CASES["head-plain"]
    inputs = case.tensors(torch.float32, "cuda")
    with pytest.raises(UnsupportedError, match="gradients of float32 are not served"):
        run_rule(inputs._replace(q=inputs.q.requires_grad_()), case.rule, False, "cuda")
