"""torch.library operators, so that calls can be traced (torch.compile, fake tensors).

`fastattention::attention` serves dense and varlen calls. Its backward is that of the backend that served the call, if
that has one; otherwise the forward is computed again on the sdpa backend, which autograd follows.
`fastattention::attention_kvcache` writes its caches in place and has none.
An operator's scalars are those of `Options`, in order. Annotations are types, not strings: torch 2.4 reads schemas from
them.
"""

from collections.abc import Sequence
from itertools import compress
from typing import Any, List  # noqa: UP035  list[...] is no schema to torch 2.4

import torch
from torch import Tensor

from fastattention.attention import flops
from fastattention.attention.autograd import OPERATOR_TENSORS, gradients, gradients_by_torch, recording
from fastattention.attention.dispatch import Plan, kvcache_signature, plan_kvcache, plan_prefill, prefill_signature
from fastattention.attention.problem import AttentionOutput, Inputs, OutputGradients
from fastattention.attention.validation import KvCacheArguments, Options, prepare_kvcache, prepare_prefill
from fastattention.attention.validation.common import read_int
from fastattention.attention.validation.prefill import MaxSeqlens
from fastattention.attention.vmap import vmap_attention, vmap_attention_backward, vmap_attention_kvcache

_NUM_SCALARS = Options._fields.index("return_mask")
_NUM_TENSORS = len(OPERATOR_TENSORS)


def call_attention(given: Inputs, max_seqlens: MaxSeqlens, options: Options, backend: str) -> AttentionOutput:
    """The operator `fastattention::attention`."""
    names = ("max_seqlen_q", "max_seqlen_k")
    longest = [read_int(n, x) if isinstance(x, Tensor) else x for n, x in zip(names, max_seqlens, strict=True)]
    tensors = [getattr(given, name) for name in OPERATOR_TENSORS]
    records = torch.is_grad_enabled()
    grads = [
        name for name, x in zip(OPERATOR_TENSORS, tensors, strict=True) if records and x is not None and x.requires_grad
    ]
    out, lse = torch.ops.fastattention.attention(*tensors, *longest, *options[:_NUM_SCALARS], backend, " ".join(grads))
    return AttentionOutput(out, lse if options.return_lse else None)


def call_attention_kvcache(
    arguments: KvCacheArguments, options: Options, rotary_interleaved: bool, num_splits: int, backend: str
) -> AttentionOutput:
    """The operator `fastattention::attention_kvcache`."""
    if not (arguments.cache_seqlens is None or isinstance(arguments.cache_seqlens, Tensor)):
        q, length = arguments.q, read_int("cache_seqlens", arguments.cache_seqlens)
        lengths = torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
        arguments = arguments._replace(cache_seqlens=lengths)
    out, lse = torch.ops.fastattention.attention_kvcache(
        *arguments, options.softmax_scale, options.causal, options.window_left, options.window_right, options.softcap,
        options.return_lse, rotary_interleaved, num_splits, backend,
    )  # fmt: skip
    return AttentionOutput(out, lse if options.return_lse else None)


@torch.library.custom_op("fastattention::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    attn_bias: Tensor | None,
    sinks: Tensor | None,
    dropout_seed: Tensor | None,
    block_mask: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    block_m: int,
    block_n: int,
    qk_dtype: str | None,
    return_lse: bool,
    backend: str,
    grads: str = "",
) -> tuple[Tensor, Tensor]:
    """(out, lse); lse is empty unless return_lse or grads.

    grads: names of the tensors whose gradients autograd will ask for. lse is then what the backward needs: NaN where it
    needs none and nobody asked for it.
    """
    options = Options(
        softmax_scale,
        causal,
        window_left,
        window_right,
        softcap,
        dropout_p,
        deterministic,
        block_m,
        block_n,
        qk_dtype,
        return_lse,
    )
    tensors = (
        q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, alibi_slopes, attn_bias, sinks, dropout_seed, block_mask,
    )  # fmt: skip
    given, max_seqlens = _from_order(tensors), (max_seqlen_q, max_seqlen_k)
    if grads:
        plan, inputs = _training_plan(given, max_seqlens, options, grads, backend)
        if plan.has_backward:
            return _outputs(plan.serve(inputs), q)
    with torch.no_grad():
        plan, inputs = _plan(given, max_seqlens, options, backend)
        result = plan.run(inputs)
    if grads and not return_lse:
        result = result._replace(lse=q.new_full(plan.problem.lse_shape, torch.nan, dtype=torch.float32))
    return _outputs(result, q)


