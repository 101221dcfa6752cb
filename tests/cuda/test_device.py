"""The list of cases on the GPUs of this machine, on every code path that they can run; skipped where there is none."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import merges
import pytest
import torch
from conformance.cases import CASES
from conformance.check import check
from conformance.engines import Engine, GpuEngine, forget_backends
from conformance.gradients import GRADIENT_CASES, check_gradients, in_order
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fastattention import (
    ArgumentError,
    UnsupportedError,
    fast_attn_func,
    fast_attn_varlen_func,
    fast_attn_with_kvcache,
    merge_attn_states,
)
from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.attention.merge import select_merging_backend
from fastattention.attention.problem import MergeProblem, Problem
from fastattention.gpu_runtime import module
from fastattention.gpu_runtime.chips import ARCHS
from fastattention.quantized import quantize
from fastattention.testing.case import Case
from fastattention.testing.memory import nan_in_fresh_memory

if ATTENTION_BACKENDS.get("cuda").why_unavailable() is not None:
    pytest.skip("needs a GPU", allow_module_level=True)


class DeviceEngine(GpuEngine):
    """The cuda backend on the first GPU; `isa` holds the code path, e.g. "70"."""

    @contextmanager
    def active(self) -> Iterator[None]:
        assert self.isa is not None
        try:
            with mock.patch.dict(os.environ, FASTATTENTION_CUDA_ARCH=self.isa):
                forget_backends()
                yield
        finally:
            forget_backends()

    def refusal(self, problem: Problem) -> str | None:
        return super().refusal(replace(problem, device=torch.device("cuda:0")))


def _target() -> int:
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    return 10 * major + minor


ENGINES = [DeviceEngine("cuda", str(arch)) for arch in ARCHS if arch <= _target()]
every_engine = pytest.mark.parametrize("engine", ENGINES, ids=[engine.name for engine in ENGINES])

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@every_engine
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_is_right_repeats_and_writes_nothing_else(engine: Engine, dtype: torch.dtype, case: Case) -> None:
    check(engine, case, dtype)


@every_engine
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("case", GRADIENT_CASES, ids=[case.name for case in GRADIENT_CASES])
def test_error_of_gradients_is_at_most_twice_that_of_torch(
    engine: DeviceEngine, dtype: torch.dtype, case: Case
) -> None:
    check_gradients(engine, case, dtype)


@every_engine
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("case", GRADIENT_CASES, ids=[case.name for case in GRADIENT_CASES])
def test_deterministic_gradients_are_right_and_repeat(engine: DeviceEngine, dtype: torch.dtype, case: Case) -> None:
    found, again = (check_gradients(engine, in_order(case), dtype) for _ in range(2))
    assert all(torch.equal(one, again[name]) for name, one in found.items())


@every_engine
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}], ids=["full", "causal-softcap"])
@pytest.mark.parametrize("headdim", [40, 64, 128, 256])
def test_dropout_keeps_the_weights_that_operations_of_torch_keep(
    engine: DeviceEngine, headdim: int, options: dict[str, Any]
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, n, 4, headdim, generator=generator, device="cuda").half() for n in (150, 200, 200))
    weights = torch.randn(q.shape, generator=generator, device="cuda").half()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = []
    with engine.active():
        for backend in ("cuda", "sdpa"):
            torch.manual_seed(0)
            out = fast_attn_func(*leaves, dropout_p=0.3, backend=backend, **options)
            found.append((out, *torch.autograd.grad(out, leaves, weights)))
    for ours, right in zip(*found, strict=True):
        assert (ours - right).abs().max() <= 0.01 * right.abs().max()


def _tensors(device: str = "cuda:0") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(2, 300, 4, 64, device=device, generator=generator).half() for _ in range(3))
    return q, k, v


@pytest.fixture(autouse=True)
def checked_mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of tensors are checked, except where a graph is captured or the device must notice by itself."""
    if request.node.get_closest_marker("unchecked") is None:
        monkeypatch.setenv("FASTATTENTION_CHECK_NUMBERS", "1")


