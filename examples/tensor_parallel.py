"""A tensor-parallel attention layer whose all-reduce overlaps with the attention of later rows.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py     # on CPUs, by gloo
    python examples/tensor_parallel.py                          # the same, on one rank

On GPUs take init_process_group("nccl"), a mesh of "cuda" and tensors of this rank's GPU.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fastattention.distributed import TilingAllReduce, deferred_attn


class Attention(nn.Module):
    """Causal self-attention; `deferred_attn` is computed by the projection that follows, block by block."""

    def __init__(self, hidden: int, nheads: int, headdim: int) -> None:
        super().__init__()
        self.headdim = headdim
        self.q, self.k, self.v = (nn.Linear(hidden, nheads * headdim) for _ in range(3))
        self.o = nn.Linear(nheads * headdim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.headdim)) for layer in (self.q, self.k, self.v))
        out: Tensor = self.o(deferred_attn(q, k, v, causal=True).flatten(2))
        return out


def main() -> None:
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    torch.manual_seed(0)  # the same weights and tokens on every rank
    whole = Attention(hidden=256, nheads=8, headdim=32)
    x = torch.randn(2, 512, 256)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # Blocks of rows by hand, so that this small example has some: by default they are autotuned.
    out_proj = TilingAllReduce(partition=lambda rows: [rows // 2, rows - rows // 2])
    styles = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": out_proj}
    layer = parallelize_module(copy.deepcopy(whole), mesh, styles)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), whole(x), rtol=1e-4, atol=1e-5)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: the output of the whole layer")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
