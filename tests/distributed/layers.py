"""A block of attention as users write it, whole and divided among ranks, and its exact result."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fastattention import fast_attn_func
from fastattention.distributed import deferred_attn, deferred_attn_with_kvcache

HIDDEN, HEADDIM, NHEADS, NHEADS_K = 40, 16, 8, 4
Attend = Callable[[Tensor, Tensor, Tensor], Any]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return deferred_attn(q, k, v, causal=True)


def computed(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return fast_attn_func(q, k, v, causal=True)


def window(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return deferred_attn(q, k, v, window_size=(5, 2), softmax_scale=0.5)


def cached(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Attention to the same keys in a cache with room, the second sequence padded on the left."""
    batch_size, seqlen = k.shape[:2]
    caches = (F.pad(each, (0, 0, 0, 0, 0, 6), value=float("nan")) for each in (k, v))
    padding = torch.tensor([0, *[4] * (batch_size - 1)], dtype=torch.int32)
    return deferred_attn_with_kvcache(q, *caches, cache_seqlens=seqlen, cache_leftpad=padding, causal=True)


class Block(nn.Module):
    """Attention as users write it."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.q = nn.Linear(HIDDEN, NHEADS * HEADDIM)
        self.k = nn.Linear(HIDDEN, NHEADS_K * HEADDIM)
        self.v = nn.Linear(HIDDEN, NHEADS_K * HEADDIM)
        self.o = nn.Linear(NHEADS * HEADDIM, HIDDEN)

    def heads(self, x: Tensor) -> Iterator[Tensor]:
        return (layer(x).unflatten(-1, (-1, HEADDIM)) for layer in (self.q, self.k, self.v))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o(self.attend(*self.heads(x)).flatten(2))
        return out


def whole(attend: Attend = causal) -> Block:
    """A whole block, the same on every rank."""
    torch.manual_seed(5)
    return Block(attend)


def parallel(block: Block, size: int, o: Any) -> Block:
    """A copy whose heads are divided among `size` ranks, and whose output projection has the style `o`."""
    mesh = init_device_mesh(block.o.weight.device.type, (size,))
    styles = {name: ColwiseParallel() for name in ("q", "k", "v")}
    made = parallelize_module(copy.deepcopy(block), mesh, {**styles, "o": o})
    assert isinstance(made, Block)
    return made


def thirds(num_rows: int) -> list[int]:
    return [num_rows // 5, num_rows // 3, num_rows - num_rows // 5 - num_rows // 3]


def tokens(batch_size: int = 3, seqlen: int = 11) -> Tensor:
    return torch.randn(batch_size, seqlen, HIDDEN, generator=torch.Generator().manual_seed(2))


def exact(block: Block, x: Tensor) -> Tensor:
    """The exact result in float64, without our code, by the mask of block.attend."""
    q, k, v = Block.heads(copy.deepcopy(block).double(), x.double())  # type: ignore[misc]
    k, v = (each.repeat_interleave(NHEADS // NHEADS_K, dim=2) for each in (k, v))
    key = torch.arange(x.shape[1], device=x.device)
    row = key[:, None]
    seen = (key >= row - 5) & (key <= row + 2) if block.attend is window else key <= row
    seen = seen.expand(len(x), -1, -1).clone()
    if block.attend is cached:
        seen[1:, :, :4] = False
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (0.5 if block.attend is window else HEADDIM**-0.5)
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num()
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)
    return F.linear(out, block.o.weight.double(), block.o.bias.double())


def assert_as_exact_as(given: Tensor, usual: Tensor, expected: Tensor) -> None:
    """Asserts at most twice the error of the usual implementation, or of eight roundings."""
    errors = [(each.double() - expected).abs().max().item() for each in (given, usual)]
    floor = 8 * torch.finfo(given.dtype).eps * expected.abs().max().item()
    assert errors[0] <= max(2 * errors[1], floor), f"error {errors[0]:.1e}, that of the usual way {errors[1]:.1e}"
