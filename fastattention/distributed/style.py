"""TilingAllReduce: the output projection of attention under torch's tensor parallelism."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import RowwiseParallel

from fastattention.distributed import npu, transports
from fastattention.distributed.deferred import DeferredAttention
from fastattention.distributed.row_partitions import worth_dividing
from fastattention.errors import ArgumentError, UnsupportedError

PartitionOf = Callable[[int], Sequence[int]]


class NotTiledWarning(UserWarning):
    """Warns that attention, projection and all-reduce are not overlapped, with the reason."""


@dataclasses.dataclass(frozen=True)
class ProjectionTiling:
    """How a projection computes deferred attention."""

    group: dist.ProcessGroup
    partition: str | PartitionOf  # "auto", or rows of each block as a function of all rows
    transport: str  # a name that attention_out_proj_allreduce knows, or npu.NAME

    def __deepcopy__(self, memo: object) -> ProjectionTiling:
        return self  # copies of a model share its groups

    def may_divide(self, num_rows: int, linear: nn.Linear) -> bool:
        """Whether `num_rows` rows may be worth two blocks. Otherwise the ranks need not agree on anything."""
        num_bytes = num_rows * linear.out_features * linear.weight.dtype.itemsize
        return self.partition != "auto" or worth_dividing(num_rows, num_bytes)

    def settle(self, x: Any, linear: nn.Linear) -> Any:
        """Deferred attention for `project` to compute; otherwise the tensor to which the layer is applied."""
        deferred = isinstance(x, DeferredAttention)
        if self.may_divide(x.num_rows if deferred else x.shape[:-1].numel(), linear):
            reason = self._why_not(x, linear)
            if reason is None:
                return x
            text = f"attention, projection and all-reduce run one after the other: {reason}"
            warnings.warn(text, NotTiledWarning, stacklevel=2)
        return x.compute() if deferred else x

    def _why_not(self, x: Any, linear: nn.Linear) -> str | None:
        if torch.compiler.is_compiling():
            return "the call is traced by torch.compile"
        if not isinstance(x, DeferredAttention):
            return "the projection was given a tensor, not deferred attention"
        weight, bias = local_parameters(linear)
        if self.transport == npu.NAME and (reason := npu.why_not(x.num_rows, weight, self.group)) is not None:
            return reason
        return x.why_not_tiled(weight, bias)

    def project(self, attention: DeferredAttention, linear: nn.Linear) -> Tensor:
        """(batch_size, seqlen_q, hidden), the same on every rank."""
        weight, bias = local_parameters(linear)
        if self.transport == npu.NAME:
            return npu.linear_allreduce(attention.compute().flatten(2), weight, bias, self.group)
        partition = self.partition if isinstance(self.partition, str) else list(self.partition(attention.num_rows))
        return attention.project(weight, bias, group=self.group, partition=partition, transport=self.transport)


def local_parameters(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """(weight, bias) as this rank holds them."""
    weight, bias = (each.to_local() if isinstance(each, DTensor) else each for each in (linear.weight, linear.bias))
    return weight, bias


def check_options(partition: object, transport: str) -> None:
    """Raises ArgumentError for a partition or a transport that no projection could use."""
    if partition != "auto" and not callable(partition):
        raise ArgumentError(
            f'partition={partition!r} must be "auto" or a function from rows of a call to those of its blocks'
        )
    if transport != npu.NAME:
        transports.check_name(transport)


class TiledForward:
    """The forward of a projection: row blocks for deferred attention, the original forward for tensors."""

    def __init__(self, linear: nn.Linear, tiling: ProjectionTiling) -> None:
        self.linear, self.tiling, self.of_tensors = linear, tiling, linear.forward

    def __call__(self, x: DeferredAttention | Tensor) -> Tensor:
        """(..., hidden) from the result of `settle`."""
        return self.tiling.project(x, self.linear) if isinstance(x, DeferredAttention) else self.of_tensors(x)


class TilingAllReduce(RowwiseParallel):
    """RowwiseParallel for the output projection of attention, with attention, GEMM and all-reduce in row blocks.

        class Attention(nn.Module):
            def forward(self, x):
                q, k, v = (layer(x).unflatten(-1, (-1, self.headdim)) for layer in (self.q, self.k, self.v))
                return self.o(deferred_attn(q, k, v, causal=True).flatten(2))

        parallelize_module(attention, mesh, {
            "q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": TilingAllReduce(),
        })

    - `partition`: "auto" chooses the blocks; or a function from all rows of a call, batch_size * seqlen_q, to the rows
        of each block
    - `transport`: how blocks are summed, as in `attention_out_proj_allreduce`. "npu_mm_all_reduce_base" has no blocks,
      but GEMM and sum as one operator of Ascend NPUs (not run on an NPU)

    While the rows of one block are summed over the ranks, attention and GEMM of the next are computed. Given a tensor,
    the layer works as RowwiseParallel. It also does so for deferred attention that needs gradients, and under
    torch.compile. A NotTiledWarning says so, unless the call has too few rows for blocks anyway, as in decoding. In a
    model that is not parallelized any layer computes deferred attention. Only RowwiseParallel itself must be given the
    tensor.
    """

    def __init__(self, *, partition: str | PartitionOf = "auto", transport: str = "auto") -> None:
        super().__init__()
        check_options(partition, transport)
        self._partition, self._transport = partition, transport

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise UnsupportedError(
                f"TilingAllReduce is for the output projection of attention, an nn.Linear, got {type(module).__name__}"
            )
        tiling = ProjectionTiling(device_mesh.get_group(), self._partition, self._transport)
        module.forward = TiledForward(module, tiling)  # type: ignore[method-assign, assignment]
        super()._apply(module, device_mesh)
        return module

    # RowwiseParallel registers these two around forward.

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        x = mod.forward.tiling.settle(inputs[0], mod)
        if isinstance(x, DeferredAttention):
            return x
        prepare = RowwiseParallel._prepare_input_fn
        return prepare(input_layouts, desired_input_layouts, mod, (x,), device_mesh)  # type: ignore[no-untyped-call]

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: Any, mod: Any, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        if not isinstance(outputs, DTensor):  # outputs of deferred attention have been summed
            return outputs
        prepare = RowwiseParallel._prepare_output_fn
        return prepare(output_layouts, use_local_output, mod, outputs, device_mesh)  # type: ignore[no-untyped-call]