def test_a_captured_graph_replays_with_new_numbers() -> None:
    q, k, v = _tensors()
    fast_attn_func(q, k, v, causal=True, backend="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fast_attn_func(q, k, v, causal=True, backend="cuda")
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(captured, fast_attn_func(q, k, v, causal=True, backend="cuda"))


class Decoding(NamedTuple):
    """A decode step: one new token for each of three sequences of uneven length."""

    arguments: dict[str, Any]
    new: tuple[Tensor, Tensor, Tensor]  # q, k and v at each step

    def step(self) -> Tensor:
        out: Tensor = fast_attn_with_kvcache(**self.arguments, backend="cuda")
        return out

    @property
    def cache_seqlens(self) -> Tensor:
        seqlens: Tensor = self.arguments["cache_seqlens"]
        return seqlens


STORED = {"float16": None, "int8": torch.int8, "float8": torch.float8_e4m3fn}


def _decoding(stored: torch.dtype | None, page_block_size: int | None, steps: int = 12) -> Decoding:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).half()

    batch_size, capacity, nheads_k, headdim = 3, 1024, 2, 64
    shape = (batch_size, capacity, nheads_k, headdim)
    arguments: dict[str, Any] = {}
    if page_block_size is not None:
        num_blocks = batch_size * capacity // page_block_size
        shape = (num_blocks, page_block_size, nheads_k, headdim)
        table = torch.randperm(num_blocks, device="cuda", generator=generator).int()
        arguments["block_table"] = table.reshape(batch_size, -1)
    for name in ("k", "v"):
        cache = draw(*shape)
        if stored is not None:
            cache, arguments[f"{name}_scale"] = quantize(cache, stored)
        arguments[f"{name}_cache"] = cache
    angles = 6.3 * torch.rand(capacity, headdim // 2, device="cuda", generator=generator)
    q, k, v = draw(steps, batch_size, 1, 8, headdim), *(draw(steps, batch_size, 1, nheads_k, headdim) for _ in range(2))
    arguments |= {
        "q": q[0].clone(),
        "k": k[0].clone(),
        "v": v[0].clone(),
        "rotary_cos": angles.cos().half(),
        "rotary_sin": angles.sin().half(),
        "cache_seqlens": torch.tensor([5, 130, 900], dtype=torch.int32, device="cuda"),
        "causal": True,
    }
    return Decoding(arguments, (q, k, v))


@pytest.mark.unchecked
@pytest.mark.parametrize("page_block_size", [None, 16], ids=["dense", "pages"])
@pytest.mark.parametrize("stored", STORED.values(), ids=STORED.keys())
def test_a_captured_decode_replays_with_growing_lengths(
    stored: torch.dtype | None, page_block_size: int | None
) -> None:
    eager, replayed = (_decoding(stored, page_block_size) for _ in range(2))
    _decoding(stored, page_block_size).step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = replayed.step()
        replayed.cache_seqlens.add_(1)
    for numbers in zip(*eager.new, strict=True):
        for decoding in (eager, replayed):
            for name, number in zip(("q", "k", "v"), numbers, strict=True):
                decoding.arguments[name].copy_(number)
        expected = eager.step()
        eager.cache_seqlens.add_(1)
        graph.replay()
        assert torch.equal(captured, expected)
    assert torch.equal(eager.arguments["k_cache"].view(torch.int8), replayed.arguments["k_cache"].view(torch.int8))


@pytest.mark.unchecked
def test_a_call_does_not_wait_for_the_gpu() -> None:
    decoding = _decoding(None, None)
    decoding.step()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(1_000_000_000)
        decoding.step()
        assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


@pytest.mark.unchecked
def test_a_sequence_without_room_is_nan_and_its_cache_is_left_alone() -> None:
    decoding = _decoding(None, None)
    decoding.cache_seqlens[1] = 1024
    before = {name: decoding.arguments[name].clone() for name in ("k_cache", "v_cache")}
    out = decoding.step()
    assert out[1].isnan().all()
    with pytest.raises(ArgumentError, match=r"cache_seqlens\[1\]=1024 of an earlier call"):
        decoding.step()
    assert out[[0, 2]].isfinite().all()
    for name, cache in before.items():
        changed = (decoding.arguments[name] != cache).flatten(2).any(-1)
        assert changed.nonzero().tolist() == [[0, 5], [2, 900]]


def test_in_checked_mode_it_is_the_error_of_the_cpu() -> None:
    decoding = _decoding(None, None)
    decoding.cache_seqlens[1] = 1024
    before = decoding.arguments["k_cache"].clone()
    with pytest.raises(ArgumentError, match=r"cache_seqlens\[1\]=1024"):
        decoding.step()
    assert torch.equal(before, decoding.arguments["k_cache"])


def test_streams_do_not_share_counters() -> None:
    """Decodes that run at the same time merge their own parts."""
    expected = [_decoding(None, None).step() for _ in range(2)]
    torch.cuda.synchronize()
    calls = [(torch.cuda.Stream(), [_decoding(None, None) for _ in range(30)]) for _ in range(2)]
    torch.cuda.synchronize()
    outs = []
    for stream, decodings in calls:
        with torch.cuda.stream(stream):
            outs += [decoding.step() for decoding in decodings]
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected[0]) for out in outs)


