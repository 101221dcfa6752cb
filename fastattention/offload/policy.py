"""Policy: how a decode step handles layers whose KV cache is in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from fastattention.errors import ArgumentError

AUTO = "auto"


class Policy(str, Enum):
    """The policies, simplest first: on a tie, the first is chosen."""

    RESIDENT = "resident"  # there are no such layers
    CLASSICAL = "classical"  # their caches are uploaded for every token, while other layers run
    COOPERATIVE = "cooperative"  # the CPU computes their attention in place
    HYBRID = "hybrid"  # a part is uploaded during the whole step, the CPU does the rest, and both are merged by lse
    GATHERED = "gathered"  # the GPU reads over the link what queries have selected, in models with an indexer

    @property
    def uploads(self) -> bool:
        """Whether keys and values are uploaded to the GPU for every token."""
        return self in (Policy.CLASSICAL, Policy.HYBRID)


def read_policy(value: str, policies: Sequence[Policy] = tuple(Policy)) -> Policy | None:
    """The policy of this name among `policies`, None for "auto". Raises ArgumentError for others."""
    if value == AUTO:
        return None
    for policy in policies:
        if value == policy.value:
            return policy
    known = ", ".join([AUTO, *(one.value for one in policies)])
    raise ArgumentError(f"policy={value!r} is not known; choose from {known}")
