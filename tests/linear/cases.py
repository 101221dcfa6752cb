"""Cases of linear attention, by name, and their random tensors."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from fastattention.linear.problem import LinearInputs
from fastattention.linear.validation import LinearOptions


@dataclass(frozen=True)
class LinearCase:
    """One call. seqlens: lengths of a varlen call; without them there are `batch_size` sequences of `seqlen` tokens."""

    rule: str = "delta"  # "delta", "head" (GLA with a gate a head) or "key" (GLA with a gate for every key dimension)
    batch_size: int = 1
    seqlen: int = 100
    seqlens: tuple[int, ...] | None = None
    nheads: int = 2
    nheads_k: int = 2
    headdim_k: int = 64
    headdim_v: int = 64
    gates: float = 1.0  # factor on the logarithms of sigmoids
    scale: float | None = None
    l2norm: bool = True  # for the delta rule, whose states grow without bound otherwise
    initial_state: bool = False
    returns_state: bool = True
    gate_dtype: torch.dtype | None = torch.float32  # None: the dtype of q
    layout: str = "contiguous"  # or "heads": q, k and v are views of (batch_size, heads, seqlen, headdim)

    @cached_property
    def sampled_by(self) -> Mapping[str, Hashable]:
        """Axis -> value, by which tests of this list are sampled instead of names. See tiers.py."""
        return {
            "rule": self.rule,
            "varlen": self.seqlens is not None,
            "batch": self.batch_size > 1,
            "seqlen": min(self.seqlen, 2) + (self.seqlen > 64),
            "headdims": (self.headdim_k, self.headdim_v),
            "group": self.nheads // self.nheads_k,
            "gates": self.gates,
            "scaled": self.scale is not None,
            "l2norm": self.l2norm,
            "state": (self.initial_state, self.returns_state),
            "gate_dtype": self.gate_dtype,
            "memory": self.layout,
        }

    def options(self, chunked: bool) -> LinearOptions:
        """The scalars of the call."""
        delta = self.rule == "delta"
        return LinearOptions(delta, chunked, self.scale, delta and self.l2norm, self.returns_state)

    def tensors(self, dtype: torch.dtype, device: str = "cpu") -> LinearInputs:
        """Random tensors, the same on every device."""
        generator = torch.Generator().manual_seed(zlib.crc32(repr(self).encode()))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        batch_size, seqlen = (1, sum(self.seqlens)) if self.seqlens is not None else (self.batch_size, self.seqlen)
        sequences = batch_size if self.seqlens is None else len(self.seqlens)
        q, k = (normal(batch_size, seqlen, self.nheads_k, self.headdim_k) for _ in range(2))
        v = normal(batch_size, seqlen, self.nheads, self.headdim_v)
        if not (self.rule == "delta" and self.l2norm):
            k = functional.normalize(k, dim=-1)
        last = (self.headdim_k,) if self.rule == "key" else ()
        g = self.gates * functional.logsigmoid(normal(batch_size, seqlen, self.nheads, *last))
        gate_dtype = self.gate_dtype or dtype
        beta = torch.rand((batch_size, seqlen, self.nheads), generator=generator) if self.rule == "delta" else None
        state = normal(sequences, self.nheads, self.headdim_k, self.headdim_v) if self.initial_state else None
        offsets = None
        if self.seqlens is not None:
            offsets = torch.tensor([0, *self.seqlens]).cumsum(0).to(torch.int32)
        if self.layout == "heads":
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        beta = None if beta is None else beta.to(gate_dtype)
        inputs = LinearInputs(q.to(dtype), k.to(dtype), v.to(dtype), g.to(gate_dtype), beta, state, offsets)
        return LinearInputs._make([None if x is None else x.to(device) for x in inputs])


def _every_rule() -> dict[str, LinearCase]:
    base = {
        "plain": LinearCase(),
        "one-token": LinearCase(seqlen=1, initial_state=True),
        "no-token": LinearCase(seqlen=0, initial_state=True),
        "odd": LinearCase(seqlen=157, headdim_k=40, headdim_v=24, nheads=3, nheads_k=3, initial_state=True),
        "headdim-128": LinearCase(seqlen=131, headdim_k=128, headdim_v=128, initial_state=True),
        "headdim-256": LinearCase(seqlen=67, headdim_k=256, headdim_v=256, nheads=1, nheads_k=1),
        "narrow-keys": LinearCase(seqlen=65, headdim_k=16, headdim_v=128, nheads=1, nheads_k=1),
        "headdim-1": LinearCase(seqlen=50, headdim_k=1, headdim_v=1),
        "grouped": LinearCase(batch_size=2, seqlen=70, nheads=6, nheads_k=2, initial_state=True),
        "varlen": LinearCase(seqlens=(5, 0, 64, 1, 97), initial_state=True),
        "strong-gates": LinearCase(seqlen=120, gates=100.0, initial_state=True),
        "weak-gates": LinearCase(seqlen=200, gates=1e-4),
        "no-state": LinearCase(returns_state=False),
        "scale": LinearCase(scale=0.7),
        "strides": LinearCase(batch_size=2, seqlen=75, layout="heads"),
        "gates-in-dtype": LinearCase(seqlen=80, gate_dtype=None),
    }
    return {
        f"{rule}-{name}": replace(case, rule=rule) for rule in ("delta", "head", "key") for name, case in base.items()
    }


CASES = _every_rule() | {
    "delta-no-l2norm": LinearCase(l2norm=False, initial_state=True),
}
