"""torch.library operators, so that calls can be traced (torch.compile, fake tensors).

`fastattention::attention` serves dense and varlen calls and has a backward, which computes the forward again on the
sdpa backend and differentiates that. `fastattention::attention_kvcache` writes its caches in place and has none.
An operator's scalars are those of `Options`, in order. Annotations are types, not strings: torch 2.4 reads schemas from
them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, List  # noqa: UP035  list[...] is no schema to torch 2.4

import torch
from torch import Tensor

from fastattention import flops
from fastattention.dispatch import kvcache_signature, plan_kvcache, plan_prefill, prefill_signature
from fastattention.problem import AttentionOutput, Inputs
from fastattention.validation import KvCacheArguments, Options, prepare_kvcache, prepare_prefill
from fastattention.validation.common import read_int
from fastattention.validation.prefill import MaxSeqlens
from fastattention.vmap import vmap_attention, vmap_attention_backward, vmap_attention_kvcache


def call_attention(given: Inputs, max_seqlens: MaxSeqlens, options: Options, backend: str) -> AttentionOutput:
    """The operator `fastattention::attention`."""
    names = ("max_seqlen_q", "max_seqlen_k")
    longest = [read_int(n, x) if isinstance(x, Tensor) else x for n, x in zip(names, max_seqlens, strict=True)]
    tensors = [getattr(given, name) for name in _TENSORS]
    out, lse = torch.ops.fastattention.attention(*tensors, *longest, *options, backend)
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
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    return_lse: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse); lse is empty unless return_lse."""
    options = Options(softmax_scale, causal, window_left, window_right, softcap, dropout_p, deterministic, return_lse)
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, alibi_slopes, attn_bias, sinks, dropout_seed)
    return _outputs(_run_attention(_from_order(tensors), (max_seqlen_q, max_seqlen_k), options, backend), q)


# The fields of Inputs that are arguments of `fastattention::attention`, in the order of its schema.
_TENSORS = (
    "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "block_table", "alibi_slopes", "attn_bias", "sinks", "dropout_seed",
)  # fmt: skip


def _from_order(tensors: Sequence[Tensor | None]) -> Inputs:
    return Inputs(**dict(zip(_TENSORS, tensors, strict=True)))  # type: ignore[arg-type]


def _run_attention(given: Inputs, max_seqlens: MaxSeqlens, options: Options, backend: str) -> AttentionOutput:
    longest = None if _is_dense(given) else max_seqlens
    signature = prefill_signature(given, longest, options, backend)
    plan, inputs = plan_prefill(signature, given, longest, options, backend)
    return plan.run(inputs)


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
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    return_lse: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    if type(q) is Tensor:  # on the meta device: nothing will run, and nothing else would check
        options = Options(softmax_scale, causal, window_left, window_right, softcap, dropout_p, deterministic)
        if max_seqlen_k is None and cu_seqlens_q is not None:
            attn_bias = None  # nobody knows how many keys it is for
        max_seqlens = q.shape[0] if max_seqlen_q is None else max_seqlen_q, max_seqlen_k or 0
        tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, alibi_slopes, attn_bias, sinks, None)
        given = _from_order(tensors)
        prepare_prefill(given, None if _is_dense(given) else max_seqlens, options)
    return _fake_outputs(q, v, return_lse)


def _fake_outputs(q: Tensor, v: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    *batch, tokens, nheads = q.shape[:-1]
    return out, q.new_empty((*batch, nheads, tokens) if return_lse else 0, dtype=torch.float32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:10])
    ctx.scalars = inputs[10:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    *scalars, return_lse, _ = ctx.scalars
    if not return_lse:
        grad_lse = None  # of the empty tensor in place of lse
    if grad_out is None and grad_lse is None:
        return (None,) * (10 + len(ctx.scalars))
    wanted = [bool(needed) for needed in ctx.needs_input_grad[:10]]
    found = torch.ops.fastattention.attention_backward(grad_out, grad_lse, *ctx.saved_tensors, wanted, *scalars)
    gradients = iter(found)
    return tuple(next(gradients) if needed else None for needed in wanted) + (None,) * len(ctx.scalars)


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
    wanted: List[bool],  # noqa: UP006
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
) -> List[Tensor]:  # noqa: UP006
    """Gradients of those of q to dropout_seed that `wanted` marks, by computing the forward again on sdpa."""
    with_lse = grad_lse is not None
    options = Options(softmax_scale, causal, window_left, window_right, softcap, dropout_p, deterministic, with_lse)
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, alibi_slopes, attn_bias, sinks, dropout_seed)
    leaves = [
        tensor.detach().requires_grad_(needed) if tensor is not None else None
        for tensor, needed in zip(tensors, wanted, strict=True)
    ]
    sources = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    with _autograd():
        result = _run_attention(_from_order(leaves), (max_seqlen_q, max_seqlen_k), options, "sdpa")
        given = [(x, grad) for x, grad in ((result.out, grad_out), (result.lse, grad_lse)) if grad is not None]
        outputs, output_gradients = zip(*given, strict=True)
        gradients = torch.autograd.grad(outputs, sources, output_gradients, allow_unused=True, materialize_grads=True)
    return [gradient.contiguous() for gradient in gradients]


@contextlib.contextmanager
def _autograd() -> Iterator[None]:
    """Lets autograd record inside an operator, which torch runs with autograd's dispatch keys excluded."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


_AUTOGRAD_KEYS = tuple(
    getattr(torch._C.DispatchKey, name)
    for name in ("ADInplaceOrView", "AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")
)


@attention_backward.register_fake
def _(grad_out: Tensor | None, grad_lse: Tensor | None, *arguments: Any) -> list[Tensor]:
    tensors, wanted = arguments[:10], arguments[10]
    return [
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor, needed in zip(tensors, wanted, strict=True)
        if needed
    ]


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
