"""The launches of a call of the indexer, for tensors of some shapes and strides: parameters, memory, calls."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastattention.backends.common.c_struct import Params
from fastattention.backends.common.indexer import shared_params
from fastattention.backends.common.layout import pointers
from fastattention.backends.cuda.common.memory import aligned_as, check_float16_range
from fastattention.backends.cuda.common.numbers import divisor
from fastattention.backends.cuda.indexer.heuristics import choose
from fastattention.backends.cuda.indexer.params import IndexerParams
from fastattention.gpu_runtime.chips import Limits
from fastattention.gpu_runtime.module import KernelLaunch
from fastattention.indexer.problem import IndexerInputs, IndexerOutput, IndexerProblem

_make_params = IndexerParams.maker(*IndexerInputs._fields, "scores", "indices")
Launcher = Callable[[Params], None]


class IndexerCall:
    """Serves calls of a problem. Any number of threads may call it at a time."""

    def __init__(
        self, problem: IndexerProblem, arch: int, limits: Limits, launcher: Callable[[KernelLaunch], Launcher]
    ) -> None:
        """launcher: gives a function that enqueues a kernel."""
        self._problem, self._division = problem, choose(problem, arch, limits)
        self._templates_as_given: list[bytes] | None = None  # for calls whose tensors kernels read without a copy
        self._steps = [  # the queries of each launch, and its kernels
            (first, rows, self._launchers(rows, launcher))
            for first in range(0, problem.total_q, max(self._division.rows, 1))
            for rows in [min(self._division.rows, problem.total_q - first)]
        ]

    def _launchers(self, rows: int, launcher: Callable[[KernelLaunch], Launcher]) -> list[Launcher]:
        """Scores, unless every query takes all keys, and then the best keys."""
        division = self._division
        launches = [KernelLaunch(division.top_keys, 0, rows)]
        if self._problem.most_keys > self._problem.topk:
            ctas = _row_tiles(rows, division.config.queries) * -(-division.stride // division.part_keys)
            launches.insert(0, KernelLaunch(division.config, 0, ctas))
        return [launcher(one) for one in launches]

    def __call__(self, inputs: IndexerInputs) -> IndexerOutput:
        """Two launches for as many queries as scores have memory for."""
        division, problem = self._division, self._problem
        dtype = division.config.dtype
        check_float16_range(dtype, "torch", q=inputs.q, k=inputs.k)
        keys = inputs.k.unsqueeze(2)
        q, aligned = aligned_as(inputs.q, dtype), aligned_as(keys, dtype)
        as_given = q is inputs.q and aligned is keys
        if not as_given:
            inputs = inputs._replace(q=q, k=aligned.squeeze(2))
        templates = self._templates_as_given if as_given else None
        if templates is None:
            templates = [self._template(inputs, first, rows) for first, rows, _ in self._steps]
            self._templates_as_given = templates if as_given else self._templates_as_given
        indices = inputs.q.new_empty(problem.out_shape, dtype=torch.int32)
        scores = inputs.q.new_empty((division.rows, division.stride), dtype=torch.float32)
        addresses = pointers(*inputs, scores, indices)
        for template, (_, _, launchers) in zip(templates, self._steps, strict=True):
            params = _make_params(template, *addresses)
            for launch in launchers:
                launch(params)
        return IndexerOutput(indices)

    def _template(self, inputs: IndexerInputs, first: int, rows: int) -> bytes:
        """All parameters but addresses."""
        problem, division = self._problem, self._division
        return IndexerParams.template(
            **shared_params(problem, inputs),
            **divisor("page", problem.k_seqlen),
            scores_stride=division.stride,
            most_keys=problem.most_keys,
            first_row=first,
            num_rows=rows,
            row_tiles=_row_tiles(rows, division.config.queries),
            part_keys=division.part_keys,
        )


def _row_tiles(rows: int, queries: int) -> int:
    return -(-rows // queries)
