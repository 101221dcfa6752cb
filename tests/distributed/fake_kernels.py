"""Flags and the kernel of peer_kernel as fake streams carry them out: on addresses in this process, by ctypes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch

from fastattention.distributed.transports.all_reduce import AllReduceConfig, AllReduceParams

PATIENCE = 20.0  # seconds until what waits is taken to wait for ever


def flag_at(address: Any) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(int(address))


def await_flag(address: Any, is_raised: Callable[[int], bool]) -> None:
    flag, deadline = flag_at(address), time.monotonic() + PATIENCE
    while not is_raised(flag.value):
        if time.monotonic() > deadline:
            raise TimeoutError("a flag is never raised")
        time.sleep(0)


def all_reduce(params: AllReduceParams, config: AllReduceConfig) -> None:
    """kernels/all_reduce.cuh by one of its CTAs, which adds up everything."""
    barrier(params, config.num_ranks)
    nbytes = params.count * config.dtype.itemsize
    total = torch.zeros(params.count)
    for part in params.parts[: config.num_ranks]:
        total += torch.frombuffer((ctypes.c_char * nbytes).from_address(part), dtype=config.dtype).float()
    rounded = total.to(config.dtype)
    ctypes.memmove(params.out, rounded.data_ptr(), nbytes)
    barrier(params, config.num_ranks)


def barrier(params: AllReduceParams, num_ranks: int) -> None:
    step = flag_at(params.steps).value = flag_at(params.steps).value + 1
    others = [rank for rank in range(num_ranks) if rank != params.rank]
    for other in others:
        flag_at(params.arrivals[other] + 4 * params.rank).value = step
    for other in others:
        await_flag(params.arrivals[params.rank] + 4 * other, lambda value: value >= step)
