"""Attention, its output projection and the all-reduce over a tensor-parallel group, overlapped.

    out = sum over ranks of (attention of the rank's heads) @ w_o.T  +  bias

The rows of a call are divided into blocks: while one block is summed over the ranks, the next one is computed.

Arguments of both functions, besides those of `fastattention.attention.interface`:

- `w_o`: (hidden, nheads * headdim_v), the columns of the projection's weight that belong to this rank's heads. They are
  the rank-th part of a whole weight (hidden, group_size * nheads * headdim_v), as nn.Linear has it, along the second
  axis.
- `bias`: (hidden,), the whole bias on every rank. It is added once, after the sum.
- `group`: the torch.distributed.ProcessGroup whose ranks have the heads; None is the default group.
- `partition`: "auto", or the rows of each block: positive integers that sum to batch_size * seqlen_q. Rows are
    counted through all sequences, one after the other. A single block is computed, then summed. The partition must be
    the same on every rank.
- `transport`: how blocks are summed: "auto", or a name of `fastattention.distributed.transports`.
- `out`: contiguous (batch_size, seqlen_q, hidden) for the result, sharing no memory with the other arguments.

All ranks of the group make the same calls in the same order, as with every collective. The first call of a kind
(shapes, mask, partition) is compared over the ranks and, unless a partition is given, autotuned: it cannot be captured
in a CUDA graph, later ones can. There is no backward, and the call is no part of a graph of torch.compile. Calls on
different streams may run one after the other. Graphs of one group must not be replayed concurrently with each other or
with calls.

Raises ArgumentError for a wrong argument, and on all ranks where their calls differ and are new to all of them; other
mistakes of one rank leave the others waiting. Raises UnsupportedError where no backend or no transport can serve the
call. Both come before any sum has begun.

A sum that fails, or is not done within the timeout of the group, raises what torch.distributed raises; with peer_kernel
it raises a CUDA error. `out` is then invalid. With NCCL and ring_product it ends the process; only replays of CUDA
graphs by the latter wait on.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.attention.interface import WindowSize
from fastattention.attention.operators import ATTENTION, ATTENTION_KVCACHE
from fastattention.attention.problem import Inputs, Problem
from fastattention.attention.validation import KvCacheArguments, prepare_dense, prepare_kvcache
from fastattention.attention.validation.common import read_options
from fastattention.distributed import transports
from fastattention.distributed.agreement import Agreed, Key, agreement_of, named_group
from fastattention.distributed.row_blocks import Attend, AttentionOutProj, may_cut_sequences
from fastattention.engine.checks import (
    TensorSpec,
    check_like_q,
    check_shape,
    needs_grad,
    read_int,
    spec_of,
)
from fastattention.engine.eager import require_eager
from fastattention.engine.operator import AnyOperator, Request, explained_by
from fastattention.engine.signature import signature_of
from fastattention.errors import ArgumentError
from fastattention.gpu_runtime import module

F = TypeVar("F", bound=Callable[..., Tensor])


def _explained_as(operator: AnyOperator) -> Callable[[F], F]:
    """Has `explain` take the attention of a function's calls, once all of their arguments are checked."""

    def mark(function: F) -> F:
        def read(*args: Any, **kwargs: Any) -> Request:
            call = inspect.signature(function).bind(*args, **kwargs)
            call.apply_defaults()
            named = call.arguments
            named_group(named["group"])
            options = read_options(*(named[name] for name in ("softmax_scale", "causal", "window_size", "softcap")))
            given = operator.given(**{name: x for name, x in named.items() if name in operator.tensors})
            problem, _ = operator.prepare(given, options)
            _key_of(problem, *(named[name] for name in ("w_o", "bias", "out", "partition", "backend", "transport")))
            return operator, given, options, named["backend"], attrgetter("out")

        return explained_by(read)(function)  # type: ignore[return-value]

    return mark


