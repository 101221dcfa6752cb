"""The cuda backend: checks, allocation, and the choice of a kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastattention import config
from fastattention.backends.base import Backend
from fastattention.backends.common.layout import bias_strides, pointer, token_strides
from fastattention.backends.common.packed_cache import REFUSAL
from fastattention.backends.cuda import heuristics
from fastattention.backends.cuda.chips import ARCHS, Limits
from fastattention.backends.cuda.heuristics import KernelConfig
from fastattention.backends.cuda.jit import module
from fastattention.backends.cuda.params import ForwardParams, make_params, pack_template
from fastattention.errors import ArgumentError
from fastattention.problem import AttentionOutput, Inputs, Layout, Problem

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_CHUNK = 8  # elements of 16 bits that are read at once: 16 bytes
_MAX_PLANS = 4096


# Strides of what a call has, None for what it has not: q, k, v, bias with its dtype, slopes, block table.
_Strides = tuple[object, ...]


@dataclass
class Plan:
    """What a problem alone decides, worked out once, and the parameters of its calls for every set of strides seen."""

    config: KernelConfig
    dtype: torch.dtype  # in which the kernel computes
    num_blocks: int
    heads_together: int
    templates: dict[_Strides, bytes] = field(default_factory=dict)
    kernels: dict[int, module.Kernel] = field(default_factory=dict)  # by device


class CudaBackend(Backend):
    """Our kernels for GPUs from Pascal on.

    arch: the code path, 60, 70, 75 or 80; None takes FASTATTENTION_CUDA_ARCH, or else the newest that a GPU can run.
    """

    name = "cuda"

    def __init__(self, arch: int | None = None) -> None:
        self._forced_arch = arch
        self._plans: dict[Problem, Plan] = {}

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
        if problem.panel_size:
            return REFUSAL
        if problem.layout is Layout.KVCACHE:
            return "calls with a cache are not served yet; use backend='sdpa'"
        if problem.dtype is torch.float32:
            return "float32 is not served; use float16 or bfloat16, or backend='sdpa'"
        if problem.needs_grad:
            return "a gradient is needed and this backend has no backward; use backend='sdpa' or torch.no_grad()"
        if problem.dropout_p > 0.0:
            return f"dropout_p={problem.dropout_p} is not served; use dropout_p=0.0 or backend='sdpa'"
        if max(problem.headdim, problem.headdim_v) > heuristics.MAX_HEADDIM:
            widths = f"headdim={problem.headdim}, headdim_v={problem.headdim_v}"
            return f"{widths}; at most {heuristics.MAX_HEADDIM} is served"
        return None

    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        """One kernel. bfloat16 is computed in float16 where the GPU has no instructions for it."""
        plan = self._plans.get(problem) or self._make_plan(problem)
        strides = _strides_of(inputs)
        template = plan.templates.get(strides)
        # Strides that are known are aligned, but memory may begin anywhere.
        if template is None or (inputs.q.data_ptr() | inputs.k.data_ptr() | inputs.v.data_ptr()) % 16:
            inputs = _prepared(inputs, plan.dtype)
            template = _add_template(plan, problem, inputs, keep=_strides_of(inputs) == strides)
        out = inputs.q.new_empty((*problem.out_shape[:-1], inputs.v.shape[-1]))
        lse = inputs.q.new_empty(problem.lse_shape, dtype=torch.float32) if problem.return_lse else None
        if plan.num_blocks > 0:
            self._launch(plan, make_params(template, *_pointers(inputs, out, lse)), problem)
        if out.shape[-1] != problem.headdim_v or plan.dtype is not problem.dtype:
            out = out[..., : problem.headdim_v].to(problem.dtype, memory_format=torch.contiguous_format)
        return AttentionOutput(out, lse)

    def _make_plan(self, problem: Problem) -> Plan:
        limits = self._limits(problem)
        chosen = heuristics.choose_config(problem, self._arch(limits), limits)
        num_m_tiles = -(-problem.seqlen_q // chosen.tile_m)
        num_blocks = num_m_tiles * problem.nheads * problem.batch_size * chosen.num_value_parts
        if problem.total_q == 0 or problem.headdim_v == 0:
            num_blocks = 0
        plan = Plan(chosen, _DTYPES[chosen.dtype], num_blocks, heuristics.heads_together(problem, limits))
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[problem] = plan
        return plan

    # What the emulator of the tests does its own way.

    def _why_not_device(self, problem: Problem) -> str | None:
        if problem.device.type != "cuda":
            return f"tensors are on {problem.device}; the cuda backend takes tensors on cuda"
        limits = self._limits(problem)
        if limits.target < ARCHS[-1]:
            capability = f"{limits.target / 10:.1f}"
            return f"{problem.device} has compute capability {capability}; Pascal (6.0) is the oldest that is served"
        forced = config.cuda_arch()
        if forced is not None and not (forced in ARCHS and forced <= limits.target):
            allowed = ", ".join(str(arch) for arch in ARCHS if arch <= limits.target)
            return f"FASTATTENTION_CUDA_ARCH={forced} is no code path of {problem.device}; choose one of {allowed}"
        return None

    def _limits(self, problem: Problem) -> Limits:
        return module.device_limits(_device_index(problem))

    def _arch(self, limits: Limits) -> int:
        return self._forced_arch or config.cuda_arch() or limits.arch

    def _launch(self, plan: Plan, params: ForwardParams, problem: Problem) -> None:
        index = _device_index(problem)
        kernel = plan.kernels.get(index)
        if kernel is None:
            kernel = plan.kernels[index] = module.load_kernel(plan.config, index)
        stream = module.current_stream(index)
        if index == torch.cuda.current_device():
            kernel.launch(params, plan.num_blocks, stream)
        else:
            with torch.cuda.device(index):
                kernel.launch(params, plan.num_blocks, stream)


def _device_index(problem: Problem) -> int:
    index: int | None = problem.device.index
    return torch.cuda.current_device() if index is None else index


def _strides_of(inputs: Inputs) -> _Strides:
    bias, alibi, table = inputs.attn_bias, inputs.alibi_slopes, inputs.block_table
    return (
        inputs.q.stride(),
        inputs.k.stride(),
        inputs.v.stride(),
        None if bias is None else (bias.stride(), bias.dtype),
        None if alibi is None else alibi.stride(),
        None if table is None else table.stride(),
    )


def _prepared(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Inputs as the kernels read them: nothing is copied when they have `dtype` and rows at multiples of 16 bytes."""
    bias = inputs.attn_bias
    if bias is not None and bias.dtype not in (torch.float32, dtype):
        bias = bias.float()  # not `dtype`: a low bfloat16 would become -infinity in float16
    if dtype is torch.float16 and inputs.q.dtype is torch.bfloat16 and config.check_float16_range():
        for name, tensor in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
            _check_float16_range(name, tensor)
    q, k, v = (_aligned(tensor, dtype) for tensor in (inputs.q, inputs.k, inputs.v))
    return inputs._replace(q=q, k=k, v=v, attn_bias=bias)


