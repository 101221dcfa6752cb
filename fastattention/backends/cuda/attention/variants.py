"""Lists the kernel variants that calls ask for, to compile them ahead, inspect or test them."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch

from fastattention.attention.problem import Layout, Problem
from fastattention.backends.cuda.attention import decode_heuristics, heuristics
from fastattention.backends.cuda.attention.backward import choose_backward_launches, why_not_widths
from fastattention.backends.cuda.attention.config import (
    CACHE_FORMATS,
    WIDEST_OF_A_WARP,
    AppendConfig,
    KernelConfig,
    MergeConfig,
    QuantizeConfig,
    lanes_for,
    stored_columns,
)
from fastattention.backends.cuda.attention.heuristics import multiplies_int8
from fastattention.gpu_runtime.chips import Limits
from fastattention.gpu_runtime.variant import Variant

HEADDIMS = (32, 64, 96, 128, 192, 256, 512)  # head dimensions of keys that heuristics.padded_headdims gives
DTYPES = (torch.float16, torch.bfloat16)
SEQLEN = 4096  # queries and keys of a call, where nothing else is said


class Feature(enum.Enum):
    """What a kernel is compiled with. Masks, lengths, sinks and lse are choices of a call: every kernel has them."""

    PLAIN = "plain"
    SOFTCAP = "softcap"
    ALIBI = "alibi"
    BIAS = "bias"
    PAGED = "paged"
    BLOCKS = "blocks"  # a block mask
    PRODUCTS = "products"  # int8 products of queries and keys
    INT8 = "int8"  # a quantized cache
    FLOAT8 = "float8"

    @property
    def cache_dtype(self) -> torch.dtype | None:
        """The dtype of a quantized cache, as in Problem; None without one."""
        return next((dtype for dtype, name in CACHE_FORMATS.items() if name == self.value), None)


SCORES = (Feature.SOFTCAP, Feature.ALIBI, Feature.BIAS)
UNQUANTIZED = (Feature.PLAIN, *SCORES, Feature.PAGED, Feature.BLOCKS, Feature.PRODUCTS)
_OF_FORWARDS_ALONE = (Feature.BLOCKS, Feature.PRODUCTS)

_CALL = Problem(
    layout=Layout.DENSE,
    device=torch.device("cuda"),
    dtype=torch.float16,
    batch_size=1,
    seqlen_q=SEQLEN,
    seqlen_k=SEQLEN,
    total_q=SEQLEN,
    nheads=16,
    nheads_k=16,
    headdim=64,
    headdim_v=64,
    softmax_scale=0.125,
    window_left=-1,
    window_right=0,
)


def _with_features(problem: Problem, features: Collection[Feature]) -> Problem:
    tensors = {Feature.ALIBI: "alibi_slopes", Feature.BIAS: "attn_bias"}
    return replace(
        problem,
        softcap=50.0 if Feature.SOFTCAP in features else 0.0,
        score_tensors=tuple(name for feature, name in tensors.items() if feature in features),
        page_block_size=64 if Feature.PAGED in features else None,
        block_size=(128, 128) if Feature.BLOCKS in features else None,
        qk_dtype=torch.int8 if Feature.PRODUCTS in features else None,
        cache_dtype=next((feature.cache_dtype for feature in features if feature.cache_dtype), None),
    )


def choose_variant(
    arch: int,
    limits: Limits,
    dtype: torch.dtype,
    headdim: int,
    headdim_v: int,
    features: Collection[Feature] = (),
    seqlen: int = SEQLEN,
) -> KernelConfig:
    """The variant that serves a call on a GPU: the heuristics' own answer. Raises CompileError when none fits.

    features: a quantized cache lies in pages
    """
    problem = replace(
        _CALL,
        layout=Layout.VARLEN if Feature.PAGED in features else Layout.DENSE,
        dtype=dtype,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        total_q=seqlen,
        headdim=headdim,
        headdim_v=headdim_v,
    )
    return heuristics.choose_config(_with_features(problem, features), arch, limits)


def choose_decode_variant(
    arch: int,
    limits: Limits,
    dtype: torch.dtype,
    headdim: int,
    headdim_v: int,
    features: Collection[Feature] = (),
    rows: int = 1,
    keys: int = 0,
) -> KernelConfig:
    """The kernel of a decode.

    rows: query rows that share a key head; keys: keys of all heads, for each multiprocessor
    """
    problem = replace(
        _CALL,
        layout=Layout.KVCACHE,
        dtype=dtype,
        seqlen_q=1,
        seqlen_k=keys * limits.num_sms,
        total_q=1,
        nheads=rows,
        nheads_k=1,
        headdim=headdim,
        headdim_v=headdim_v,
    )
    return decode_heuristics.choose_decode(_with_features(problem, features), arch, limits)


def variants_of(
    limits: Limits,
    headdims: Sequence[int] = HEADDIMS,
    dtypes: Sequence[torch.dtype] = DTYPES,
    arch: int | None = None,
    features: Sequence[Feature] = tuple(Feature),
) -> list[Variant]:
    """Every variant that such calls need without training, each once: forwards, decodes, appends and merges.

    arch: the code path; None is the GPU's own.
    """
    arch = arch or limits.arch
    of_forwards = [(feature,) if feature in UNQUANTIZED else (Feature.PAGED, feature) for feature in features]
    seqlens, decodes = heuristics.representative_seqlens(), decode_heuristics.representative_calls()
    formats = [CACHE_FORMATS[feature.cache_dtype] for feature in features]
    columns = dict.fromkeys(AppendConfig.columns_for(headdim, headdim) for headdim in headdims)
    variants: Iterator[Variant] = itertools.chain(
        (
            choose_variant(arch, limits, dtype, headdim, headdim, together, seqlen)
            for dtype, headdim, together, seqlen in itertools.product(dtypes, headdims, of_forwards, seqlens)
            if Feature.PRODUCTS not in together or multiplies_int8(arch, headdim)
        ),
        (
            choose_decode_variant(arch, limits, dtype, headdim, headdim, (feature,), rows, keys)
            for dtype, headdim, feature, (rows, keys) in itertools.product(dtypes, headdims, features, decodes)
            if feature not in _OF_FORWARDS_ALONE
        ),
        _quantizers_of(dtypes, headdims if Feature.PRODUCTS in features and multiplies_int8(arch) else ()),
        (AppendConfig(*append) for append in itertools.product(dtypes, formats, columns)),
        _merges_of(dtypes) if Feature.PLAIN in features else (),
    )
    return list(dict.fromkeys(variants))


def training_variants_of(
    limits: Limits,
    headdims: Sequence[int] = HEADDIMS,
    dtypes: Sequence[torch.dtype] = DTYPES,
    arch: int | None = None,
) -> list[Variant]:
    """Further variants for training: backwards (plain, rules of scores, blocks, dropout), and forwards with dropout.

    Backwards add in any order, and for deterministic calls in the same.
    """
    arch = arch or limits.arch
    plain = replace(_CALL, grads=("q", "k", "v"))
    kinds = [_with_features(plain, (feature,)) for feature in (Feature.PLAIN, *SCORES, Feature.BLOCKS)]
    kinds.append(replace(plain, dropout_p=0.1))
    variants: list[Variant] = []
    for dtype, headdim in itertools.product(dtypes, headdims):
        problems = [replace(problem, dtype=dtype, headdim=headdim, headdim_v=headdim) for problem in kinds]
        variants += [
            heuristics.choose_config(replace(problems[-1], seqlen_q=seqlen), arch, limits)
            for seqlen in heuristics.representative_seqlens()
        ]
        for problem, deterministic in itertools.product(problems, (False, True)):
            problem = replace(problem, deterministic=deterministic)
            if why_not_widths(problem, arch, limits) is None:
                launches = choose_backward_launches(problem, arch, limits)
                variants += [launches.delta.variant, *(step.config for step in launches.passes)]
    return list(dict.fromkeys(variants))


def _quantizers_of(dtypes: Sequence[torch.dtype], headdims: Sequence[int]) -> Iterator[QuantizeConfig]:
    """Kernels that quantize rows, for the dtypes in which a GPU computes."""
    for dtype, headdim in itertools.product(dtypes, headdims):
        if headdim <= WIDEST_OF_A_WARP:
            yield QuantizeConfig(dtype, lanes_for(stored_columns(headdim)))


def _merges_of(dtypes: Sequence[torch.dtype]) -> Iterator[MergeConfig]:
    """Kernels that merge parts: of few, and of more than one launch takes, whose groups are merged in float32 first."""
    yield MergeConfig(torch.float32, torch.float32)
    for dtype in dtypes:
        yield MergeConfig(dtype, dtype)
        yield MergeConfig(dtype, torch.float32)
        yield MergeConfig(torch.float32, dtype)
