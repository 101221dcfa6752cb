"""Processes that are the ranks of a group, shared by many tests, because starting one takes longer than most tests."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

# A process that imports torch and then forks the ranks. It has no threads and no groups.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["fastattention.distributed", "fastattention.attention.reference"])

PATIENCE = 60.0  # seconds for the answers of one task; after them a rank counts as hung
GPU_PATIENCE = 150.0  # on GPUs, where the first task compiles kernels and makes communicators
MOST_GPUS = 4


def skip_module_without_two_gpus() -> None:
    """Skips the test module that calls it on a machine where its ranks could not run."""
    if torch.cuda.device_count() < 2 or not dist.is_nccl_available():
        pytest.skip("needs two GPUs and NCCL", allow_module_level=True)


def meet() -> None:
    """A barrier of all ranks, whose GPUs have finished their work."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


class FailedError(Exception):
    """An error of a rank, as text."""


def _serve(rank: int, size: int, folder: Path, timeout: float, backend: str, connection: Connection) -> None:
    """Runs tasks until None comes."""
    # torch's warnings about communicators on GPUs change with every version; ours are RuntimeWarnings.
    warnings.simplefilter("error", RuntimeWarning if backend == "nccl" else Warning)
    torch.set_num_threads(1)
    os.environ["FASTATTENTION_CACHE"] = str(folder / "cache")
    device = None
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
        device_id=device,
    )
    while (task := connection.recv()) is not None:
        function, arguments = task
        torch.manual_seed(0)
        try:
            answer = (True, function(*arguments))
        except Exception as error:
            answer = (False, (error, traceback.format_exc()))
        connection.send_bytes(pickle.dumps(answer))  # multiprocessing would share the memory of tensors
    if device is not None:
        os._exit(0)  # destroying a group whose sums a CUDA graph has captured does not return
    dist.destroy_process_group()


class Team:
    """`size` processes in one default group; with NCCL each has a GPU.

    timeout: seconds for the group's collectives; patience: seconds for the answers of one task.
    """

    def __init__(
        self, size: int, folder: Path, timeout: float = PATIENCE, backend: str = "gloo", patience: float = PATIENCE
    ) -> None:
        self.size = size
        self.healthy = True  # no rank has failed in `run`, or hung
        self._patience = patience
        pipes = [_CONTEXT.Pipe() for _ in range(size)]
        self._connections = [mine for mine, _ in pipes]
        self.processes = [
            _CONTEXT.Process(target=_serve, args=(rank, size, folder, timeout, backend, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self.processes, pipes, strict=True):
            process.start()
            theirs.close()

    def outcomes(self, function: Callable[..., Any], *arguments: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Results or errors of `function` on some ranks or all; EOFError for one that died, TimeoutError for a hang.

        `close` ends ranks that hang, with all others.
        """
        asked = range(self.size) if ranks is None else ranks
        deadline = time.monotonic() + self._patience
        for rank in asked:
            self._connections[rank].send((function, arguments))
        return [self._answer(rank, deadline) for rank in asked]

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """The results of `function` on each rank. Raises FailedError where one raised."""
        outcomes = self.outcomes(function, *arguments, ranks=ranks)
        failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if isinstance(outcome, Exception)]
        if failed:
            self.healthy = False
            rank, error = min(
                failed, key=lambda one: isinstance(one[1], TimeoutError)
            )  # others wait for one that fails
            raise FailedError(f"rank {rank}: {error}\n{getattr(error, 'where', '')}")
        return outcomes

    def _answer(self, rank: int, deadline: float) -> Any:
        if not wait([self._connections[rank]], max(deadline - time.monotonic(), 0.0)):
            self.healthy = False
            return TimeoutError(f"rank {rank} hangs")
        try:
            returned, answer = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            return EOFError(f"rank {rank} died")
        if returned:
            return answer
        error, where = answer
        error.where = where
        return error

    def close(self) -> None:
        """Ends the processes, even if they hang."""
        for connection, process in zip(self._connections, self.processes, strict=True):
            if process.is_alive() and self.healthy:
                with contextlib.suppress(OSError):
                    connection.send(None)
                    process.join(5.0)
            if process.is_alive():
                process.kill()
            process.join()
            connection.close()