def _from_order(tensors: Sequence[Tensor | None]) -> Inputs:
    return Inputs(**dict(zip(OPERATOR_TENSORS, tensors, strict=True)))  # type: ignore[arg-type]


def _plan(given: Inputs, max_seqlens: MaxSeqlens, options: Options, backend: str) -> tuple[Plan, Inputs]:
    longest = None if _is_dense(given) else max_seqlens
    signature = prefill_signature(given, longest, options, backend)
    return plan_prefill(signature, given, longest, options, backend)


def _training_plan(
    given: Inputs, max_seqlens: MaxSeqlens, options: Options, grads: str, backend: str
) -> tuple[Plan, Inputs]:
    """The plan of a call that will be differentiated, and its tensors as kernels read them, without a graph."""
    with torch.enable_grad():
        plan, inputs = _plan(_leaves(given, grads), max_seqlens, options, backend)
    with torch.no_grad():
        return plan, plan.as_read(inputs)


def _leaves(given: Inputs, grads: str) -> Inputs:
    """Tensors of a graph of its own, in which those called `grads` require a gradient."""
    wanted = grads.split()
    leaves = {name: x.detach().requires_grad_(name in wanted) for name, x in given._asdict().items() if x is not None}
    return given._replace(**leaves)


def _is_dense(given: Inputs) -> bool:
    return given.cu_seqlens_q is None or given.cu_seqlens_k is None


def _outputs(result: AttentionOutput, q: Tensor) -> tuple[Tensor, Tensor]:
    """An operator returns tensors only: an empty one stands for an lse nobody asked for."""
    return result.out, q.new_empty(0, dtype=torch.float32) if result.lse is None else result.lse


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    attn_bias: Tensor | None,
    sinks: Tensor | None,
    dropout_seed: Tensor | None,
    block_mask: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    block_m: int,
    block_n: int,
    qk_dtype: str | None,
    return_lse: bool,
    backend: str,
    grads: str = "",
) -> tuple[Tensor, Tensor]:
    if type(q) is Tensor:  # on the meta device: nothing will run, and nothing else would check
        options = Options(
            softmax_scale, causal, window_left, window_right, softcap, dropout_p, deterministic, block_m, block_n,
            qk_dtype,
        )  # fmt: skip
        if max_seqlen_k is None and cu_seqlens_q is not None:
            attn_bias = block_mask = None  # nobody knows how many keys they are for
        if max_seqlen_q is None and cu_seqlens_q is not None:
            block_mask = None  # nor how many queries
        max_seqlens = q.shape[0] if max_seqlen_q is None else max_seqlen_q, max_seqlen_k or 0
        tensors = (
            q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, alibi_slopes, attn_bias, sinks, None, block_mask,
        )  # fmt: skip
        given = _from_order(tensors)
        prepare_prefill(given, None if _is_dense(given) else max_seqlens, options)
    return _fake_outputs(q, v, return_lse or grads != "")


