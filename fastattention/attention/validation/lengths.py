"""Checks what differs among calls of one signature: lengths, offsets and page indices, and addresses of caches.

Every call makes these checks, also where its plan is known. On the CPU values are read and checked before anything is
computed. On other devices reading them would synchronize, so they are taken as given, as flash-attn does, unless
FASTATTENTION_CHECK_NUMBERS asks for the checks.
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from fastattention import environment
from fastattention.attention.problem import Inputs, Problem
from fastattention.attention.validation.common import Options
from fastattention.attention.validation.quantized import check_not_expanded
from fastattention.engine.checks import read_int
from fastattention.errors import ArgumentError


def are_checked(tensor: Tensor) -> bool:
    """Whether values are checked in calls on the device of `tensor`."""
    return tensor.is_cpu or environment.check_numbers()


def check_cu_seqlens(name: str, cu_seqlens: Tensor, total: int | None, rows_behind: bool = False) -> int:
    """Longest sequence of a varlen batch, after checking that the offsets are well formed.

    total: tokens in the varlen tensor, which the last offset must equal; None when the tensor is paged.
    rows_behind: whether the last offset may also be less
    """
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise ArgumentError(f"{name} must start at 0, got {offsets[0]}")
    longest = 0
    for index in range(1, len(offsets)):
        length = offsets[index] - offsets[index - 1]
        if length < 0:
            raise ArgumentError(
                f"{name} must not decrease, got {offsets[index - 1]} then {offsets[index]} at index {index}"
            )
        longest = max(longest, length)
    if total is not None and (offsets[-1] > total or (offsets[-1] < total and not rows_behind)):
        raise ArgumentError(f"{name} must end at the number of tokens, {total}, got {offsets[-1]}")
    return longest


def check_max_seqlen(name: str, given: int | None, longest: int) -> int:
    """`given`, or the longest sequence when it is None; raises when `given` is too small."""
    if given is None:
        return longest
    if given < longest:
        raise ArgumentError(f"{name}={given} is smaller than the longest sequence, {longest}; None derives it")
    return given


def check_block_table(block_table: Tensor, seqlens: list[int], page_block_size: int, num_blocks: int) -> None:
    """Raises unless every page that a sequence of the given lengths uses exists; unused entries may hold anything."""
    table = block_table.numpy(force=True)
    missing = (table < 0) | (table >= num_blocks)
    if not missing.any():
        return
    pages_used = -(-numpy.asarray(seqlens, dtype=numpy.int64) // page_block_size)
    missing &= numpy.arange(table.shape[1]) < pages_used[:, None]
    if missing.any():
        sequence, place = (int(index) for index in numpy.argwhere(missing)[0])
        raise ArgumentError(
            f"block_table names page {table[sequence, place]} for sequence {sequence}; "
            f"the cache has pages 0 to {num_blocks - 1}"
        )


def check_appended_places(block_table: Tensor, seqlens: list[int], seqlen_new: int, page_block_size: int) -> None:
    """Raises when two of the tokens appended to sequences of the given lengths go to one place: one would be lost."""
    positions = numpy.asarray(seqlens, dtype=numpy.int64)[:, None] + numpy.arange(seqlen_new)
    pages = numpy.take_along_axis(block_table.numpy(force=True), positions // page_block_size, axis=1)
    places = numpy.sort(pages * numpy.int64(page_block_size) + positions % page_block_size, axis=None)
    repeated = places[1:][places[1:] == places[:-1]]
    if repeated.size:
        page, slot = divmod(int(repeated[0]), page_block_size)
        raise ArgumentError(
            f"block_table puts two appended tokens into slot {slot} of page {page}; sequences may share pages that "
            "they read, but each appended token needs a place of its own"
        )


def check_paged_lengths(name: str, seqlens: list[int], capacity: int) -> None:
    """Raises when a sequence is longer than its row of the block table can hold."""
    for index, length in enumerate(seqlens):
        if length > capacity:
            raise ArgumentError(
                f"{name} gives sequence {index} {length} tokens; its row of block_table holds {capacity} at most"
            )


def check_used(name: str, used: list[int], seqlens: list[int]) -> None:
    """Raises unless every sequence has as many tokens as it uses."""
    for index, (count, length) in enumerate(zip(used, seqlens, strict=True)):
        if not 0 <= count <= length:
            raise ArgumentError(f"{name}[{index}]={count} must be 0 to {length}, the tokens of that sequence")


def check_range(name: str, values: list[int], low: int, high: int, what: str) -> None:
    """Raises unless low <= value <= high for every value."""
    for index, value in enumerate(values):
        if not low <= value <= high:
            raise ArgumentError(f"{name}[{index}]={value} is out of range; allowed are {low} to {high} ({what})")


def check_varlen(inputs: Inputs, options: Options) -> tuple[int, int]:
    """Maxima of the batch. Off the CPU values are read only when a maximum is missing."""
    max_seqlen_q, max_seqlen_k = options.max_seqlen_q, options.max_seqlen_k
    if max_seqlen_q is not None:
        max_seqlen_q = read_int("max_seqlen_q", max_seqlen_q)
    if max_seqlen_k is not None:
        max_seqlen_k = read_int("max_seqlen_k", max_seqlen_k)
    if max_seqlen_q is not None and max_seqlen_k is not None and not are_checked(inputs.q):
        check_max_seqlen("max_seqlen_q", max_seqlen_q, 0)
        check_max_seqlen("max_seqlen_k", max_seqlen_k, 0)
        return max_seqlen_q, max_seqlen_k
    return check_varlen_numbers(inputs, (max_seqlen_q, max_seqlen_k))


def check_varlen_numbers(
    inputs: Inputs, max_seqlens: tuple[int | None, int | None], rows_behind: bool = False
) -> tuple[int, int]:
    """Maxima of the batch, after reading and checking all offsets and page indices, on any device.

    rows_behind: whether tokens may follow the last sequence, as in CUDA graphs of batches that vary
    """
    q, k, block_table = inputs.q, inputs.k, inputs.block_table
    assert inputs.cu_seqlens_q is not None
    assert inputs.cu_seqlens_k is not None
    total_k = k.shape[0] if block_table is None else None
    longest_q = check_cu_seqlens("cu_seqlens_q", inputs.cu_seqlens_q, q.shape[0], rows_behind)
    longest_k = check_cu_seqlens("cu_seqlens_k", inputs.cu_seqlens_k, total_k, rows_behind)
    if block_table is not None:
        seqlens = inputs.cu_seqlens_k.diff().tolist()
        check_paged_lengths("cu_seqlens_k", seqlens, block_table.shape[1] * k.shape[1])
        check_block_table(block_table, seqlens, k.shape[1], k.shape[0])
    return (
        check_max_seqlen("max_seqlen_q", max_seqlens[0], longest_q),
        check_max_seqlen("max_seqlen_k", max_seqlens[1], longest_k),
    )


def check_cache(problem: Problem, inputs: Inputs, cache_seqlens: object) -> Inputs:
    """`inputs` of a call with a cache, after all checks that its shapes, dtypes and strides do not answer.

    cache_seqlens: the argument, which may be one length for all sequences, or None for a full cache
    """
    if inputs.k_new is not None:
        _check_written_memory(inputs)
    before: list[int] | None = None
    if inputs.cache_seqlens is None:
        length = problem.seqlen_k
        if cache_seqlens is not None:
            length = read_int("cache_seqlens", cache_seqlens, "an int32 tensor (batch_size,) or an integer")
            _check_room(problem, [length])
        before = [length] * problem.batch_size
        seqlens = torch.full((problem.batch_size,), length, dtype=torch.int32, device=problem.device)
        inputs = inputs._replace(cache_seqlens=seqlens)
    assert inputs.cache_seqlens is not None
    if are_checked(inputs.q):
        check_cache_numbers(problem, inputs, before)
    return inputs


def _check_written_memory(inputs: Inputs) -> None:
    """Checks that an append writes no memory twice, or the same to it."""
    k_cache, v_cache, k_scale, v_scale = inputs.k, inputs.v, inputs.k_scale, inputs.v_scale
    if k_cache.data_ptr() == v_cache.data_ptr() and k_cache.numel() and not k_cache.is_meta:
        _check_values_in_keys(inputs)
    if k_scale is not None and v_scale is not None:
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            check_not_expanded(name, scale.shape, scale.stride())
        if k_scale.data_ptr() == v_scale.data_ptr() and k_scale.numel() and not k_scale.is_meta:
            raise _same_memory("k_scale", "v_scale")


def _check_values_in_keys(inputs: Inputs) -> None:
    """Checks an append to a v_cache that shares memory with k_cache: k is written, and v must say the same."""
    k_cache, v_cache, k, v = inputs.k, inputs.v, inputs.k_new, inputs.v_new
    headdim_v = v_cache.shape[-1]
    if inputs.k_scale is not None:
        raise _same_memory("k_cache", "v_cache")
    if headdim_v > k_cache.shape[-1] or v_cache.stride() != k_cache.stride():
        raise ArgumentError(
            f"v_cache begins where k_cache does, got shape {tuple(v_cache.shape)} and strides {v_cache.stride()}; "
            "for an append of k and v give it memory of its own, or k_cache[..., :headdim_v]"
        )
    if inputs.rotary_cos is not None:
        raise ArgumentError(
            "rotary_cos and rotary_sin cannot be given when v_cache shares the memory of k_cache: they would turn the "
            "values; rotate q and k before the call"
        )
    assert k is not None
    assert v is not None
    if not are_checked(inputs.q) or (v.data_ptr() == k.data_ptr() and v.stride() == k.stride()):
        return
    if not torch.allclose(v, k[..., :headdim_v], rtol=0.0, atol=0.0, equal_nan=True):
        raise ArgumentError("v must be k[..., :headdim_v] when v_cache shares the memory of k_cache, got other numbers")


def _same_memory(k_name: str, v_name: str) -> ArgumentError:
    return ArgumentError(f"{k_name} and {v_name} are the same memory; an append of k and v would write it twice")


def _check_room(problem: Problem, before: list[int]) -> None:
    """Raises unless every length fits the cache together with the new tokens."""
    room = problem.seqlen_k - problem.seqlen_new
    if before and (min(before) < 0 or max(before) > room):
        what = f"{problem.seqlen_k} tokens of capacity, {problem.seqlen_new} of them for k and v"
        check_range("cache_seqlens", before, 0, room, what)


def check_cache_numbers(problem: Problem, inputs: Inputs, before: list[int] | None = None) -> None:
    """Checks everything that depends on values of index tensors, on any device; `before` are those of cache_seqlens."""
    if before is None:
        assert inputs.cache_seqlens is not None
        before = inputs.cache_seqlens.tolist()
    _check_room(problem, before)
    k_cache, table = inputs.k, inputs.block_table
    if inputs.cache_leftpad is not None:
        for index, (pad, length) in enumerate(zip(inputs.cache_leftpad.tolist(), before, strict=True)):
            if not 0 <= pad <= length:
                raise ArgumentError(f"cache_leftpad[{index}]={pad} must be 0 to cache_seqlens[{index}]={length}")
    if inputs.cache_batch_idx is not None:
        rows: list[int] = inputs.cache_batch_idx.tolist()
        check_range("cache_batch_idx", rows, 0, k_cache.shape[0] - 1, "sequences in k_cache")
        if problem.seqlen_new and len(set(rows)) != len(rows):
            raise ArgumentError(f"cache_batch_idx={rows} must not repeat a sequence when k and v are appended")
    if table is not None:
        after = [length + problem.seqlen_new for length in before]
        check_block_table(table, after, k_cache.shape[1], k_cache.shape[0])
        if problem.batch_size * problem.seqlen_new > 1:
            check_appended_places(table, before, problem.seqlen_new, k_cache.shape[1])
    if inputs.rotary_cos is not None and before:
        steps = max(problem.seqlen_new, problem.seqlen_q if problem.has_window else min(problem.seqlen_q, 1))
        needed = max(before) + steps
        if needed > inputs.rotary_cos.shape[0]:
            raise ArgumentError(f"rotary_cos has {inputs.rotary_cos.shape[0]} positions; this call needs {needed}")
