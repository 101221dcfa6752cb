"""The variants that calls ask for, without a call: to compile ahead, to look at, to test."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable

import torch

from fastattention.backends.cuda import heuristics
from fastattention.backends.cuda.chips import CHIPS, Limits
from fastattention.backends.cuda.kernel_config import KernelConfig
from fastattention.problem import Layout, Problem

HEADDIMS = (32, 64, 96, 128, 192, 256)  # all that heuristics.padded_headdim gives
DTYPES = (torch.float16, torch.bfloat16)
SEQLEN = 4096  # queries and keys of a call, where nothing else is said


class Feature(enum.Enum):
    """What a kernel is compiled with. Masks, lengths, sinks and lse are choices of a call: every kernel has them."""

    PLAIN = "plain"
    SCORES = "scores"  # softcap, ALiBi, bias, or a softmax_scale that is not positive
    PAGED = "paged"


def choose_variant(
    arch: int,
    limits: Limits,
    dtype: torch.dtype,
    headdim: int,
    headdim_v: int,
    *,
    modifies_scores: bool = False,
    paged: bool = False,
    seqlen: int = SEQLEN,
) -> KernelConfig:
    """The variant that serves a call on a GPU: the heuristics' own answer. Raises CompileError when none fits."""
    problem = Problem(
        layout=Layout.PACKED if paged else Layout.DENSE,
        device=torch.device("cuda"),
        dtype=dtype,
        batch_size=1,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        total_q=seqlen,
        nheads=16,
        nheads_k=16,
        headdim=headdim,
        headdim_v=headdim_v,
        softmax_scale=headdim**-0.5,
        window_left=-1,
        window_right=0,
        softcap=1.0 if modifies_scores else 0.0,
        page_block_size=64 if paged else None,
    )
    return heuristics.choose_config(problem, arch, limits)


def choose_feature(
    arch: int, limits: Limits, dtype: torch.dtype, headdim: int, feature: Feature, seqlen: int = SEQLEN
) -> KernelConfig:
    """`choose_variant` for equally wide keys and values and one feature."""
    scores, paged = feature is Feature.SCORES, feature is Feature.PAGED
    return choose_variant(arch, limits, dtype, headdim, headdim, modifies_scores=scores, paged=paged, seqlen=seqlen)


def variants_of(
    limits: Limits,
    headdims: Iterable[int] = HEADDIMS,
    dtypes: Iterable[torch.dtype] = DTYPES,
    arch: int | None = None,
) -> list[KernelConfig]:
    """Every variant that such calls can need on a GPU, each once: bfloat16 and float16 share one before Ampere.

    arch: the code path; None is the GPU's own.
    """
    calls = itertools.product(dtypes, headdims, Feature, heuristics.representative_seqlens())
    return list(dict.fromkeys(choose_feature(arch or limits.arch, limits, *call) for call in calls))


def known_limits(target: int) -> Limits | None:
    """Limits of the GPUs of a compute capability, or None where chips.py has none."""
    return next((limits for limits in CHIPS.values() if limits.target == target), None)
