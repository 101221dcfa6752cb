"""AttentionCall: the launches of a problem for tensors of some strides, with the parameters that do not change."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fastattention.attention.problem import AttentionOutput, Inputs, Layout, Problem
from fastattention.backends.common.addresses import Addresses
from fastattention.backends.common.c_struct import Params
from fastattention.backends.common.layout import contiguous_strides
from fastattention.backends.common.results import keyless
from fastattention.backends.cuda.attention.config import WIDEST_OF_A_WARP
from fastattention.backends.cuda.attention.launches import (
    Launches,
    append_params,
    append_template,
    attention_template,
)
from fastattention.backends.cuda.attention.length_report import LengthReport
from fastattention.backends.cuda.attention.params import AttentionParams
from fastattention.backends.cuda.attention.scratch import Scratch
from fastattention.backends.cuda.common.memory import is_aligned, prepared
from fastattention.gpu_runtime.module import KernelLaunch

Launcher = Callable[[Params], None]


class AttentionCall:
    """Attention to tensors with the strides of `inputs`. Any number of threads may call it at a time.

    launcher: gives a function that enqueues a kernel; take_scratch: gives counters and floats of the current stream;
    report: where kernels report lengths that do not fit, None for calls without a cache
    """

    def __init__(
        self,
        problem: Problem,
        inputs: Inputs,
        launches: Launches,
        launcher: Callable[[KernelLaunch], Launcher],
        take_scratch: Callable[[int, int], Scratch],
        report: LengthReport | None = None,
    ) -> None:
        self._problem, self._launches, self._take_scratch, self._report = problem, launches, take_scratch, report
        append = launches.append
        self._append = None if append is None else (launcher(append), append_template(problem, inputs))
        self._launchers = [launcher(launch) for launch in launches.attention]
        self._addresses = Addresses(AttentionParams, inputs)
        q_k_v, others = self._addresses.given[:3], self._addresses.given[3:]
        self._make = AttentionParams.maker(*q_k_v, "out", "lse", *others, "partial_out", "partial_stats", "counters")
        self._template: bytes | None = None  # for calls whose tensors kernels read without a copy
        self._out = problem.out_shape, contiguous_strides(problem.out_shape)
        self._lse = (problem.lse_shape, contiguous_strides(problem.lse_shape)) if problem.keeps_lse else None
        self._partial_rows = self._num_counters = 0
        if (split := launches.split) is not None:
            self._partial_rows = split.num_slots * split.partial_rows
            self._num_counters = split.num_counters * problem.batch_size
        self._has_keys = problem.layout is not Layout.VARLEN or problem.batch_size > 0

    def __call__(self, inputs: Inputs) -> AttentionOutput:
        """Appends, then attends: by one kernel, or by a decode and the merge of its parts."""
        addresses = self._addresses.of(inputs)  # which may raise: before anything is written
        if self._report is not None:
            self._report.check()
        if self._append is not None:
            inputs = self._append_tokens(*self._append, inputs)
            addresses[0] = inputs.q.data_ptr()
        template = self._template
        # The strides are known to be aligned, but memory may begin anywhere.
        if template is None or (addresses[0] | addresses[1] | addresses[2]) % 16 != 0:  # addresses of q, k and v
            return self._attend_prepared(inputs)
        return self._attend(template, addresses, inputs.q.new_empty_strided(*self._out))

    def _attend_prepared(self, given: Inputs) -> AttentionOutput:
        """Attention to tensors that may need a copy, or that are new."""
        problem, launches = self._problem, self._launches
        inputs = prepared(given, launches.dtype)
        if not self._has_keys:
            # No CTA writes rows after the last sequence.
            return keyless(replace(problem, return_lse=problem.keeps_lse), inputs)
        report_at = 0 if self._report is None else self._report.address
        template = attention_template(problem, inputs, launches.waves, launches.split, report_at)
        if all(map(operator.is_, inputs, given)):  # a copy may have the same strides, and be wider
            self._template = template
        out = inputs.q.new_empty((*problem.out_shape[:-1], inputs.v.shape[-1]))
        lse = self._attend(template, self._addresses.of(inputs), out).lse
        out = out[..., : problem.headdim_v].to(problem.dtype).contiguous()
        return AttentionOutput(out, lse)

    def _attend(self, template: bytes, addresses: Sequence[int], out: Tensor) -> AttentionOutput:
        """Writes attention to out, which is as wide as v. addresses: those of the call's tensors, q, k and v first."""
        lse = None if self._lse is None else out.new_empty_strided(*self._lse, dtype=torch.float32)
        partials_at = stats_at = counters_at = 0
        if rows := self._partial_rows:
            columns = out.shape[-1]
            scratch = self._take_scratch(self._num_counters, rows * (columns + 2))
            partials_at, counters_at = scratch.partials_at, scratch.counters_at
            stats_at = partials_at + 4 * rows * columns
        results = out.data_ptr(), 0 if lse is None else lse.data_ptr()
        params = self._make(template, *addresses[:3], *results, *addresses[3:], partials_at, stats_at, counters_at)
        for launch in self._launchers:
            launch(params)
        return AttentionOutput(out, lse)

    def _append_tokens(self, launch: Launcher, template: bytes, inputs: Inputs) -> Inputs:
        """Writes the caches; returns the inputs with q rotated."""
        is_rotated = self._problem.rotary_dim > 0
        q_rotated = torch.empty_like(inputs.q, memory_format=torch.contiguous_format) if is_rotated else None
        launch(append_params(template, inputs, q_rotated))
        return inputs if q_rotated is None else inputs._replace(q=q_rotated)


def may_share_memory(problem: Problem) -> bool:
    """Whether there are kernels for a call whose v is the first columns of k."""
    wide = problem.headdim > WIDEST_OF_A_WARP and problem.headdim_v <= problem.headdim
    return wide and problem.cache_dtype is None


def values_in_keys(problem: Problem, inputs: Inputs) -> bool:
    """Whether v is the first columns of k, as in latent attention, and kernels can read both there."""
    k, v = inputs.k, inputs.v
    is_shared = may_share_memory(problem) and k.data_ptr() == v.data_ptr() and k.stride() == v.stride()
    return is_shared and is_aligned(k) and is_aligned(v)
