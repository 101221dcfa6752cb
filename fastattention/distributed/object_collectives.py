"""Small messages among the ranks of a group, before a call of a new kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from fastattention.errors import ArgumentError

Answer = TypeVar("Answer")


def check_serves(group: ProcessGroup, device: torch.device) -> None:
    """Raises ArgumentError unless the group has a backend for tensors on `device`, as sums over several ranks need."""
    try:
        group._get_backend(device)
    except RuntimeError as error:
        backends = dist.get_backend_config(group)
        raise ArgumentError(
            f"group has no backend for tensors on {device.type}; its backends are {backends}"
        ) from error


def timeout_of(backend: Any) -> timedelta:
    """The timeout of a backend; torch's default where the backend does not tell it."""
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else distributed_c10d.default_pg_timeout


def gather(value: Any, group: ProcessGroup) -> list[Any]:
    """The values of all ranks, by rank. Collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def from_rank_0(work: Callable[[], Answer], group: ProcessGroup) -> Answer:
    """The result of `work`, which only rank 0 calls. If it raises there, all ranks do. Collective."""
    answer: list[Any] = [None, None]
    error: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            answer = [work(), None]
        except Exception as raised:
            error = raised
            answer = [None, f"{type(raised).__name__}: {raised}"]
    dist.broadcast_object_list(answer, dist.get_global_rank(group, 0), group)
    if error is not None:
        raise error
    if answer[1] is not None:
        raise RuntimeError(f"rank 0, which decides for the group, failed: {answer[1]}")
    return cast(Answer, answer[0])


def largest(values: Sequence[float], device: torch.device, group: ProcessGroup) -> list[float]:
    """The largest of each value over all ranks, the same on all of them. Collective."""
    tensor = torch.tensor(values, dtype=torch.float32, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
    return cast("list[float]", tensor.tolist())
