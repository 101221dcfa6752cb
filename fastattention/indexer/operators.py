"""INDEXER: the operator of the indexer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from fastattention.engine.kinds import check_readable
from fastattention.engine.operator import Operator
from fastattention.indexer.backend import INDEXER_BACKENDS, IndexerBackend
from fastattention.indexer.problem import IndexerInputs, IndexerOutput, IndexerProblem
from fastattention.indexer.validation import IndexerOptions, as_backends_read, check_numbers, prepare


class Indexer(Operator[IndexerInputs, IndexerOptions, IndexerProblem, IndexerInputs, IndexerOutput, IndexerBackend]):
    """Calls write nothing and have no gradients: which keys are the best does not change with small changes of them."""

    name = "indexer"
    registry = INDEXER_BACKENDS
    fallback = "torch"
    given = inputs = IndexerInputs
    options = IndexerOptions
    output = IndexerOutput
    tensors = IndexerInputs._fields
    scalars = IndexerOptions._fields
    results = ("indices",)
    asked_by: ClassVar[Mapping[str, str]] = {}

    def prepare(self, given: IndexerInputs, options: IndexerOptions) -> tuple[IndexerProblem, IndexerInputs]:
        try:
            return prepare(given, options)
        except (RuntimeError, TypeError):
            check_readable(given._asdict())
            raise

    def as_read(self, problem: IndexerProblem, inputs: IndexerInputs, names: Sequence[str]) -> IndexerInputs:
        return as_backends_read(inputs)

    def recheck(self, problem: IndexerProblem) -> Callable[[IndexerInputs, IndexerOptions], IndexerInputs]:
        def check(given: IndexerInputs, _: IndexerOptions) -> IndexerInputs:
            check_numbers(given, problem.batch_size)
            return given

        return check

    def result_shapes(
        self, given: IndexerInputs, options: IndexerOptions, differentiated: bool
    ) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        return {"indices": ((given.q.shape[0], options.topk), torch.int32)}

    def flops(self, arguments: Mapping[str, Any], backward: bool) -> int:
        """Products of all queries with all keys of a sequence, and their weighted sums."""
        total_q, nheads, headdim = arguments["q"].shape
        table = arguments["block_table"]
        keys = arguments["k"].shape[1] * (1 if table is None else table.shape[1])
        return int(2 * total_q * nheads * keys * (headdim + 1))


INDEXER = Indexer()
