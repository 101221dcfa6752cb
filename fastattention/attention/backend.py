"""AttentionBackend: the interface of attention backends. ATTENTION_BACKENDS lists them.

docs/internals/adding-a-backend.md adds one.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from fastattention.attention.problem import AttentionOutput, Inputs, MergeProblem, Problem
from fastattention.backends.common.merge import merge_parts
from fastattention.backends.common.traffic import Extent, is_modelled, traffic_of
from fastattention.engine.backend import Backend
from fastattention.engine.explain import Traffic
from fastattention.engine.registry import Registry

INT8_PRODUCTS = "int8 products of queries and keys, approximate"  # what `Backend.how` says of qk_dtype


class AttentionBackend(Backend[Problem, Inputs, AttentionOutput]):
    """One engine of attention."""

    @abc.abstractmethod
    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        """Attention for a problem that `why_not` accepted.

        For Layout.KVCACHE with `inputs.k_new`, first appends to the caches in place, rotating k_new and q.
        """

    def make_call(self, problem: Problem, inputs: Inputs) -> Callable[[Inputs], AttentionOutput]:
        """A function that does what `forward` does for this problem."""
        return functools.partial(self.forward, problem)

    def traffic(self, problem: Problem, extent: Extent) -> Traffic | None:
        """Main-memory traffic of a problem that `why_not` accepted; only its bounds where kernels are not modelled.

        None for a problem that is not modelled at all (`is_modelled`).
        """
        return traffic_of(problem, extent, self.name, None, None) if is_modelled(problem) else None

    def why_not_merge(self, problem: MergeProblem) -> str | None:
        """Why this backend cannot merge parts, as `why_not`. The operations of torch merge any."""
        return None

    def merge(self, problem: MergeProblem, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(out, lse) of parts that `why_not_merge` accepted, as `fastattention.merge_attn_states` defines them.

        Any strides, but the last axis of outs is contiguous. lses: float32, (batch_size, nheads, seqlen_q) or varlen.
        """
        return merge_parts(outs, lses)

    @abc.abstractmethod
    def describe(self) -> str:
        """One line for `fastattention info`: what it runs on here, e.g. instruction set and threads."""


# Most specialized first: `backend="auto"` takes the first that can serve a call.
ATTENTION_BACKENDS: Registry[Problem, AttentionBackend] = Registry(
    {
        "cuda": "fastattention.backends.cuda.attention.backend:CudaBackend",
        "ascend": "fastattention.backends.ascend.backend:AscendBackend",
        "cpu": "fastattention.backends.cpu.attention.backend:CpuBackend",
        "sdpa": "fastattention.backends.sdpa.backend:SdpaBackend",
    }
)