@_explained_as(ATTENTION)
def attention_out_proj_allreduce(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w_o: Tensor,
    bias: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    group: ProcessGroup | None = None,
    partition: str | Sequence[int] = "auto",
    backend: str = "auto",
    transport: str = "auto",
    out: Tensor | None = None,
) -> Tensor:
    """`fast_attn_func` on this rank's heads, times its part of the output projection, summed over the ranks.

    - `q`: (batch_size, seqlen_q, nheads, headdim), this rank's heads
    - `k`: (batch_size, seqlen_k, nheads_k, headdim)
    - `v`: (batch_size, seqlen_k, nheads_k, headdim_v)

    The other arguments and the errors are those of this module and of `fastattention.attention.interface`. With
    alibi_slopes and without causal, no block may begin within a sequence.

    Returns out (batch_size, seqlen_q, hidden) in the dtype of q, the same bits on every rank.
    """
    options = read_options(softmax_scale, causal, window_size, softcap)
    group = named_group(group)
    signature = None
    if alibi_slopes is attn_bias is sinks is None and type(partition) is type(transport) is str:
        # One look-up replaces all checks: between the launches of a short call Python code takes several times as long
        # as by itself.
        signature = signature_of((q, k, v, w_o, bias, out), backend, (options, partition, transport))
        known = agreement_of(group).calls.get(signature)
        if known is not None and (known.cuda_index is None or known.cuda_index == module.current_device()):
            return _sum(known.key, Inputs(q, k, v), w_o, bias, out, group, known.attend, known.agreed)
    scores = {"alibi_slopes": alibi_slopes, "attn_bias": attn_bias, "sinks": sinks}
    require_eager({"q": q, "k": k, "v": v, "w_o": w_o, "bias": bias, "out": out, **scores})
    problem, inputs = prepare_dense(q, k, v, options, **scores)
    key = _key_of(problem, w_o, bias, out, partition, backend, transport)
    result = _run(key, inputs, w_o, bias, out, group)
    if signature is not None and inputs.q is q and inputs.k is k and inputs.v is v:
        agreement_of(group).remember(signature, key, inputs)
    return result


@_explained_as(ATTENTION_KVCACHE)
def attention_out_proj_allreduce_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    w_o: Tensor,
    bias: Tensor | None = None,
    *,
    cache_seqlens: Tensor | int | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    group: ProcessGroup | None = None,
    partition: str | Sequence[int] = "auto",
    backend: str = "auto",
    transport: str = "auto",
    out: Tensor | None = None,
) -> Tensor:
    """`attention_out_proj_allreduce` over a cache that already holds the tokens of q, as in a chunked prefill.

    - `k_cache`, `v_cache`, `block_table`, `cache_batch_idx`, `cache_leftpad`, `k_scale`, `v_scale`: as in
        `fast_attn_with_kvcache`
    - `cache_seqlens`: as there, the tokens of q included; nothing is appended

    The other arguments, the result and the errors are those of `attention_out_proj_allreduce`.
    """
    arguments = KvCacheArguments(
        q, k_cache, v_cache, None, None, None, None, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        alibi_slopes, attn_bias, sinks, k_scale, v_scale,
    )  # fmt: skip
    require_eager({**arguments._asdict(), "w_o": w_o, "bias": bias, "out": out})
    problem, inputs = prepare_kvcache(arguments, read_options(softmax_scale, causal, window_size, softcap))
    key = _key_of(problem, w_o, bias, out, partition, backend, transport)
    return _run(key, inputs, w_o, bias, out, named_group(group))


def _run(key: Key, inputs: Inputs, w_o: Tensor, bias: Tensor | None, out: Tensor | None, group: ProcessGroup) -> Tensor:
    problem = key.problem
    ATTENTION_BACKENDS.select(problem, key.backend)  # raises where no backend serves the call, before any communication
    elsewhere = problem.device.type == "cuda" and module.current_device() != problem.device.index
    # Transports use streams and flags of the current device.
    with torch.cuda.device(problem.device) if elsewhere else contextlib.nullcontext():
        return _sum(key, inputs, w_o, bias, out, group)


