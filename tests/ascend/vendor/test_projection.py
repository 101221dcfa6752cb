"""TilingAllReduce by the vendor's operator: two ranks, whose sums are gloo's, under the real schema."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed.team import Team
from tiers import slow
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from ascend.vendor.communication import name_group
from ascend.vendor.environment import import_torch_npu, skip_without_torch_npu
from ascend.vendor.recorder import Recorder
from fastattention.distributed import TilingAllReduce, deferred_attn, npu

skip_without_torch_npu()

HIDDEN, HEADDIM = 24, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(HIDDEN, 4 * HEADDIM) for _ in range(3))
        self.o = nn.Linear(4 * HEADDIM, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, HEADDIM)) for layer in self.qkv)
        out: Tensor = self.o(deferred_attn(q, k, v, causal=True).flatten(2))
        return out


class SummedByGloo:
    def all_reduce(self, partial: Tensor) -> Tensor:
        dist.all_reduce(partial)
        return partial


@torch.no_grad()
def on_a_rank() -> list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]]:
    """Compares with the whole block; returns the operator's calls: dtype and shapes of x1 and x2."""
    import_torch_npu()
    name_group("gloo", SummedByGloo())
    whole = Block().half()
    x = torch.randn(2, 700, HIDDEN).half()
    mesh = init_device_mesh("cpu", (2,))
    styles = {"qkv.*": ColwiseParallel(), "o": TilingAllReduce(transport=npu.NAME)}
    expected = whole(x).double()
    block = parallelize_module(whole, mesh, styles)
    with pytest.MonkeyPatch.context() as patch, Recorder() as recorder:
        patch.setattr("fastattention.distributed.row_partitions.LEAST_BYTES", 1)
        patch.setattr(npu, "why_not", lambda *_: None)  # tensors are not on an NPU
        patch.setattr(npu, "communicator_name", lambda group: "gloo")
        out = block(x)
        block(x[:, :1])  # decodes without the operator
    eps = torch.finfo(torch.float16).eps
    torch.testing.assert_close(out.double(), expected, rtol=2 * eps, atol=2 * eps)
    return [
        (call.arguments["x1"].dtype, *(tuple(call.arguments[name].shape) for name in ("x1", "x2")))
        for call in recorder.calls
    ]


@slow
def test_a_projection_is_one_call_of_the_operator(tmp_path: Path) -> None:
    team = Team(2, tmp_path)
    try:
        outcomes = team.run(on_a_rank)
    finally:
        team.close()
    assert outcomes == [[(torch.float16, (1400, 2 * HEADDIM), (2 * HEADDIM, HIDDEN))]] * 2
