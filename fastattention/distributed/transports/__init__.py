"""The list of transports."""

from __future__ import annotations

import importlib

import torch
from torch.distributed import ProcessGroup

from fastattention.distributed.transports.base import Compute, Transfer, Transport
from fastattention.errors import ArgumentError

# Name -> module:class. Modules are imported when first asked for.
TRANSPORTS: dict[str, str] = {
    "c10d": "fastattention.distributed.transports.c10d:C10d",
    "ring_product": "fastattention.distributed.transports.ring_product:RingProduct",
    "peer_kernel": "fastattention.distributed.transports.peer_kernel:PeerKernel",
}


def check_name(name: object) -> None:
    """Raises ArgumentError unless `name` is "auto" or that of a transport."""
    if not isinstance(name, str) or (name != "auto" and name not in TRANSPORTS):
        raise ArgumentError(
            f"transport={name!r} is not known; choose 'auto' or one of {', '.join(map(repr, TRANSPORTS))}"
        )


def make(name: str, group: ProcessGroup, device: torch.device) -> Transport:
    """The transport called `name`, for a group. Collective."""
    module, _, attribute = TRANSPORTS[name].partition(":")
    transport = getattr(importlib.import_module(module), attribute)(group, device)
    assert isinstance(transport, Transport)
    return transport


__all__ = ["TRANSPORTS", "Compute", "Transfer", "Transport", "check_name", "make"]