def _fake_outputs(q: Tensor, v: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    *batch, tokens, nheads = q.shape[:-1]
    return out, q.new_empty((*batch, nheads, tokens) if return_lse else 0, dtype=torch.float32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *scalars, ctx.return_lse, ctx.backend_name, ctx.grads = inputs[_NUM_TENSORS:]
    ctx.scalars = scalars
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *(output if ctx.grads else (None, None)))
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    if not ctx.return_lse:
        grad_lse = None  # of what stands in place of lse
    nothing = (None,) * (len(ctx.scalars) + 3)
    if grad_out is None and grad_lse is None:
        return (None,) * _NUM_TENSORS + nothing
    *tensors, out, lse = ctx.saved_tensors
    # Who called the operator without saying so gets them as well.
    grads = ctx.grads or " ".join(compress(OPERATOR_TENSORS, ctx.needs_input_grad))
    found = torch.ops.fastattention.attention_backward(
        grad_out, grad_lse, *tensors, out, lse, *ctx.scalars, grads, ctx.backend_name
    )
    by_name = dict(zip(grads.split(), found, strict=True))
    return tuple(by_name.get(name) for name in OPERATOR_TENSORS) + nothing


attention.register_autograd(_backward, setup_context=_save_for_backward)


@torch.library.custom_op("fastattention::attention_backward", mutates_args=())
def attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    attn_bias: Tensor | None,
    sinks: Tensor | None,
    dropout_seed: Tensor | None,
    block_mask: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    block_m: int,
    block_n: int,
    qk_dtype: str | None,
    grads: str,
    backend: str,
) -> List[Tensor]:  # noqa: UP006
    """Gradients of the tensors called `grads`, in that order.

    out, lse: what a forward gave that was told of the same `grads`; None computes it again, on the sdpa backend.
    """
    options = Options(
        softmax_scale, causal, window_left, window_right, softcap, dropout_p, deterministic, block_m, block_n,
        qk_dtype, return_lse=grad_lse is not None,
    )  # fmt: skip
    tensors = (
        q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, alibi_slopes, attn_bias, sinks, dropout_seed, block_mask,
    )  # fmt: skip
    given, max_seqlens = _from_order(tensors), (max_seqlen_q, max_seqlen_k)
    plan, inputs = _training_plan(given, max_seqlens, options, grads, "sdpa" if out is None else backend)
    from_gradients = OutputGradients(grad_out, grad_lse)
    if plan.has_backward:
        assert out is not None
        found = gradients(plan.backend, plan.problem, inputs, AttentionOutput(out, lse), from_gradients)
    else:
        with recording():
            found = gradients_by_torch(plan.problem, inputs, from_gradients)
    return [found[name].to(getattr(given, name).dtype) for name in grads.split()]


@attention_backward.register_fake
def _(grad_out: Tensor | None, grad_lse: Tensor | None, *arguments: Any) -> list[Tensor]:
    tensors, grads = dict(zip(OPERATOR_TENSORS, arguments[:_NUM_TENSORS], strict=True)), arguments[-2]
    return [torch.empty_like(tensors[name], memory_format=torch.contiguous_format) for name in grads.split()]


@torch.library.custom_op("fastattention::attention_kvcache", mutates_args=("k_cache", "v_cache", "k_scale", "v_scale"))
def attention_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    attn_bias: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    return_lse: bool,
    rotary_interleaved: bool,
    num_splits: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse); lse is empty unless return_lse."""
    options = Options(softmax_scale, causal, window_left, window_right, softcap, return_lse=return_lse)
    arguments = KvCacheArguments(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        alibi_slopes, attn_bias, sinks, k_scale, v_scale,
    )  # fmt: skip
    signature = kvcache_signature(arguments, options, rotary_interleaved, num_splits, backend)
    plan, inputs = plan_kvcache(signature, arguments, options, rotary_interleaved, num_splits, backend)
    return _outputs(plan.run(inputs), q)


@attention_kvcache.register_fake
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    attn_bias: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    return_lse: bool,
    rotary_interleaved: bool,
    num_splits: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    if type(q) is Tensor:  # on the meta device, as above
        arguments = KvCacheArguments(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
            block_table, alibi_slopes, attn_bias, sinks, k_scale, v_scale,
        )  # fmt: skip
        options = Options(softmax_scale, causal, window_left, window_right, softcap)
        prepare_kvcache(arguments, options, rotary_interleaved, num_splits)
    return _fake_outputs(q, v_cache, return_lse)


flops.register()
if hasattr(attention, "register_vmap"):  # from torch 2.5 on; before, vmap calls operators one by one, with a warning
    attention.register_vmap(vmap_attention)
    attention_backward.register_vmap(vmap_attention_backward)
    attention_kvcache.register_vmap(vmap_attention_kvcache)
