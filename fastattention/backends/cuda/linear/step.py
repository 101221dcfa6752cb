"""Token by token: the launch of kernels/step.cuh for tensors of some shapes and strides."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastattention.backends.common.layout import contiguous_strides, first_strides, pointers
from fastattention.backends.common.params import Params
from fastattention.backends.cuda.linear.heuristics import choose_step, column_tiles, num_ctas
from fastattention.backends.cuda.linear.params import GATE_FORMATS, StepParams
from fastattention.gpu_runtime.chips import Limits
from fastattention.gpu_runtime.module import KernelLaunch
from fastattention.linear.problem import LinearInputs, LinearOutput, LinearProblem

Launcher = Callable[[Params], None]


class StepCall:
    """How calls with the strides of `inputs` are served. Any number of threads may call it at a time."""

    def __init__(
        self, problem: LinearProblem, inputs: LinearInputs, limits: Limits, launcher: Callable[[KernelLaunch], Launcher]
    ) -> None:
        """launcher: gives what enqueues a kernel."""
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
            self._launch(StepParams.make(self._template, *addresses, *results))
        return LinearOutput(out, state)


def step_template(problem: LinearProblem, inputs: LinearInputs, columns: int) -> bytes:
    """All parameters but addresses. columns: of a state, that a CTA takes."""
    tokens = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.initial_state)
    return StepParams.template(
        *(stride for tensor in tokens for stride in first_strides(tensor)),
        problem.seqlen,
        problem.nheads,
        problem.group_size,
        problem.headdim_k,
        problem.headdim_v,
        column_tiles(problem, columns),
        GATE_FORMATS[problem.gate_dtype],
        GATE_FORMATS[problem.beta_dtype],
        problem.l2norm,
        problem.scale,
    )
