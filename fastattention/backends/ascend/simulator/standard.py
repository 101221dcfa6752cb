"""Standard attention: the whole matrix of scores in memory, one kernel after another.

Every kernel is taken to be as fast as its busiest pipe or path, with no gap and all cores busy from start to end. That
flatters standard attention, so gains over it are lower bounds of what the model says.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from fastattention.backends.ascend.chips import Chip
from fastattention.backends.ascend.simulator.calibration import DEFAULT_COSTS, MASK_PASSES, SOFTMAX_PASSES
from fastattention.backends.ascend.simulator.tiles import FLOAT32_BYTES
from fastattention.backends.ascend.simulator.workload import SimulatedCall

GEMM_TILE = 256  # rows and columns of a result that a core computes while it reads its operands once


class StandardKind(enum.Enum):
    """How the work between the two products is divided into kernels."""

    FUSED_SOFTMAX = "three kernels"  # product and scale, mask and softmax, product
    EAGER = "eager"  # product, scale, mask, softmax into float32, conversion, product: a framework's own operations


class _Kernel(NamedTuple):
    """What a kernel does for each score, and in all."""

    read: float  # bytes a score
    written: float
    passes: float = 0.0  # passes of the Vector units at their plain rate
    exponentials: float = 0.0
    products: float = 0.0  # multiplications and additions of the Cube a score
    operand_bytes: float = 0.0  # read besides the scores, in all


@dataclass(frozen=True)
class StandardPrediction:
    """The model's prediction for standard attention. No figure has been measured."""

    seconds: float
    score_bytes: float  # all matrices of scores and weights that exist at a time
    traffic_bytes: float  # transfers between cores and memory or cache
    num_kernels: int


def predict_standard(workload: SimulatedCall, chip: Chip, kind: StandardKind) -> StandardPrediction:
    """The model's time for standard attention, which computes all scores, hidden ones too."""
    scores = float(workload.batch_size * workload.nheads) * workload.seqlen_q * workload.seqlen_k
    kernels = _kernels(workload, kind)
    cycles = sum(_cycles(kernel, scores, workload, chip) for kernel in kernels)
    traffic = sum((kernel.read + kernel.written) * scores + kernel.operand_bytes for kernel in kernels)
    widest = max(kernel.read + kernel.written for kernel in kernels)
    return StandardPrediction(cycles / chip.clock_hz, widest * scores, traffic, len(kernels))


def _kernels(workload: SimulatedCall, kind: StandardKind) -> list[_Kernel]:
    size, shape = workload.dtype.itemsize, workload.shape
    masked = workload.has_window
    # Products are cut into GEMM_TILE x GEMM_TILE results: each operand is read once for every GEMM_TILE rows of the
    # other.
    tiles = workload.batch_size * workload.nheads * workload.seqlen_q * workload.seqlen_k / GEMM_TILE
    scores = _Kernel(0, size, products=2.0 * shape.headdim, operand_bytes=2 * tiles * shape.headdim * size)
    values = _Kernel(size, 0, products=2.0 * shape.headdim_v, operand_bytes=tiles * shape.headdim_v * size)
    mask = 1.0 / (workload.batch_size * workload.nheads) if masked else 0.0  # one for all heads, a byte an element
    if kind is StandardKind.FUSED_SOFTMAX:
        passes = SOFTMAX_PASSES + (MASK_PASSES if masked else 0)
        return [scores, _Kernel(size + mask, size, passes=passes, exponentials=1.0), values]
    scale = _Kernel(size, size, passes=1.0)
    hide = [_Kernel(size + mask, size, passes=MASK_PASSES)] if masked else []
    softmax = _Kernel(size, FLOAT32_BYTES, passes=SOFTMAX_PASSES - 2, exponentials=1.0)
    convert = _Kernel(FLOAT32_BYTES, size, passes=1.0)
    return [scores, scale, *hide, softmax, convert, values]


def _cycles(kernel: _Kernel, scores: float, workload: SimulatedCall, chip: Chip) -> float:
    cores = chip.num_cores
    macs = chip.cube_m * chip.cube_n * chip.cube_k / (chip.float32_slowdown if workload.shape.is_float32 else 1)
    cube = kernel.products * scores / (2 * macs)
    vector = scores * (kernel.passes / chip.vector_rate + kernel.exponentials / chip.special_rate)
    vector /= chip.vectors_per_core
    read = kernel.read * scores + kernel.operand_bytes
    written = kernel.written * scores
    paths = [cube, vector, read / chip.l2_read_rate, written / (chip.l2_write_rate * DEFAULT_COSTS.write_share)]
    paths.append((read + written) * chip.clock_hz * cores / chip.l2_bytes_per_second)  # shared by all cores
    in_memory = (kernel.read + kernel.written) * scores
    if in_memory > chip.l2_bytes:  # operands are few, and found in the cache
        paths.append(in_memory / chip.memory_rate(cores))
    return DEFAULT_COSTS.launch + max(paths) / cores