def _sum(
    key: Key,
    inputs: Inputs,
    w_o: Tensor,
    bias: Tensor | None,
    out: Tensor | None,
    group: ProcessGroup,
    attend: Attend | None = None,
    agreed: Agreed | None = None,
) -> Tensor:
    """The result of a call whose arguments are all checked.

    attend, agreed: attention to all rows, and what the group has agreed on, where these are known.
    """
    problem = key.problem
    if out is None:
        out = inputs.q.new_empty(problem.batch_size, problem.seqlen_q, key.hidden)
    if problem.total_q:
        call = AttentionOutProj(problem, inputs, w_o, key.backend, attend)
        flat = out.view(problem.total_q, key.hidden)
        if agreed is not None:
            agreed.now(problem.device).run(call, flat)
        elif (agreement := agreement_of(group)).group_size > 1:
            agreement.of(key, call, group).run(call, flat)
        else:
            call.compute(0, problem.total_q, flat)
    if bias is not None:
        out += bias
    return out


def _key_of(
    problem: Problem, w_o: Tensor, bias: Tensor | None, out: Tensor | None, partition: Any, backend: str, transport: str
) -> Key:
    """The key of a call, after checks of all arguments but the group and of whether a backend serves it."""
    w_o_looks = spec_of("w_o", w_o)
    bias_looks = None if bias is None else spec_of("bias", bias)
    out_looks = None if out is None else spec_of("out", out)
    if problem.needs_grad or needs_grad(w_o, bias, out):
        raise ArgumentError(
            "an argument requires a gradient, and there is no backward; call under torch.no_grad() or "
            "torch.inference_mode()"
        )
    if out is not None and not out.is_contiguous():
        raise ArgumentError(f"out must be contiguous, got strides {out.stride()}")
    ATTENTION_BACKENDS.check_name(backend)
    hidden = _check_shapes(problem, w_o_looks, bias_looks, out_looks)
    rows = _check_partition(partition, problem)
    transports.check_name(transport)
    return Key(problem, hidden, bias is not None, backend, transport, rows)


def _check_shapes(problem: Problem, w_o: TensorSpec, bias: TensorSpec | None, out: TensorSpec | None) -> int:
    q = TensorSpec(torch.Size(problem.out_shape), problem.dtype, problem.device)
    columns = problem.nheads * problem.headdim_v
    if len(w_o.shape) != 2 or w_o.shape[1] != columns:
        raise ArgumentError(
            f"w_o must be (hidden, nheads * headdim_v) = (any, {problem.nheads} * {problem.headdim_v} = {columns}), "
            f"the columns of this rank's heads, got shape {tuple(w_o.shape)}"
        )
    check_like_q("w_o", w_o, q)
    hidden = w_o.shape[0]
    if bias is not None:
        check_shape("bias", bias, (hidden,), "hidden")
        check_like_q("bias", bias, q)
    if out is not None:
        check_shape("out", out, (problem.batch_size, problem.seqlen_q, hidden), "batch_size, seqlen_q, hidden")
        check_like_q("out", out, q)
    return hidden


def _check_partition(partition: Any, problem: Problem) -> tuple[int, ...] | None:
    """The rows of each block; None for "auto"."""
    if (
        isinstance(partition, str) and partition == "auto"
    ):  # the type is checked first, because arrays compare by elements
        return None
    if isinstance(partition, str) or not isinstance(partition, Sequence):
        raise ArgumentError(f'partition={partition!r} must be "auto" or the rows of each block, a sequence of integers')
    allowed = 'the rows of each block, positive integers, or "auto"'
    rows = tuple(read_int("partition", count, allowed) for count in partition)
    total = problem.total_q
    if any(count < 1 for count in rows) or sum(rows) != total:
        raise ArgumentError(
            f"partition={list(rows)} must be positive and sum to batch_size * seqlen_q = {total}; "
            f"the sum is {sum(rows)}"
        )
    cuts = [start for start in accumulate(rows) if start % problem.seqlen_q]
    if cuts and not may_cut_sequences(problem):
        raise ArgumentError(
            f"partition={list(rows)} has a block begin at row {cuts[0]}, within a sequence: with alibi_slopes and "
            f"without causal every block must begin at a multiple of seqlen_q={problem.seqlen_q}"
        )
    return rows