def test_work_is_in_order_with_the_current_stream() -> None:
    q, k, v = _tensors()
    expected = fast_attn_func(2 * q, k, v, backend="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        doubled = 2 * q
        out = fast_attn_func(doubled, k, v, backend="cuda")
        result = out + 0
    stream.synchronize()
    assert torch.equal(result, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_of_one_process_agree() -> None:
    first = fast_attn_func(*_tensors("cuda:0"), causal=True, backend="cuda").cpu()
    q, k, v = (tensor.to("cuda:1") for tensor in _tensors("cuda:0"))
    second = fast_attn_func(q, k, v, causal=True, backend="cuda")
    assert second.device == torch.device("cuda:1")
    assert torch.equal(first, second.cpu())


def test_offsets_beyond_32_bits() -> None:
    """Keys of the last head lie more than 2^31 elements after those of the first."""
    free, _ = torch.cuda.mem_get_info()
    nheads, seqlen, headdim = 3, 1 << 24, 64
    if free < 3 * 2 * nheads * seqlen * headdim:
        pytest.skip("needs 20 GB of free GPU memory")
    k = torch.empty(1, nheads, seqlen, headdim, device="cuda", dtype=torch.float16).normal_().transpose(1, 2)
    q = torch.randn(1, 1, nheads, headdim, device="cuda", dtype=torch.float16)
    k_last, q_last = k[:, -300:, -1:], q[:, :, -1:]
    whole = fast_attn_func(q, k, k, window_size=(299, 0), backend="cuda")
    last = fast_attn_func(q_last, k_last, k_last, backend="cuda")
    torch.testing.assert_close(whole[:, :, -1:], last, atol=5e-4, rtol=0)  # another head is off by 0.1


def _merge_on_device(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges by the kernel, from memory laid out as on the CPU."""
    problem = MergeProblem(outs[0].shape, outs[0].dtype, torch.device("cuda", 0), needs_grad=False)
    assert select_merging_backend(problem).name == "cuda"
    out, lse = merge_attn_states([_copied(out) for out in outs], [_copied(lse) for lse in lses])
    return out.cpu(), lse.cpu()


def _copied(tensor: Tensor) -> Tensor:
    """A copy on the GPU, with its strides, and NaN around it as on the CPU."""
    memory = tensor if tensor._base is None else tensor._base
    return memory.cuda().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize("dtype", merges.DTYPES.values(), ids=merges.DTYPES.keys())
@pytest.mark.parametrize("case", merges.CASES, ids=[case.name for case in merges.CASES])
def test_parts_are_merged_exactly_and_repeatably(dtype: torch.dtype, case: merges.MergeCase) -> None:
    merges.check_merge(_merge_on_device, *case.parts(dtype))


@pytest.mark.parametrize("dtype", merges.DTYPES.values(), ids=merges.DTYPES.keys())
def test_what_is_not_finite_stays_where_it_is(dtype: torch.dtype) -> None:
    merges.check_what_is_not_finite(_merge_on_device, dtype)


def test_a_captured_merge_replays_with_new_numbers() -> None:
    outs, lses = torch.randn(3, 1, 1, 32, 128, device="cuda"), torch.randn(3, 1, 32, 1, device="cuda")
    merge_attn_states(outs, lses)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = merge_attn_states(outs, lses)
    outs.normal_()
    lses.normal_()
    graph.replay()
    for replayed, expected in zip(captured, merge_attn_states(outs, lses), strict=True):
        assert torch.equal(replayed, expected)


def test_gradients_of_a_merge_are_those_of_the_cpu() -> None:
    outs, lses = torch.randn(2, 2, 3, 4, 8), torch.randn(2, 2, 4, 3)

    def gradients(device: str) -> list[Tensor]:
        leaves = [x.to(device).requires_grad_() for x in (outs, lses)]
        out, lse = merge_attn_states(*leaves)
        return [gradient.cpu() for gradient in torch.autograd.grad(out.sin().sum() + lse.sin().sum(), leaves)]

    torch.testing.assert_close(gradients("cuda"), gradients("cpu"))


@pytest.mark.unchecked
@pytest.mark.parametrize("backend", ["cuda", "sdpa"])
@pytest.mark.parametrize("longest", [1, 40])
def test_rows_behind_the_last_sequence_see_no_keys(backend: str, longest: int) -> None:
    q = torch.randn(longest + 8, 2, 32, device="cuda", dtype=torch.float16)
    k = torch.randn(70, 2, 32, device="cuda", dtype=torch.float16)
    cu_seqlens_q, cu_seqlens_k = (torch.tensor([0, 1, n], dtype=torch.int32, device="cuda") for n in (longest + 1, 70))
    with nan_in_fresh_memory():
        out, lse = fast_attn_varlen_func(
            q, k, k, cu_seqlens_q, cu_seqlens_k, longest, 69, return_lse=True, backend=backend
        )
    assert (out[longest + 1 :] == 0.0).all()
    assert lse[:, longest + 1 :].isneginf().all()
    assert out[: longest + 1].isfinite().all()


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_fake_tensor_among_others_is_refused(name: str) -> None:
    """A kernel once returned garbage for a fake key."""
    q, k, v = _tensors()
    fake = FakeTensorMode().from_tensor(k)
    with pytest.raises(ArgumentError, match=f"{name} is a fake tensor"):
        fast_attn_func(**{"q": q, "k": k, "v": v, name: fake})


def test_a_thread_without_a_context_gets_one() -> None:
    """Autograd's threads have none: their memory comes from torch's cache, so kernels are the first to need one."""
    q, k, v = _tensors()
    expected = fast_attn_func(q, k, v, backend="cuda")
    del expected  # its memory is the cache's
    expected = fast_attn_func(q, k, v, backend="cuda")
    found: list[Tensor] = []

    def call() -> None:
        driver = module.driver_bindings()
        assert int(module.checked(driver.cuCtxGetCurrent(), "asking")) == 0
        found.append(fast_attn_func(q, k, v, backend="cuda"))  # loaded before
        module.checked(driver.cuCtxSetCurrent(0), "leaving")
        module.load_kernel.cache_clear()
        forget_backends()
        found.append(fast_attn_func(q, k, v, backend="cuda"))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(found) == 2
    assert all(torch.equal(one, expected) for one in found)


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_float32_calls_read_lengths_and_check_them() -> None:
    """sdpa serves them, and torch's kernels would end the process."""
    caches = [torch.zeros(8, 16, 2, 16, device="cuda") for _ in range(2)]
    q, k = torch.randn(2, 1, 4, 16, device="cuda"), torch.randn(2, 1, 2, 16, device="cuda")
    table = torch.tensor([[0, 1], [3, 3]], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([5, -1], dtype=torch.int32, device="cuda")
    with pytest.raises(ArgumentError, match=r"cache_seqlens\[1\]=-1"):
        fast_attn_with_kvcache(q, *caches, k, k, cache_seqlens=lengths, block_table=table, causal=True)
    assert not any(cache.any() for cache in caches)
    lengths.clamp_(min=0)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UnsupportedError, match="CUDA graph"), torch.cuda.graph(graph):
        fast_attn_with_kvcache(q, *caches, k, k, cache_seqlens=lengths, block_table=table, causal=True)
