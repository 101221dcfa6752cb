"""The operators of attention: ATTENTION for dense and varlen calls, and ATTENTION_KVCACHE for those with a cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fastattention.attention import flops
from fastattention.attention.backend import ATTENTION_BACKENDS, AttentionBackend
from fastattention.attention.problem import AttentionOutput, Inputs, Layout, OutputGradients, Problem
from fastattention.attention.validation import KvCacheArguments, Options, prepare_kvcache, prepare_prefill
from fastattention.attention.validation.common import as_kernels_read
from fastattention.attention.validation.lengths import (
    check_cache,
    check_cache_numbers,
    check_varlen,
    check_varlen_numbers,
)
from fastattention.backends.common.gradients import NO_BACKWARD
from fastattention.backends.common.traffic import Extent
from fastattention.engine.checks import is_functionalizing, needs_grad, read_int
from fastattention.engine.eager import require_eager
from fastattention.engine.explain import Traffic
from fastattention.engine.operator import G, Operator
from fastattention.engine.signature import CallSignature, signature_of
from fastattention.errors import UnsupportedError
from fastattention.gpu_runtime.module import is_capturing

Serve = Callable[[Inputs], AttentionOutput]
Shapes = dict[str, tuple[Sequence[int], torch.dtype]]


class _AttentionOperator(Operator[G, Options, Problem, Inputs, AttentionOutput, AttentionBackend]):
    """The common base of operators of attention, for any tensors that callers give."""

    registry = ATTENTION_BACKENDS
    fallback = "sdpa"
    options = Options
    inputs = Inputs
    output = AttentionOutput
    results = ("out", "lse")
    asked_by: ClassVar[Mapping[str, str]] = {"lse": "return_lse"}

    def as_read(self, problem: Problem, inputs: Inputs, names: Sequence[str]) -> Inputs:
        return as_kernels_read(problem, inputs, names)

    def around(self, backend: AttentionBackend, problem: Problem, serve: Serve) -> Serve:
        if backend.reads_numbers and problem.layout is not Layout.DENSE and problem.device.type != "cpu":
            return functools.partial(_serve_checked, problem, serve)
        return serve

    def traffic(self, backend: AttentionBackend, problem: Problem, inputs: Inputs) -> Traffic | None:
        return backend.traffic(problem, Extent.of(problem, inputs))


class Attention(_AttentionOperator[Inputs]):
    """Dense calls, and varlen calls: those with cu_seqlens."""

    name = "attention"
    given = Inputs
    tensors = Inputs._fields[: Inputs._fields.index("cache_seqlens")]
    scalars = (
        "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal", "window_left", "window_right", "softcap",
        "dropout_p", "deterministic", "block_m", "block_n", "qk_dtype", "return_lse",
    )  # fmt: skip
    unnamed = ("dropout_seed",)
    gradients = OutputGradients
    broadcast: ClassVar[Mapping[str, int]] = {"alibi_slopes": 2, "attn_bias": 4, "block_mask": 4, "tile_index": 4}

    def prepare(self, given: Inputs, options: Options) -> tuple[Problem, Inputs]:
        return prepare_prefill(given, options)

    def recheck(self, problem: Problem) -> Callable[[Inputs, Options], Inputs | None] | None:
        if problem.layout is Layout.DENSE:
            return None
        longest = (problem.seqlen_q, problem.seqlen_k)
        return lambda given, options: given if check_varlen(given, options) == longest else None

    def result_shapes(self, given: Inputs, options: Options, differentiated: bool) -> Shapes:
        return _shapes(given.q, given.v, options.return_lse or differentiated)

    def scalars_of(self, problem: Problem) -> Options:
        varlen = problem.layout is Layout.VARLEN
        block_m, block_n = problem.block_size or (0, 0)
        return Options(
            max_seqlen_q=problem.seqlen_q if varlen else None,
            max_seqlen_k=problem.seqlen_k if varlen else None,
            softmax_scale=problem.softmax_scale,
            window_left=problem.window_left,
            window_right=problem.window_right,
            softcap=problem.softcap,
            dropout_p=problem.dropout_p,
            deterministic=problem.deterministic,
            block_m=block_m,
            block_n=block_n,
        )

    def check_traceable(self, given: Inputs, options: Options) -> None:
        if options.dropout_p and options.return_mask:
            raise UnsupportedError(
                f"return_attn_probs with dropout_p={options.dropout_p} gives the dropout mask, which a traced call "
                "cannot return; use return_lse, or call outside torch.compile"
            )

    def meta_arguments(self, given: Inputs, options: Options) -> tuple[Inputs, Options]:
        given = given._replace(dropout_seed=None)
        if given.cu_seqlens_q is None:
            return given, options
        longest_q, longest_k = options.max_seqlen_q, options.max_seqlen_k
        if longest_k is None:  # the number of keys is unknown
            given = given._replace(attn_bias=None, block_mask=None)
        if longest_q is None:
            given = given._replace(block_mask=None)
        longest_q = given.q.shape[0] if longest_q is None else longest_q
        return given, options._replace(max_seqlen_q=longest_q, max_seqlen_k=longest_k or 0)

    def joined_axes(self, arguments: Mapping[str, Any], mapped: Collection[str]) -> Mapping[str, int] | None:
        if arguments["cu_seqlens_q"] is not None or arguments["dropout_seed"] is not None:
            return None
        return dict.fromkeys(("q", "k", "v", *self.broadcast, *self.results), 0)

    def flops(self, arguments: Mapping[str, Any], backward: bool) -> int:
        return flops.of_prefill(arguments, backward)


class AttentionKvCache(_AttentionOperator[KvCacheArguments]):
    """Calls with a cache, which appends are written to in place. They have no backward."""

    name = "attention_kvcache"
    given = KvCacheArguments
    tensors = KvCacheArguments._fields
    scalars = (
        "softmax_scale", "causal", "window_left", "window_right", "softcap", "return_lse", "rotary_interleaved",
        "num_splits",
    )  # fmt: skip
    written = ("k_cache", "v_cache", "k_scale", "v_scale")

    def prepare(self, given: KvCacheArguments, options: Options) -> tuple[Problem, Inputs]:
        return prepare_kvcache(given, options)

    def signature(self, given: KvCacheArguments, options: Options, backend: str) -> CallSignature | None:
        """One length for all sequences stands as a flag: calls of any length share a plan."""
        if type(given.cache_seqlens) is int:
            return signature_of(given._replace(cache_seqlens=None), backend, (options, True))
        return signature_of(given, backend, (options, False))

    def recheck(self, problem: Problem) -> Callable[[KvCacheArguments, Options], Inputs | None]:
        return lambda given, _: check_cache(problem, given.inputs(), given.cache_seqlens)

    def inputs_of(self, given: KvCacheArguments, inputs: Inputs) -> Inputs:
        before = given.inputs()
        return before if before.cache_seqlens is not None else before._replace(cache_seqlens=inputs.cache_seqlens)

    def around(self, backend: AttentionBackend, problem: Problem, serve: Serve) -> Serve:
        serve = super().around(backend, problem, serve)
        return functools.partial(_serve_counted, serve) if problem.seqlen_new else serve

    def names_given(self, problem: Problem, inputs: Inputs) -> dict[str, object]:
        names = {"k": "k_cache", "v": "v_cache", "k_new": "k", "v_new": "v"}
        return {names.get(name, name): tensor for name, tensor in inputs._asdict().items()}

    def result_shapes(self, given: KvCacheArguments, options: Options, differentiated: bool) -> Shapes:
        return _shapes(given.q, given.v_cache, options.return_lse)

    def check_traceable(self, given: KvCacheArguments, options: Options) -> None:
        if needs_grad(*given):
            raise UnsupportedError(NO_BACKWARD)
        if options.panels is not None:
            require_eager(given._asdict(), "; use a DenseKVStore")
        if is_functionalizing():
            raise UnsupportedError(
                "torch.func.functionalize does not follow operators that write their caches in place"
            )

    def as_torch_takes(self, given: KvCacheArguments, options: Options) -> tuple[KvCacheArguments, Options]:
        if given.cache_seqlens is None or isinstance(given.cache_seqlens, Tensor):
            return given, options
        length, q = read_int("cache_seqlens", given.cache_seqlens), given.q
        lengths = torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
        return given._replace(cache_seqlens=lengths), options

    def check_mapped(self, arguments: Mapping[str, Any], mapped: Mapping[str, int | None]) -> None:
        for name in ("k_cache", "v_cache"):
            if arguments["k"] is not None and mapped[name] is None:
                raise UnsupportedError(
                    f"vmap does not map {name}, which every index of the mapped axis would append to"
                )

    def flops(self, arguments: Mapping[str, Any], backward: bool) -> int:
        return flops.of_kvcache(arguments)


def _shapes(q: Tensor, v: Tensor, returns_lse: bool) -> Shapes:
    *batch, tokens, nheads = q.shape[:-1]
    lse = (*batch, nheads, tokens) if returns_lse else (0,)
    return {"out": ((*q.shape[:-1], v.shape[-1]), q.dtype), "lse": (lse, torch.float32)}


def _serve_counted(serve: Serve, inputs: Inputs) -> AttentionOutput:
    """Tells autograd of writes in place, as torch does of its own: a backward that needs what was there is an error."""
    result = serve(inputs)
    written = (inputs.k, inputs.v, inputs.k_scale, inputs.v_scale)
    increment_version([tensor for tensor in written if tensor is not None and not tensor.is_inference()])
    return result


def _serve_checked(problem: Problem, serve: Serve, inputs: Inputs) -> AttentionOutput:
    """A call off the CPU whose backend reads lengths, offsets and page indices: they are checked as on the CPU."""
    if inputs.q.is_cuda and is_capturing():
        raise UnsupportedError(
            "the backend of this call reads the lengths of sequences in host memory, which no CUDA graph can capture; "
            f"q has dtype {problem.dtype}, and backend 'cuda', which does not read them, takes float16 and bfloat16"
        )
    if problem.layout is Layout.VARLEN:
        check_varlen_numbers(inputs, (problem.seqlen_q, problem.seqlen_k), rows_behind=True)
    else:
        check_cache_numbers(problem, inputs)
    return serve(inputs)


ATTENTION = Attention()
ATTENTION_KVCACHE = AttentionKvCache()
