"""c10d: the all-reduce of torch.distributed's backends (NCCL, HCCL, gloo), by a communicator of our own."""

from __future__ import annotations

import uuid
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, _DistributedBackendOptions
from torch.distributed import ProcessGroup, distributed_c10d

from fastattention.distributed.object_collectives import from_rank_0, timeout_of
from fastattention.distributed.row_partitions import OVERLAPPED
from fastattention.distributed.transports.base import Compute, Transfer, Transport


class C10d(Transport):
    """Sums in place and asynchronously: while a block is summed, the next one is computed.

    Sums neither wait for the user's collectives nor hold them up.
    """

    name = "c10d"
    recipes = OVERLAPPED

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        """Makes a communicator with the backend of `group` for `device`, and its timeout.

        It is no process group of torch.distributed, because every process must call new_group. With
        use_local_synchronization only members call it, but a group's name then depends on the number of groups of its
        rank. So ranks in different numbers of groups, and groups made after others were destroyed, hang.
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

    def why_not(self, transfer: Transfer) -> str | None:
        """None: the backend of the group sums every transfer."""
        return None

    def run(self, compute: Compute, out: Tensor, rows: tuple[int, ...]) -> None:
        """One block is computed, then summed on the current stream, where the backend can."""
        if len(rows) == 1:
            compute(0, rows[0], out)
            if (work := self._all_reduce(out, asynchronous=False)) is not None:
                work.wait()
            return
        pending: list[Any] = []
        first_error: BaseException | None = None
        try:
            start = 0
            for count in rows:
                block = out[start : start + count]
                compute(start, start + count, block)
                pending.append(self._all_reduce(block, asynchronous=True))
                start += count
        except BaseException as error:
            first_error = error
        for work in pending:
            try:
                work.wait()
            except BaseException as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def _all_reduce(self, rows: Tensor, asynchronous: bool) -> Any:
        assert rows.is_contiguous()  # gloo accepts rows with gaps, but changes the memory between them
        options = dist.AllreduceOptions()
        if hasattr(options, "asyncOp"):  # from torch 2.7; before, every sum is asynchronous
            options.asyncOp = asynchronous
        return self._communicator.allreduce([rows], options)

    def close(self) -> None:
        """Ends the communicator."""
        if hasattr(self._communicator, "shutdown"):
            self._communicator.shutdown()
        self._communicator = None


def _communicator(backend: str, options: Any) -> Any:
    """A new communicator of a backend, made as torch.distributed makes those of its groups."""
    if backend == "gloo":
        return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    if backend == "nccl":
        # A stream of high priority: all ranks wait for sums.
        own = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        own._timeout = options.timeout
        own.global_ranks_in_group = options.global_ranks_in_group
        own.group_name = options.group_id
        return dist.ProcessGroupNCCL(options.store, options.group_rank, options.group_size, own)
    plugin = dist.Backend._plugins[backend.upper()]
    if plugin.extended_api:
        return plugin.creator_fn(options, None)
    return plugin.creator_fn(options.store, options.group_rank, options.group_size, options.timeout)
