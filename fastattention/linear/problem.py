"""LinearProblem: everything about one call of linear attention except its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Rule(NamedTuple):
    """What a rule of linear attention takes beside q, k and v. Public functions name it."""

    head_gates: bool  # whether g may hold one gate a head
    key_gates: bool  # whether g may hold a gate for every key dimension
    has_beta: bool  # factors of what tokens write
    overwrites: bool = False  # a delta rule: tokens replace what the state holds for their keys
    has_skip: bool = False  # whether values may go to the output directly


RULES = {
    "gla": Rule(head_gates=True, key_gates=True, has_beta=False),
    "gated_delta_rule": Rule(head_gates=True, key_gates=False, has_beta=True, overwrites=True),
    "kda": Rule(head_gates=False, key_gates=True, has_beta=True, overwrites=True),
    "ssd": Rule(head_gates=True, key_gates=False, has_beta=True, has_skip=True),
}


@dataclass(frozen=True, slots=True)
class LinearProblem:
    """A validated call. Hashable, so that the choice of a backend and the plan of a call can be kept.

    Tensors of a backend have these shapes, tokens being (batch_size, seqlen):

        q, k           (batch_size, seqlen, nheads_k, headdim_k)
        v, out         (batch_size, seqlen, nheads, headdim_v)
        g              (batch_size, seqlen, nheads, headdim_k) when gate_per_key, else (batch_size, seqlen, nheads)
        beta           (batch_size, seqlen, nheads), but of gla
        skip           (nheads,) of ssd, float32
        states         (num_sequences, nheads, headdim_k, headdim_v), float32
        cu_seqlens     (num_sequences + 1,), int32; then batch_size is 1 and seqlen counts the tokens of all sequences

    Head h of v has the queries and keys of head h // group_size.
    """

    rule: str  # of RULES
    gate_per_key: bool
    chunked: bool  # False: token by token
    batch_size: int
    seqlen: int
    num_sequences: int
    varlen: bool
    nheads: int
    nheads_k: int
    headdim_k: int
    headdim_v: int
    dtype: torch.dtype  # dtype of q, k, v and out
    gate_dtype: torch.dtype
    beta_dtype: torch.dtype | None
    device: torch.device
    scale: float
    l2norm: bool  # whether every query and key is normalized
    returns_state: bool
    grads: tuple[str, ...]  # fields of LinearInputs that require a gradient
    in_transform: bool = False  # torch.func or forward-mode differentiation follows the call

    @property
    def axes(self) -> str:
        """The sizes of the call by the names of their axes."""
        names = "batch_size seqlen nheads nheads_k headdim_k headdim_v".split()
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    @property
    def delta_rule(self) -> bool:
        """Whether tokens overwrite what the state holds for their keys, as far as beta says."""
        return RULES[self.rule].overwrites

    @property
    def group_size(self) -> int:
        """Heads of v that share a head of q and k."""
        return self.nheads // self.nheads_k

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """(batch_size, seqlen, nheads, headdim_v)."""
        return self.batch_size, self.seqlen, self.nheads, self.headdim_v

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """(num_sequences, nheads, headdim_k, headdim_v)."""
        return self.num_sequences, self.nheads, self.headdim_k, self.headdim_v


class LinearInputs(NamedTuple):
    """The tensors of a call. The last axis of each is contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    skip: Tensor | None = None


class LinearGradients(NamedTuple):
    """The gradients that a backward starts from. Either may be None, but not both. Backends get contiguous ones."""

    out: Tensor | None  # as LinearOutput.out
    final_state: Tensor | None  # as LinearOutput.final_state


class LinearOutput(NamedTuple):
    """The results of a backend; final_state is None unless the problem asks for it."""

    out: Tensor
    final_state: Tensor | None
