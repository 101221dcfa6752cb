"""The tools of these tests catch faulty kernels, and the message names the fault."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from ascend import buffers, llvm, static_checks
from ascend.executor import ExecutionError, execute
from ascend.lowering import LoweringError, lower, parse, variant_of
from fastattention.backends.ascend.call import Launch


@triton.jit
def add_one(source, target, size, first, rows: tl.constexpr):
    places = tl.program_id(0) * rows + tl.arange(0, rows)
    values = tl.load(source + first + places, mask=places < size, other=0.0)
    tl.store(target + places, values + 1.0, mask=places < size)


@triton.jit
def load_one(source, target, index):
    tl.store(target + tl.arange(0, 2), tl.load(source + index) + tl.zeros([2], tl.float32))


@triton.jit
def in_place(memory, rows: tl.constexpr):
    places = tl.arange(0, rows)
    tl.store(memory + places, tl.load(memory + places) + 1.0)


@triton.jit
def powers_of_two(source, target, rows: tl.constexpr):
    places = tl.arange(0, rows)
    tl.store(target + places, tl.exp2(tl.load(source + places)))


@triton.jit
def sums(source, target, begin, end, rows: tl.constexpr, at_least_once: tl.constexpr):
    places = tl.arange(0, rows)
    total = tl.zeros([rows], tl.float32)
    for row in range(begin, max(end, begin + 1) if at_least_once else end):
        total += tl.load(source + row * rows + places)
    tl.store(target + places, total)


NOT_WRITTEN = """
module {
  func.func @f(%arg0: memref<4xf32>) {
    %0 = memref.alloc() : memref<4xf32>
    memref.copy %0, %arg0 : memref<4xf32> to memref<4xf32>
    return
  }
}
"""


@triton.jit
def scores_and_sums(q, k, out, end, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):  # noqa: N803
    rows, columns, depth = tl.arange(0, M)[:, None], tl.arange(0, N)[:, None], tl.arange(0, D)[None, :]
    queries = tl.load(q + rows * D + depth)
    total = tl.zeros([M, D], tl.float32)
    for _ in range(max(end, 1)):
        keys = tl.load(k + columns * D + depth)
        weights = tl.exp(tl.dot(queries, tl.trans(keys)))
        total += tl.dot(weights.to(tl.float16), keys)
    tl.store(out + rows * D + depth, total.to(tl.float16))


# It is well-formed, but no pass in the list handles it.
NOT_BUFFERIZED = """
module {
  func.func @f(%arg0: tensor<4xf32>) -> tensor<2x2xf32> {
    %0 = tensor.empty() : tensor<2x2xf32>
    %1 = tensor.pack %arg0 inner_dims_pos = [0] inner_tiles = [2] into %0 : tensor<4xf32> -> tensor<2x2xf32>
    return %1 : tensor<2x2xf32>
  }
}
"""


def launch(kernel: Any, arguments: dict[str, Any], num_programs: int = 1, **constants: object) -> Launch:
    return Launch(kernel, num_programs, arguments, constants, {})


def adding(source: torch.Tensor, target: torch.Tensor, size: int, first: int = 0) -> Launch:
    return launch(add_one, {"source": source, "target": target, "size": size, "first": first}, 3, rows=8)


def test_every_program_runs() -> None:
    source, target = torch.arange(24.0), torch.zeros(24)
    execute(adding(source, target, 20))
    assert torch.equal(target, torch.cat([source[:20] + 1, torch.zeros(4)]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precisions_round_to_nearest_even(dtype: torch.dtype) -> None:
    """Sums between two values of the type, halfway and near it."""
    eps = torch.finfo(dtype).eps
    source = torch.tensor([1.0, 1.5, eps / 2, 3 * eps / 2, eps, eps / 4, 0.0, -eps / 4])
    target = torch.zeros(8, dtype=dtype)
    execute(adding(source, target, 8)._replace(num_programs=1))
    assert torch.equal(target, (source + 1.0).to(dtype))


def test_a_load_outside_of_an_argument_is_an_error() -> None:
    with pytest.raises(ExecutionError, match=r"add_one.*program 2 of 3 loads elements 21 to 24 of an argument .* 24"):
        execute(adding(torch.zeros(24), torch.zeros(24), 20, first=5))
    with pytest.raises(ExecutionError, match="loads elements -1 to 6"):
        execute(adding(torch.zeros(24)[1:], torch.zeros(24), 20, first=-1)._replace(num_programs=1))


def test_a_store_outside_of_an_argument_is_an_error() -> None:
    memory = torch.zeros(24)
    with pytest.raises(ExecutionError, match="stores elements 16 to 19 of an argument that has 18"):
        execute(adding(torch.zeros(24), memory[:18], 20))
    assert not memory[18:].any()


@pytest.mark.parametrize("index", [4, -1])
def test_a_load_of_one_element_outside_of_an_argument_is_an_error(index: int) -> None:
    target = torch.zeros(2)
    execute(launch(load_one, {"source": torch.arange(4.0), "target": target, "index": 3}))
    assert target.tolist() == [3.0, 3.0]
    with pytest.raises(ExecutionError, match=f"loads element {index} of an argument that has 4"):
        execute(launch(load_one, {"source": torch.arange(4.0), "target": target, "index": index}))


def test_memory_that_was_not_written_is_nan() -> None:
    target = torch.zeros(4)
    words = [ctypes.c_void_p(target.data_ptr())] * 2 + [ctypes.c_int64(word) for word in (0, 4, 1)]
    ctypes.CDLL(str(llvm.build("f", NOT_WRITTEN))).f(*words)
    assert target.isnan().all()


def test_arguments_of_another_type_are_an_error() -> None:
    call = adding(torch.zeros(8), torch.zeros(8), 8)
    with pytest.raises(AssertionError, match="wants its arguments in its own order"):
        execute(call._replace(arguments=dict(reversed(call.arguments.items()))))


def test_what_triton_ascend_refuses_is_an_error_that_names_the_kernel() -> None:
    with pytest.raises(LoweringError, match=r"no options.*'tile_mix'"):
        execute(adding(torch.zeros(8), torch.zeros(8), 8)._replace(options={"tile_mix": 2}))


def test_what_llvm_refuses_is_an_error_that_names_the_pass() -> None:
    lowered = lower(variant_of(adding(torch.zeros(8), torch.zeros(8), 8)))
    with pytest.raises(llvm.LlvmError, match=r"mlir-opt does not take add_one:(.|\n)*hivm\.hir"):
        llvm.build("add_one", lowered.text.replace("    return\n", "    hivm.hir.sync_block_set\n    return\n"))
    with pytest.raises(
        llvm.LlvmError, match=r"mlir-opt, in its pass OneShotBufferize, does not take f:(.|\n)*tensor.pack"
    ):
        llvm.build("f", NOT_BUFFERIZED)


def test_text_that_is_no_kernel_is_an_error() -> None:
    with pytest.raises(LoweringError, match="not a kernel"):
        parse("module {}")


def test_static_checks_find_what_they_are_for() -> None:
    memory = torch.zeros(16)
    pair = {"source": memory, "target": torch.zeros(16)}
    bounds = {"begin": 3, "end": 5}
    good = lower(variant_of(adding(memory, torch.zeros(16), 8)))
    assert static_checks.foreign_operations(good) == []
    assert static_checks.loaded_and_stored(good) == []
    changed = lower(variant_of(launch(in_place, {"memory": memory}, rows=16)))
    assert static_checks.loaded_and_stored(changed) == ["argument 2 is loaded and stored"]
    exponential = lower(variant_of(launch(powers_of_two, pair, rows=16)))
    assert static_checks.foreign_operations(exponential) == ["math.exp2"]
    unsafe = lower(variant_of(launch(sums, pair | bounds, rows=4, at_least_once=False)))
    assert len(static_checks.loops_that_may_not_run(unsafe)) == 1
    safe = lower(variant_of(launch(sums, pair | bounds, rows=4, at_least_once=True)))
    assert static_checks.loops_that_may_not_run(safe) == []


def test_the_count_of_buffers_is_that_of_the_tiles() -> None:
    """Counts the tiles held at once in a loop of few operations, with float16 tiles of 64 x 32 queries and 128 keys."""
    numbers = {name: torch.zeros(128, 32, dtype=torch.float16) for name in ("q", "k", "out")}
    lowered = lower(variant_of(launch(scores_and_sums, numbers | {"end": 3}, M=64, N=128, D=32)))
    options = {"multibuffer": True, "tile_mix_cube_loop": 2, "tile_mix_vector_loop": 4}
    scores, weights, accumulator = 64 * 128 * 4, 64 * 128 * 2, 64 * 32 * 4
    assert buffers.held(lowered, options) == {
        "L0C": scores // 2,
        "L1": 64 * 32 * 2 + weights + 2 * (128 * 32 * 2) // 2,
        "UB": (accumulator + scores // 4) // 2,  # weights take the place of scores
    }
