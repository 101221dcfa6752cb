"""The cuda backend: what it serves, and by which kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fastattention import environment
from fastattention.attention.backend import INT8_PRODUCTS, AttentionBackend
from fastattention.attention.problem import AttentionOutput, Inputs, Layout, MergeProblem, OutputGradients, Problem
from fastattention.backends.common.arguments import KERNELS_SERVE, why_not_arguments
from fastattention.backends.common.gradients import why_not_backward
from fastattention.backends.common.layout import Strides, strides_of
from fastattention.backends.common.panel_cache import REFUSAL
from fastattention.backends.common.traffic import Extent, is_modelled, traffic_of
from fastattention.backends.cuda.attention.backward import (
    BackwardLaunches,
    choose_backward_launches,
    differentiate,
    why_not_widths,
)
from fastattention.backends.cuda.attention.call import AttentionCall, Launcher, may_share_memory, values_in_keys
from fastattention.backends.cuda.attention.launches import Launches, choose_launches
from fastattention.backends.cuda.attention.length_report import LengthReport
from fastattention.backends.cuda.attention.merging import (
    DTYPES,
    MOST_WARPS,
    MergeLaunch,
    make_merge_launch,
    merge_params,
    num_warps,
)
from fastattention.backends.cuda.attention.params import MOST_PARTS
from fastattention.backends.cuda.attention.quantize import Int8Call, why_not_int8
from fastattention.backends.cuda.attention.scratch import Scratch, scratch_of
from fastattention.backends.cuda.attention.traffic import tiled_keys
from fastattention.engine.bounded import BoundedDict
from fastattention.engine.explain import Traffic
from fastattention.gpu_runtime import device, module
from fastattention.gpu_runtime.chips import ARCHS, Limits
from fastattention.gpu_runtime.module import KernelLaunch


class CudaBackend(AttentionBackend):
    """Our kernels for GPUs from Pascal on.

    arch: the code path, 60, 70, 75 or 80; None takes FASTATTENTION_CUDA_ARCH, or else the newest that a GPU can run.
    """

    name = "cuda"
    has_backward = True

    def __init__(self, arch: int | None = None) -> None:
        self._forced_arch = arch
        # By whether values are in the keys, too.
        self._forward_launches: BoundedDict[tuple[Problem, bool], Launches] = BoundedDict()
        self._backward_launches: BoundedDict[Problem, BackwardLaunches] = BoundedDict()
        self._calls: BoundedDict[tuple[Problem, bool, Strides], AttentionCall | Int8Call] = BoundedDict()
        self._merge_launches: BoundedDict[tuple[object, ...], MergeLaunch] = BoundedDict()
        self._report: LengthReport | None = None

    def why_unavailable(self) -> str | None:
        """Why no kernel can run here."""
        return device.why_unavailable()

    def describe(self) -> str:
        """Every device with its code path."""
        return "; ".join(self._describe(index) for index in range(torch.cuda.device_count()))

    def _describe(self, index: int) -> str:
        limits = module.device_limits(index)
        path = f"sm{limits.arch} kernels" if limits.target >= ARCHS[-1] else "too old"
        return f"cuda:{index} {torch.cuda.get_device_name(index)} ({limits.target / 10:.1f}), {path}"

    def why_not(self, problem: Problem) -> str | None:
        """Refuses float32, returned dropout masks, and gradients of slopes, biases, caches and wide heads."""
        if (reason := self._why_not_device(problem)) is not None:
            return reason
        if problem.panel_size:
            return REFUSAL
        if problem.dtype is torch.float32:
            return "float32 is not served; use float16 or bfloat16, or backend='sdpa'"
        if (reason := why_not_int8(problem, self._arch(self._limits(problem)))) is not None:
            return reason
        if (reason := why_not_arguments(problem, self.name, KERNELS_SERVE)) is not None:
            return reason
        if problem.return_mask:
            return "return_attn_probs with dropout is not served; use backend='sdpa', whose mask is the same"
        if (reason := why_not_backward(problem, self.name)) is not None or not problem.grads:
            return reason
        limits = self._limits(problem)
        return why_not_widths(problem, self._arch(limits), limits)

    def how(self, problem: Problem) -> str:
        """Whether it computes the gradients too; else the kernel: one for few queries, or one for many."""
        if problem.qk_dtype is not None:
            return INT8_PRODUCTS
        if problem.grads:
            return "kernels of its own, forward and backward"
        if self._launches(problem).split is not None:
            return "the decode kernel"
        return "the forward kernel" if problem.layout is Layout.KVCACHE else ""

    def traffic(self, problem: Problem, extent: Extent) -> Traffic | None:
        """Traffic of the kernels, without copies before them (backends/cuda/common/memory.py)."""
        if not is_modelled(problem):
            return None
        limits = self._limits(problem)
        keys = tiled_keys(problem, extent, self._launches(problem), limits)
        return traffic_of(problem, extent, self.name, keys, limits.on_chip_bytes)

    def make_call(self, problem: Problem, inputs: Inputs) -> Callable[[Inputs], AttentionOutput]:
        """The launches for these strides. Where v may be in the memory of k, each call checks whether it is."""
        return functools.partial(self.forward, problem) if may_share_memory(problem) else self._call(problem, inputs)

    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        """Appends, then attends: by one kernel, or by a decode and the merge of its parts."""
        return self._call(problem, inputs)(inputs)

    def backward(
        self, problem: Problem, inputs: Inputs, result: AttentionOutput, grads: OutputGradients
    ) -> dict[str, Tensor]:
        """A launch of delta.cuh, then of one kernel for all gradients, or of one for each or two of them."""
        if torch.are_deterministic_algorithms_enabled() and not problem.deterministic:
            problem = replace(problem, deterministic=True)
        launches = self._backward_launches.get(problem)
        if launches is None:
            limits = self._limits(problem)
            launches = self._backward_launches[problem] = choose_backward_launches(problem, self._arch(limits), limits)
        launcher = functools.partial(self._launcher, problem=problem)
        return differentiate(launches, problem, inputs, result, grads, launcher)

    def why_not_merge(self, problem: MergeProblem) -> str | None:
        """Refuses gradients, other dtypes and more rows than one launch can have."""
        if (reason := self._why_not_device(problem)) is not None:
            return reason
        if problem.needs_grad:
            return "a gradient is needed and this backend has no backward"
        if problem.dtype not in DTYPES:
            return f"{problem.dtype} is not merged; float16, bfloat16 and float32 are"
        if num_warps(problem.out_shape) > MOST_WARPS:
            return f"out {tuple(problem.out_shape)} has more rows than one launch takes"
        return None

    def merge(self, problem: MergeProblem, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """One launch. More parts than it takes are merged in groups, whose float32 results are merged in turn."""
        while len(outs) > MOST_PARTS:
            groups = [slice(begin, begin + MOST_PARTS) for begin in range(0, len(outs), MOST_PARTS)]
            merged = [self._merge_group(problem, outs[group], lses[group], torch.float32) for group in groups]
            outs, lses = [out for out, _ in merged], [lse for _, lse in merged]
        return self._merge_group(problem, outs, lses, problem.dtype)

    def _merge_group(
        self, problem: MergeProblem, outs: Sequence[Tensor], lses: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        key = (problem.out_shape, outs[0].dtype, dtype, *(x.stride() for x in (*outs, *lses)))
        merge = self._merge_launches.get(key)
        if merge is None:
            merge = self._merge_launches[key] = make_merge_launch(outs, lses, dtype)
        out = torch.empty_like(outs[0], dtype=dtype, memory_format=torch.contiguous_format)
        lse = torch.empty_like(lses[0], memory_format=torch.contiguous_format)
        if merge.launch is not None:
            self._launcher(merge.launch, problem)(merge_params(merge.template, outs, lses, out, lse))
        return out, lse

    def _call(self, problem: Problem, inputs: Inputs) -> AttentionCall | Int8Call:
        in_keys = values_in_keys(problem, inputs)
        key = problem, in_keys, strides_of(inputs)
        call = self._calls.get(key)
        if call is None:
            launches = self._launches(problem, in_keys)
            launcher = functools.partial(self._launcher, problem=problem)

            def call_for(problem: Problem, inputs: Inputs) -> AttentionCall:
                report = self._length_report(problem)
                return AttentionCall(problem, inputs, launches, launcher, self._scratch(problem), report)

            in_int8 = problem.qk_dtype is not None
            call = Int8Call(problem, launches.dtype, launcher, call_for) if in_int8 else call_for(problem, inputs)
            self._calls[key] = call
        return call

    def _length_report(self, problem: Problem) -> LengthReport | None:
        if problem.layout is not Layout.KVCACHE:
            return None
        if self._report is None:
            self._report = LengthReport(problem.device.type)
        return self._report

    def _launches(self, problem: Problem, values_in_keys: bool = False) -> Launches:
        launches = self._forward_launches.get((problem, values_in_keys))
        if launches is None:
            limits = self._limits(problem)
            launches = choose_launches(problem, self._arch(limits), limits, values_in_keys)
            self._forward_launches[problem, values_in_keys] = launches
        return launches

    # The emulator of the tests replaces these methods.

    def _why_not_device(self, problem: Problem | MergeProblem) -> str | None:
        return device.why_not(problem.device)

    def _limits(self, problem: Problem | MergeProblem) -> Limits:
        return module.device_limits(device.index_of(problem.device))

    def _arch(self, limits: Limits) -> int:
        return self._forced_arch or environment.cuda_arch() or limits.arch

    def _scratch(self, problem: Problem) -> Callable[[int, int], Scratch]:
        """A function that gives a number of counters and floats of the current stream."""
        index = device.index_of(problem.device)
        take, current_stream = scratch_of(index).take, module.current_stream
        return lambda num_counters, num_floats: take(num_counters, num_floats, current_stream(index))

    def _launcher(self, launch: KernelLaunch, problem: Problem | MergeProblem) -> Launcher:
        return device.launcher(launch, problem.device)
