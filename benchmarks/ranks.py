"""Processes of this host that are the ranks of a group, each with a GPU of its own."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist


class RankFailedError(Exception):
    """A rank ended with an error, or the ranks did not end in time."""


def run_ranks(work: Callable[..., None], arguments: Sequence[Any], size: int, device_type: str, seconds: float) -> None:
    """Calls work(device, *arguments) on every rank of a group of `size`, by NCCL or, on the CPU, gloo.

    Raises RankFailedError when a rank fails, after printing its error, or when the ranks take longer than `seconds`.
    All ranks have ended when this returns or raises.
    """
    context = multiprocessing.get_context("spawn")
    port = _free_port()
    ranks = [
        context.Process(target=_serve, args=(work, arguments, rank, size, device_type, port)) for rank in range(size)
    ]
    try:
        for process in ranks:
            process.start()
        _wait(ranks, time.monotonic() + seconds)
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _wait(ranks: Sequence[BaseProcess], deadline: float) -> None:
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while running:
        ended = wait(list(running), max(deadline - time.monotonic(), 0.0))
        if not ended:
            raise RankFailedError(f"ranks {sorted(running.values())} have not ended in time")
        for sentinel in ended:
            assert isinstance(sentinel, int)
            rank = running.pop(sentinel)
            ranks[rank].join()
            if ranks[rank].exitcode:
                raise RankFailedError(f"rank {rank} failed with exit status {ranks[rank].exitcode}")


def _serve(
    work: Callable[..., None], arguments: Sequence[Any], rank: int, size: int, device_type: str, port: int
) -> None:
    status = 0
    try:
        on_gpu = device_type == "cuda"
        device = torch.device("cuda", rank) if on_gpu else torch.device(device_type)
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=size,
            device_id=device if on_gpu else None,
        )
        work(device, *arguments)
        dist.barrier()
    except BaseException:
        print(f"rank {rank} of {size}:", file=sys.stderr)
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # destroying a group whose sums a CUDA graph has captured does not return
