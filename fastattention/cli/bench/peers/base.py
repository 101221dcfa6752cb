"""Peer: an implementation of attention, wrapped so that all are measured on the same workloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastattention.cli.bench.workload import BenchWorkload, Tensors


@dataclass(frozen=True)
class PreparedPeer:
    """A peer ready for one workload, with its inputs in the layout that suits it best. Only `call` is timed."""

    call: Callable[[], Any]
    output: Callable[[Any], Tensor]  # what `call` returned -> (batch_size, seqlen_q, nheads, headdim) or varlen
    detail: str = ""  # which of the peer's own paths this is, e.g. "flash"


@dataclass(frozen=True)
class Peer:
    """An implementation of attention. All use the threads of `fastattention.get_num_threads()`."""

    name: str
    applies_to: Callable[[BenchWorkload], bool]  # a peer is not mentioned where it does not apply
    prepare: Callable[[BenchWorkload, Tensors], PreparedPeer]
    version: Callable[[], str]  # version of the library that computes; called only where the peer is available
    why_unavailable: Callable[[], str | None] = lambda: None  # why it cannot be used here, and how to install it
    why_not: Callable[[BenchWorkload], str | None] = lambda workload: None  # why not for a workload that it applies to


def is_decode(workload: BenchWorkload) -> bool:
    """One query a sequence against a cache."""
    return workload.kind == "decode"


def is_varlen(workload: BenchWorkload) -> bool:
    """Sequences of uneven length without padding."""
    return workload.kind == "packed"


def is_backward(workload: BenchWorkload) -> bool:
    """The gradients of a prefill."""
    return workload.kind == "backward"


def is_dense(workload: BenchWorkload) -> bool:
    """A forward of sequences of one length."""
    return workload.kind in ("prefill", "decode")


def prepare_backward(
    forward: Callable[..., Any], inputs: Tensors, grad: Tensor, output: Callable[[Any], Tensor], detail: str
) -> PreparedPeer:
    """The backward of `forward`: gradients of q, k and v. The output is the gradient of q."""
    leaves = Tensors(*(tensor.detach().requires_grad_() for tensor in inputs))
    out = forward(*leaves)

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return PreparedPeer(call, lambda gradients: output(gradients[0]), detail)
