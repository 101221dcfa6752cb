"""Linear attention token by token: launches kernels/step.cuh for tensors of some shapes and strides."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastattention.backends.common.c_struct import Params
from fastattention.backends.common.layout import contiguous_strides, first_strides, named_strides, pointers
from fastattention.backends.cuda.common.dtype_codes import DTYPE_CODES
from fastattention.backends.cuda.linear.params import StepParams
from fastattention.backends.cuda.linear.step_heuristics import choose_step, column_tiles, num_ctas
from fastattention.gpu_runtime.chips import Limits
from fastattention.gpu_runtime.module import KernelLaunch
from fastattention.linear.problem import LinearInputs, LinearOutput, LinearProblem

_make_params = StepParams.maker(*LinearInputs._fields, "out", "final_state")
Launcher = Callable[[Params], None]


class StepCall:
    """Serves calls with the strides of `inputs`. Any number of threads may call it at a time."""

    def __init__(
        self, problem: LinearProblem, inputs: LinearInputs, limits: Limits, launcher: Callable[[KernelLaunch], Launcher]
    ) -> None:
        """launcher: gives a function that enqueues a kernel."""
        config = choose_step(problem, limits.num_sms)
        launch = KernelLaunch(config, 0, num_ctas(problem, config.columns))
        self._launch = launcher(launch) if launch.num_ctas else None
        self._template = step_template(problem, inputs, config.columns)
        self._out = problem.out_shape, contiguous_strides(problem.out_shape)
        self._state = (problem.state_shape, contiguous_strides(problem.state_shape)) if problem.returns_state else None

    def __call__(self, inputs: LinearInputs) -> LinearOutput:
        """One launch."""
        addresses = pointers(*inputs)  # which may raise: before anything is allocated
        out = inputs.v.new_empty_strided(*self._out)
        state = None if self._state is None else out.new_empty_strided(*self._state, dtype=torch.float32)
        if self._launch is not None:
            results = out.data_ptr(), 0 if state is None else state.data_ptr()
            self._launch(_make_params(self._template, *addresses, *results))
        return LinearOutput(out, state)


def step_template(problem: LinearProblem, inputs: LinearInputs, columns: int) -> bytes:
    """All parameters but addresses. columns: columns of a state that a CTA takes."""
    return StepParams.template(
        **named_strides("q", first_strides(inputs.q), "batch token head"),
        **named_strides("k", first_strides(inputs.k), "batch token head"),
        **named_strides("v", first_strides(inputs.v), "batch token head"),
        **named_strides("g", first_strides(inputs.g), "batch token head"),
        **named_strides("beta", first_strides(inputs.beta), "batch token head"),
        **named_strides("initial", first_strides(inputs.initial_state), "sequence head row"),
        seqlen=problem.seqlen,
        nheads=problem.nheads,
        group_size=problem.group_size,
        headdim_k=problem.headdim_k,
        headdim_v=problem.headdim_v,
        column_tiles=column_tiles(problem, columns),
        g_format=DTYPE_CODES[problem.gate_dtype],
        beta_format=DTYPE_CODES[problem.beta_dtype or torch.float32],
        l2norm=problem.l2norm,
        overwrites=problem.delta_rule,
        scale=problem.scale,
    )
