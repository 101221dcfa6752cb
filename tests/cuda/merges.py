"""Merges of parts, for the emulator and for GPUs: their arguments and expected results."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from fastattention.backends.common.merge import merge_parts
from fastattention.testing.case import Memory
from fastattention.testing.memory import place
from fastattention.testing.oracle import largest_error

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
Merger = Callable[[list[Tensor], list[Tensor]], tuple[Tensor, Tensor]]
# Besides rounding, lse and weights have the errors of a GPU's fast exp2 and log2.
TOLERANCE = 2**-20


class MergeCase(NamedTuple):
    """Parts of one shape, with memory layouts in turn."""

    name: str
    num_parts: int
    out_shape: tuple[int, ...]
    memory: tuple[Memory, ...] = ("contiguous",)
    memory_lse: tuple[Memory, ...] = ("contiguous",)

    def parts(self, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """Parts with the same values each time. A quarter of the rows have no keys and hold NaN, like memory around.

        The lse of such a row is -inf, or +inf as flash-attn has it.
        """
        generator = torch.Generator().manual_seed(zlib.crc32(repr(self).encode()))
        *batch, tokens, nheads, _ = self.out_shape
        outs, lses = [], []
        for part in range(self.num_parts):
            out = torch.randn(self.out_shape, generator=generator).to(dtype)
            lse = 3.0 * torch.randn(*batch, nheads, tokens, generator=generator)
            lse[torch.rand(lse.shape, generator=generator) < 0.25] = (-1) ** (part + 1) * torch.inf
            lses.append(place(lse[None], self.memory_lse[part % len(self.memory_lse)]).view[0])
            out[lses[-1].isinf().transpose(-1, -2)] = torch.nan
            outs.append(place(out, self.memory[part % len(self.memory)]).view)
        return outs, lses


def _case(name: str, num_parts: int, *out_shape: int) -> MergeCase:
    return MergeCase(name, num_parts, out_shape)


FOR_LSE: tuple[Memory, ...] = get_args(Memory)
# Rows without keys differ from head to head.
FOR_OUT = tuple(memory for memory in FOR_LSE if memory != "one_head_expanded")

CASES = [
    _case("a-step", 3, 1, 1, 32, 128),
    *(_case(f"{num_parts}-parts", num_parts, 2, 3, 5, 64) for num_parts in range(1, 10)),
    _case("17-parts", 17, 2, 3, 5, 40),
    _case("65-parts", 65, 1, 2, 3, 8),
    *(
        _case(f"headdim-{width}", 3, 2, 3, 3, width)
        for width in (1, 2, 3, 4, 31, 66, 127, 129, 200, 255, 256, 300, 512)
    ),
    _case("varlen", 3, 7, 5, 96),
    _case("varlen-odd", 9, 7, 3, 33),
    _case("one-row", 2, 1, 1, 1, 64),
    _case("no-batch", 2, 0, 3, 2, 8),
    _case("no-tokens", 2, 0, 2, 8),
    _case("no-columns", 2, 2, 3, 2, 0),
    *(MergeCase(memory, 3, (2, 3, 4, 64), (memory,)) for memory in FOR_OUT),
    MergeCase("varlen-heads_major", 3, (5, 4, 64), ("heads_major",), ("heads_major",)),
    MergeCase("every-memory", 8, (2, 3, 4, 36), FOR_OUT, FOR_LSE[::-1]),
]


def exact(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64, by the definition: weights are exp(lse_i - lse)."""
    stacked = torch.stack(list(lses)).double().transpose(-1, -2).unsqueeze(-1)
    stacked[stacked.isposinf()] = -torch.inf
    lse = stacked.logsumexp(dim=0)
    weights = (stacked - lse).exp().masked_fill(stacked.isneginf(), 0.0)
    values = torch.stack(list(outs)).double().masked_fill(stacked.isneginf(), 0.0)
    return (weights * values).sum(dim=0), lse.squeeze(-1).transpose(-1, -2)


def check_merge(merge: Merger, outs: list[Tensor], lses: list[Tensor]) -> None:
    """The result is as near to the exact one as that of torch, and repeats bit for bit. All tensors are on the CPU."""
    out, lse = merge(outs, lses)
    assert (out.shape, out.dtype, out.is_contiguous()) == (outs[0].shape, outs[0].dtype, True)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == (lses[0].shape, torch.float32, True)
    expected = exact(outs, lses)
    for got, true, plain in zip((out, lse), expected, merge_parts(outs, lses), strict=True):
        assert torch.equal(got.isneginf(), true.isneginf())
        assert largest_error(got, true) <= 2.0 * largest_error(plain, true) + TOLERANCE
    dead = torch.stack(lses).isinf().all(dim=0).transpose(-1, -2)
    assert not out[dead].any()
    again = merge(outs, lses)
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])


def check_what_is_not_finite(merge: Merger, dtype: torch.dtype) -> None:
    """NaN and infinity of parts that take part stay, in their row and column alone; so does an lse that is NaN."""
    outs, lses = MergeCase("not-finite", 3, (2, 3, 4, 40)).parts(dtype)
    for lse in lses:
        lse[1].clamp_(min=-5.0)
    for out in outs:
        out[1].nan_to_num_()
    outs[0][1, 0, 0, 3], outs[2][1, 1, 2, 17] = torch.nan, torch.inf
    lses[1][1, 3, 2] = torch.nan
    out, lse = merge(outs, lses)
    plain_out, plain_lse = merge_parts(outs, lses)
    for got, plain in ((out, plain_out), (lse, plain_lse)):
        assert torch.equal(got.isnan(), plain.isnan())
        assert torch.equal(got.isinf(), plain.isinf())
    assert out[1].isnan().sum() == 1 + 40
    assert out[1].isinf().sum() == 1
    assert lse.isnan().sum() == 1
