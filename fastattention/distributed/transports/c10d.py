"""c10d: torch.distributed's own all-reduce (NCCL, HCCL, gloo), on a communicator beside the user's."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fastattention.distributed.transports.base import Pending, Transfer, Transport


class C10d(Transport):
    """In place, asynchronous, in a group of its own: sums neither wait for the user's collectives nor hold them up."""

    name = "c10d"

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        """Collective. The new group has the backend of `group` for `device`, and its timeout."""
        backend = group._get_backend(device)
        timeout = _timeout(backend)
        self._group = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=timeout,
            backend=backend.name(),
            pg_options=_options(backend.name(), timeout),
            use_local_synchronization=True,
        )

    def why_not(self, transfer: Transfer) -> str | None:
        """None: whatever the backend of the group sums."""
        return None

    def partials(self, out: Tensor) -> Tensor:
        """`out` itself."""
        return out

    def all_reduce(self, partial: Tensor, out: Tensor) -> Pending:
        """On the communicator's stream."""
        _check(partial, out)
        return _Work(dist.all_reduce(out, group=self._group, async_op=True), out)

    def all_reduce_now(self, partial: Tensor, out: Tensor) -> None:
        """On the current stream, where the backend can."""
        _check(partial, out)
        dist.all_reduce(out, group=self._group)

    def close(self) -> None:
        """Ends the group, unless it has ended with the default group."""
        try:
            dist.destroy_process_group(self._group)
        except (AssertionError, ValueError):  # not registered any more
            return


class _Work(Pending):
    def __init__(self, work: Any, rows: Tensor) -> None:
        self._work = work
        self._rows = rows

    def wait(self) -> None:
        self._work.wait()


def _check(partial: Tensor, out: Tensor) -> None:
    # gloo takes rows with gaps, and changes what lies between them.
    assert out.is_contiguous()
    assert partial.data_ptr() == out.data_ptr()


def _timeout(backend: Any) -> timedelta | None:
    """The timeout of a backend; None, torch's default, where it does not tell."""
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def _options(backend: str, timeout: timedelta | None) -> Any:
    """Of NCCL: a stream that goes before those that compute, as sums are what everybody waits for."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout
    return options