def _check_float16_range(name: str, tensor: Tensor) -> None:
    largest = float(tensor.abs().amax()) if tensor.numel() else 0.0
    limit = torch.finfo(torch.float16).max
    if largest > limit:
        raise ArgumentError(
            f"{name} holds {largest:.4g}, and this GPU computes bfloat16 in float16, which ends at {limit:.0f}; "
            "scale it down or use backend='sdpa'"
        )


def _is_aligned(tensor: Tensor) -> bool:
    """Rows are contiguous, begin at 16 bytes, have a multiple of 8 columns and lie less than 2^31 elements apart."""
    *outer, row, head, column = tensor.stride()
    in_chunks = all(size % _CHUNK == 0 for size in (*outer, row, head, tensor.shape[-1]))
    return in_chunks and tensor.data_ptr() % 16 == 0 and column == 1 and row < 2**31


def _aligned(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor, or a copy of it that is aligned; columns that it lacks are zeros."""
    tensor = tensor.to(dtype)
    if _is_aligned(tensor):
        return tensor
    if missing := -tensor.shape[-1] % _CHUNK:
        return torch.nn.functional.pad(tensor, (0, missing))
    return tensor.clone(memory_format=torch.contiguous_format)


def _pointers(inputs: Inputs, out: Tensor, lse: Tensor | None) -> tuple[int, ...]:
    """The pointers of params.h in its order."""
    return (
        inputs.q.data_ptr(),
        inputs.k.data_ptr(),
        inputs.v.data_ptr(),
        out.data_ptr(),
        pointer(lse),
        pointer(inputs.cu_seqlens_q),
        pointer(inputs.cu_seqlens_k),
        pointer(inputs.block_table),
        pointer(inputs.alibi_slopes),
        pointer(inputs.sinks),
        pointer(inputs.attn_bias),
    )


def _add_template(plan: Plan, problem: Problem, inputs: Inputs, keep: bool) -> bytes:
    """The parameters of a call without its pointers; kept for calls with the same strides when those need no copies."""
    bias, alibi, table = inputs.attn_bias, inputs.alibi_slopes, inputs.block_table
    (q_batch, q_row, q_head), (k_batch, k_row, k_head) = token_strides(inputs.q), token_strides(inputs.k)
    v_batch, v_row, v_head = token_strides(inputs.v)
    packed = problem.layout is Layout.PACKED
    out_row = problem.nheads * inputs.v.shape[-1]
    lse_head = problem.total_q if packed else problem.seqlen_q
    # fmt: off
    template = pack_template(
        q_batch, q_head, k_batch, k_head, v_batch, v_head,
        0 if packed else problem.seqlen_q * out_row, inputs.v.shape[-1],
        0 if packed else problem.nheads * lse_head, lse_head,
        *bias_strides(bias),
        0 if alibi is None or alibi.dim() == 1 else alibi.stride(0),
        0 if table is None else table.stride(0),
        q_row, k_row, v_row, out_row,
        problem.batch_size, problem.seqlen_q, problem.seqlen_k, problem.nheads, problem.group_size,
        inputs.q.shape[-1], inputs.v.shape[-1], problem.page_block_size or 0,
        problem.window_left, problem.window_right,
        bias is not None and bias.dtype == torch.float32,
        -(-problem.seqlen_q // plan.config.tile_m), plan.heads_together,
        problem.softmax_scale, problem.softcap,
    )
    # fmt: on
    if keep and plan.dtype is problem.dtype:
        plan.templates[_strides_of(inputs)] = template
    return template
