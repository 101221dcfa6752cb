"""The ascend backend of the indexer: an operator of torch_npu. Not run on an NPU."""

from __future__ import annotations

from fastattention import environment
from fastattention.backends.ascend.chips import find_chip
from fastattention.backends.ascend.device import cann_major, device_name, why_no_npu
from fastattention.backends.common.gradients import why_not_in_transform
from fastattention.errors import ArgumentError
from fastattention.indexer.backend import IndexerBackend, Serve
from fastattention.indexer.problem import IndexerInputs, IndexerProblem


class AscendIndexerBackend(IndexerBackend):
    """npu_lightning_indexer on a 910B or 910C. Which of equal scores it takes is the operator's choice."""

    name = "ascend"

    def why_unavailable(self) -> str | None:
        """Why there is no NPU to run on."""
        return why_no_npu()

    def why_not(self, problem: IndexerProblem) -> str | None:
        """Refuses other chips and dtypes, and heads, pages and topk that the operator does not take."""
        from fastattention.backends.ascend import vendor

        if problem.device.type != "npu":
            return f"tensors are on {problem.device}; the ascend backend takes tensors on npu"
        if problem.in_transform:
            return why_not_in_transform("torch")
        if "vendor" not in environment.ascend_kernels():
            return "FASTATTENTION_ASCEND allows no operators of torch_npu, and we have no other indexer for NPUs"
        try:
            find_chip(device_name(problem.device.index or 0))
        except ArgumentError as error:
            return f"npu_lightning_indexer is used on the 910B and 910C only: {error}; use backend='torch'"
        return vendor.why_not_index(problem, cann_major())

    def how(self, problem: IndexerProblem) -> str:
        """The operator."""
        return "npu_lightning_indexer of torch_npu"

    def make_call(self, problem: IndexerProblem, inputs: IndexerInputs) -> Serve:
        """A call of the operator."""
        from fastattention.backends.ascend import vendor

        return lambda inputs: vendor.index(problem, inputs)
