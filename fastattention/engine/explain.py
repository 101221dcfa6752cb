"""Explanation: which backend serves a call, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple

from fastattention.engine.backend import P
from fastattention.engine.registry import Verdict, chosen
from fastattention.sizes import format_bytes


class Bytes(NamedTuple):
    """Bytes between main memory and the chip."""

    read: int
    written: int

    @property
    def total(self) -> int:
        """Bytes in both directions."""
        return self.read + self.written


class Traffic(NamedTuple):
    """Main-memory traffic of one call. `print` shows a line."""

    backend: str
    tiled: Bytes | None  # traffic of the backend's kernels; None when it has no model of them
    compulsory: Bytes  # every input that a query sees read once, every result written once
    standard: Bytes  # scores and probabilities in main memory, in the dtype of q
    io_bound: int | None  # least bytes of any algorithm with the chip's on-chip memory; None when its size is unknown

    @property
    def lower_bound(self) -> int:
        """A lower bound of the bytes of any algorithm, up to the constant factor of `io_bound`."""
        return max(self.compulsory.total, self.io_bound or 0)

    def __str__(self) -> str:
        tiled = "not modelled" if self.tiled is None else format_bytes(self.tiled.total)
        least, standard = format_bytes(self.lower_bound), format_bytes(self.standard.total)
        return f"main-memory traffic of {self.backend}: {tiled}; lower bound {least}; standard attention {standard}"


@dataclass(frozen=True)
class Explanation(Generic[P]):
    """Which backend serves a call, every backend's reason, and the call's main-memory traffic.

    `print` shows them in a table, after the sizes of the axes as the call was read: tensors in another order of axes
    may be valid, and mean another call.

    `traffic` is that of `backend`, or of the one that the call names. None when it cannot serve the call, and for calls
    that are not modelled: those with attn_bias, block_mask or qk_dtype, and linear attention.
    """

    problem: P  # the validated problem of the call: Problem, or LinearProblem
    verdicts: tuple[Verdict, ...]
    traffic: Traffic | None = None

    @property
    def backend(self) -> str | None:
        """Name of the backend that `backend="auto"` takes; None when there is none."""
        one = chosen(self.verdicts)
        return None if one is None else one.backend

    def __str__(self) -> str:
        serving = self.backend
        lines = [f"read as {self.problem.axes}"]  # type: ignore[attr-defined]
        for name, reason, how, why_faster in self.verdicts:
            served = "serves this call" if name == serving else "could serve this call"
            served += f" by {how}" if how else ""
            served += f"; faster here: {why_faster}" if why_faster else ""
            lines.append(f"{'->' if name == serving else '  '} {name}: {reason or served}")
        if self.traffic is not None:
            lines.append(str(self.traffic))
        return "\n".join(lines)
