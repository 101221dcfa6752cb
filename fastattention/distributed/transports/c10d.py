"""c10d: the all-reduce of torch.distributed's backends (NCCL, HCCL, gloo), by a communicator beside the user's."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, _DistributedBackendOptions
from torch.distributed import ProcessGroup, distributed_c10d

from fastattention.distributed.exchange import from_rank_0, timeout_of
from fastattention.distributed.transports.base import BlockTransport, Pending, Room, Transfer

# NCCL takes some two dozen CTAs. Products that leave all of these to it are slower by more than they gain.
NCCL_ROOMS = (Room(), Room(left_free=16))


class C10d(BlockTransport):
    """In place, asynchronous. Sums neither wait for the user's collectives nor hold them up."""

    name = "c10d"

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        """The communicator has the backend of `group` for `device`, and its timeout.

        It is no process group of torch.distributed: new_group wants to be called by every process there is. With
        use_local_synchronization it does not, but then names a group by how many groups its rank has, so that ranks in
        different numbers of groups, and groups made after others have been destroyed, wait for ever.
        """
        theirs = group._get_backend(device)
        name = from_rank_0(lambda: f"fastattention/{uuid.uuid4().hex}", group)
        options = _DistributedBackendOptions()
        options.store = PrefixStore(name, distributed_c10d._get_default_store())
        options.group_rank, options.group_size = dist.get_rank(group), dist.get_world_size(group)
        options.timeout = timeout_of(theirs)
        options.group_id = name
        options.global_ranks_in_group = dist.get_process_group_ranks(group)
        self._communicator = _communicator(theirs.name(), options)
        if theirs.name() == "nccl":
            self.rooms = NCCL_ROOMS

    def why_not(self, transfer: Transfer) -> str | None:
        """None: whatever the backend of the group sums."""
        return None

    def begin(self, out: Tensor, rows: Sequence[int], room: int = 0) -> Tensor:
        """`out` itself."""
        return out

    def all_reduce(self, partial: Tensor, out: Tensor) -> Pending:
        """On the communicator's stream."""
        return _Work(self._begin(partial, out, asynchronous=True), out)

    def all_reduce_now(self, partial: Tensor, out: Tensor) -> None:
        """On the current stream, where the backend can."""
        work = self._begin(partial, out, asynchronous=False)
        if work is not None:
            work.wait()

    def _begin(self, partial: Tensor, out: Tensor, asynchronous: bool) -> Any:
        # gloo takes rows with gaps, and changes what lies between them.
        assert out.is_contiguous()
        assert partial.data_ptr() == out.data_ptr()
        options = dist.AllreduceOptions()
        if hasattr(options, "asyncOp"):  # torch 2.7; before, every sum was asynchronous
            options.asyncOp = asynchronous
        return self._communicator.allreduce([out], options)

    def close(self) -> None:
        """Ends the communicator."""
        if hasattr(self._communicator, "shutdown"):
            self._communicator.shutdown()
        self._communicator = None


class _Work(Pending):
    def __init__(self, work: Any, rows: Tensor) -> None:
        self._work = work
        self._rows = rows

    def wait(self) -> None:
        self._work.wait()


def _communicator(backend: str, options: Any) -> Any:
    """A new communicator of a backend, as torch.distributed makes those of its groups."""
    if backend == "gloo":
        return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    if backend == "nccl":
        # A stream that goes before those that compute: sums are what everybody waits for.
        own = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        own._timeout = options.timeout
        own.global_ranks_in_group = options.global_ranks_in_group
        own.group_name = options.group_id
        return dist.ProcessGroupNCCL(options.store, options.group_rank, options.group_size, own)
    plugin = dist.Backend._plugins[backend.upper()]
    if plugin.extended_api:
        return plugin.creator_fn(options, None)
    return plugin.creator_fn(options.store, options.group_rank, options.group_size, options.timeout)
