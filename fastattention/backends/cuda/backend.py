"""The cuda backend: checks, allocation, and the choice of a kernel."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastattention import config
from fastattention.backends.base import Backend
from fastattention.backends.cuda import heuristics
from fastattention.backends.cuda.chips import ARCHS, Limits
from fastattention.backends.cuda.heuristics import KernelConfig
from fastattention.backends.cuda.jit import module
from fastattention.backends.cuda.params import ForwardParams
from fastattention.problem import AttentionOutput, Inputs, Layout, Problem

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_CHUNK = 8  # elements of 16 bits that are read at once: 16 bytes


class CudaBackend(Backend):
    """Our kernels for GPUs from Pascal on."""

    name = "cuda"

    def why_unavailable(self) -> str | None:
        """Why no kernel can run here."""
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        return module.why_unavailable()

    def describe(self) -> str:
        """Every device with its code path."""
        return "; ".join(self._describe(index) for index in range(torch.cuda.device_count()))

    def _describe(self, index: int) -> str:
        limits = module.device_limits(index)
        path = f"sm{limits.arch} kernels" if limits.target >= ARCHS[-1] else "too old"
        return f"cuda:{index} {torch.cuda.get_device_name(index)} ({limits.target / 10:.1f}), {path}"

    def why_not(self, problem: Problem) -> str | None:
        """Refuses caches, float32, gradients and dropout; serves every other call on a GPU from Pascal on."""
        if (reason := self._why_not_device(problem)) is not None:
            return reason
        if problem.layout is Layout.KVCACHE:
            return "calls with a cache are not served yet; use backend='sdpa'"
        if problem.dtype is torch.float32:
            return "float32 is not served; use float16 or bfloat16, or backend='sdpa'"
        if problem.needs_grad:
            return "a gradient is needed and this backend has no backward; use backend='sdpa' or torch.no_grad()"
        if problem.dropout_p > 0.0:
            return f"dropout_p={problem.dropout_p} is not served; use dropout_p=0.0 or backend='sdpa'"
        if max(problem.headdim, problem.headdim_v) > heuristics.MAX_HEADDIM:
            return f"headdim={problem.headdim}, headdim_v={problem.headdim_v}; at most {heuristics.MAX_HEADDIM} is served"
        return None

    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        """One kernel. bfloat16 is computed in float16 where the GPU has no instructions for it."""
        limits = self._limits(problem)
        kernel, heads_together = plan(problem, limits, self._arch(limits))
        dtype = _DTYPES[kernel.dtype]
        inputs = _prepared(inputs, dtype)
        out = torch.empty((*problem.out_shape[:-1], inputs.v.shape[-1]), dtype=dtype, device=problem.device)
        lse = torch.empty(problem.lse_shape, dtype=torch.float32, device=problem.device) if problem.return_lse else None
        if out.numel() > 0:
            params = _params(problem, inputs, out, lse, kernel, heads_together)
            num_blocks = params.num_m_tiles * problem.nheads * problem.batch_size * kernel.num_value_parts
            self._launch(kernel, params, num_blocks, problem)
        if out.shape[-1] != problem.headdim_v or dtype != problem.dtype:
            out = out[..., : problem.headdim_v].to(problem.dtype, memory_format=torch.contiguous_format)
        return AttentionOutput(out, lse)

    # What the emulator of the tests does its own way.

    def _why_not_device(self, problem: Problem) -> str | None:
        if problem.device.type != "cuda":
            return f"tensors are on {problem.device}; the cuda backend takes tensors on cuda"
        target = self._limits(problem).target
        if target < ARCHS[-1]:
            return f"{problem.device} has compute capability {target / 10:.1f}; Pascal (6.0) is the oldest that is served"
        return None

    def _limits(self, problem: Problem) -> Limits:
        index = problem.device.index
        return module.device_limits(torch.cuda.current_device() if index is None else index)

    def _arch(self, limits: Limits) -> int:
        return config.cuda_arch() or limits.arch

    def _launch(self, kernel: KernelConfig, params: ForwardParams, num_blocks: int, problem: Problem) -> None:
        index = problem.device.index
        if index is None:
            index = torch.cuda.current_device()
        with torch.cuda.device(index):
            module.load_kernel(kernel, index).launch(params, num_blocks, torch.cuda.current_stream().cuda_stream)


@functools.lru_cache(maxsize=4096)
def plan(problem: Problem, limits: Limits, arch: int) -> tuple[KernelConfig, int]:
    """The kernel for a problem and how many heads run together, computed once."""
    return heuristics.choose_config(problem, arch, limits), heuristics.heads_together(problem, limits)


def _prepared(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Inputs as the kernels read them: nothing is copied when they have `dtype` and rows at multiples of 16 bytes."""
    q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.attn_bias
    if bias is not None and bias.dtype not in (torch.float32, dtype):
        bias = bias.float()  # not `dtype`: a low bfloat16 would become -infinity in float16
    return inputs._replace(
        q=_aligned(q.to(dtype)), k=_aligned(k.to(dtype)), v=_aligned(v.to(dtype)), attn_bias=bias
    )


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it whose rows are contiguous, begin at 16 bytes and have a multiple of 8 columns."""
    columns = tensor.shape[-1]
    if columns % _CHUNK:
        return torch.nn.functional.pad(tensor, (0, -columns % _CHUNK))
    strides = tensor.stride()
    fits = all(stride % _CHUNK == 0 for stride in strides[:-1]) and strides[-3] < 2**31
    if strides[-1] == 1 and fits and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    """(batch, row, head) strides in elements of (batch, row, head, headdim) or packed (row, head, headdim)."""
    strides = tensor.stride()
    return (strides[0], strides[1], strides[2]) if len(strides) == 4 else (0, strides[0], strides[1])


def _params(
    problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor | None, kernel: KernelConfig, heads_together: int
) -> ForwardParams:
    """The fields of params.h in its order."""
    packed = problem.layout is Layout.PACKED
    bias, alibi, table = inputs.attn_bias, inputs.alibi_slopes, inputs.block_table
    bias_strides = (0, 0, 0, 0)
    if bias is not None:
        b = bias.stride()
        bias_strides = (0, b[0], b[1], b[2]) if packed else (b[0], b[1], b[2], b[3])
    q_batch, q_row, q_head = _strides(inputs.q)
    k_batch, k_row, k_head = _strides(inputs.k)
    v_batch, v_row, v_head = _strides(inputs.v)
    out_batch, out_row, out_head = _strides(out)
    lse_stride_head = problem.total_q if packed else problem.seqlen_q
    return ForwardParams(
        inputs.q.data_ptr(),
        inputs.k.data_ptr(),
        inputs.v.data_ptr(),
        out.data_ptr(),
        _pointer(lse),
        _pointer(inputs.cu_seqlens_q),
        _pointer(inputs.cu_seqlens_k),
        _pointer(table),
        _pointer(alibi),
        _pointer(inputs.sinks),
        _pointer(bias),
        q_batch,
        q_head,
        k_batch,
        k_head,
        v_batch,
        v_head,
        out_batch,
        out_head,
        0 if packed else problem.nheads * lse_stride_head,
        lse_stride_head,
        *bias_strides,
        0 if alibi is None or alibi.dim() == 1 else alibi.stride(0),
        0 if table is None else table.stride(0),
        q_row,
        k_row,
        v_row,
        out_row,
        problem.batch_size,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.nheads,
        problem.group_size,
        inputs.q.shape[-1],
        inputs.v.shape[-1],
        problem.page_block_size or 0,
        problem.window_left,
        problem.window_right,
        int(bias is not None and bias.dtype == torch.float32),
        -(-problem.seqlen_q // kernel.tile_m),
        heads_together,
        problem.softmax_scale,
        problem.softcap,
    )
