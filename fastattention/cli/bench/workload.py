"""BenchWorkload: one attention problem to measure, its inputs, and its counts of operations and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["prefill", "decode", "packed", "backward"]
Limit = Literal["fma", "bf16_dot", "dram_read"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class BenchWorkload:
    """One attention problem. Sequence b has seqlens_q[b] queries and seqlens_k[b] keys; causal is bottom-right."""

    kind: Kind  # decode: one query against a cache; packed: variable lengths (varlen); backward: of a prefill
    dtype: str  # a key of DTYPES
    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    nheads: int
    nheads_k: int
    headdim: int
    causal: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """Torch's name of `dtype`."""
        return DTYPES[self.dtype]

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return len(self.seqlens_q)

    @property
    def label(self) -> str:
        """A name that distinguishes this workload, e.g. "decode bfloat16, 131072 keys, 32:4 heads of 128"."""
        heads = f"{self.nheads}:{self.nheads_k}" if self.nheads != self.nheads_k else str(self.nheads)
        if self.kind == "packed":
            tokens = f"{self.batch_size} sequences of {min(self.seqlens_k)} to {max(self.seqlens_k)}"
        else:
            tokens = f"{self.seqlens_k[0]} {'keys' if self.kind == 'decode' else 'tokens'}"
            tokens = f"{self.batch_size} x {tokens}" if self.batch_size > 1 else tokens
        mask = ", causal" if self.causal and self.kind != "decode" else ""
        return f"{self.kind} {self.dtype}, {tokens}, {heads} heads of {self.headdim}{mask}"

    @property
    def flops(self) -> float:
        """Multiplications and additions of both products, of five in a backward; a causal square counts half."""
        scores = sum(q * k for q, k in zip(self.seqlens_q, self.seqlens_k, strict=True))
        halved = 0.5 if self.causal and self.seqlens_q == self.seqlens_k else 1.0
        products = 5 if self.kind == "backward" else 2
        return 2.0 * products * scores * self.nheads * self.headdim * halved

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values: what a decode has to read at least once."""
        return 2 * sum(self.seqlens_k) * self.nheads_k * self.headdim * self.torch_dtype.itemsize

    @property
    def limit(self) -> Limit:
        """What bounds this workload on a processor: reading for a decode, otherwise arithmetic.

        float16 has no dot product on these processors: it is converted and multiplied as float32.
        """
        if self.kind == "decode":
            return "dram_read"
        return "bf16_dot" if self.dtype == "bfloat16" else "fma"


class Tensors(NamedTuple):
    """q, k and v of a workload.

    (batch_size, seqlen, heads, headdim); packed: (total, heads, headdim), sequences one after another.
    """

    q: Tensor
    k: Tensor
    v: Tensor


def make_tensors(workload: BenchWorkload, seed: int = 0) -> Tensors:
    """Normally distributed q, k and v, the same for the same seed."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def draw(seqlens: tuple[int, ...], heads: int) -> Tensor:
        tokens = (sum(seqlens),) if workload.kind == "packed" else (len(seqlens), seqlens[0])
        values = torch.randn(*tokens, heads, workload.headdim, generator=generator, dtype=torch.float32, device="cpu")
        return values.to(workload.torch_dtype)

    return Tensors(
        draw(workload.seqlens_q, workload.nheads),
        draw(workload.seqlens_k, workload.nheads_k),
        draw(workload.seqlens_k, workload.nheads_k),
    )


def make_gradient(workload: BenchWorkload) -> Tensor:
    """The gradient of the result that a backward starts from, normally distributed."""
    return make_tensors(workload, seed=1).q


def sequences(workload: BenchWorkload, tensors: Tensors) -> list[Tensors]:
    """The sequences of a batch, each (seqlen, heads, headdim). Views."""
    if workload.kind != "packed":
        return [Tensors(*parts) for parts in zip(*tensors, strict=True)]
    lengths = (workload.seqlens_q, workload.seqlens_k, workload.seqlens_k)
    split = [torch.split(tensor, list(seqlens)) for tensor, seqlens in zip(tensors, lengths, strict=True)]
    return [Tensors(*parts) for parts in zip(*split, strict=True)]
