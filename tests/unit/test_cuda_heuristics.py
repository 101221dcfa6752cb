"""The choice of a kernel: pure Python, for every supported GPU."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastattention.attention.problem import MAX_HEADDIM, MAX_HEADDIM_V
from fastattention.backends.cuda.attention import heuristics
from fastattention.backends.cuda.attention.config import (
    WIDEST_OF_A_WARP,
    KernelConfig,
    why_not_fitting,
)
from fastattention.backends.cuda.attention.heuristics import choose_config, multiplies_int8
from fastattention.backends.cuda.attention.variants import (
    DTYPES,
    HEADDIMS,
    SCORES,
    UNQUANTIZED,
    Feature,
    choose_variant,
    variants_of,
)
from fastattention.backends.cuda.common.arch import ARCH_FACTS
from fastattention.errors import CompileError
from fastattention.gpu_runtime.chips import ARCHS, CHIPS, Limits, arch_of
from unit.samples import problem_of

FEATURES = [(), *((one,) for one in SCORES), (*SCORES, Feature.PAGED), (Feature.PAGED,)]


UNIFORM = {"nheads": 16, "nheads_k": 16, "headdim": 64}  # no heads share keys


def kernels_of(chip: str) -> list[KernelConfig]:
    """All kernels of a GPU, except those that append."""
    return [variant for variant in variants_of(CHIPS[chip]) if isinstance(variant, KernelConfig)]


@pytest.mark.parametrize("headdim", HEADDIMS)
@pytest.mark.parametrize("chip", CHIPS)
def test_every_call_gets_a_kernel_that_fits_its_gpu(chip: str, headdim: int) -> None:
    limits = CHIPS[chip]
    for headdim_v, dtype, features in itertools.product(HEADDIMS, DTYPES, FEATURES):
        config = choose_variant(limits.arch, limits, dtype, headdim, headdim_v, features)
        assert why_not_fitting(config, limits) is None
        rules = config.softcaps, config.has_alibi, config.has_bias
        assert rules == tuple(one in features for one in SCORES)
        assert (config.arch, config.extreme_scores) == (limits.arch, False)
        assert config.paged == (Feature.PAGED in features)
        columns = heuristics.padded_headdims(headdim, headdim_v)
        assert (config.headdim, config.headdim_v * config.num_value_parts) == columns
        assert config.dtype == (dtype if limits.arch >= 80 else torch.float16)


@pytest.mark.parametrize("chip", CHIPS)
def test_every_kernel_is_one_that_forward_cuh_accepts(chip: str) -> None:
    for config in kernels_of(chip):
        if config.decodes:
            continue
        assert config.tile_m % (config.row_warps * ARCH_FACTS[config.arch].step_rows) == 0
        assert config.tile_n % 8 == 0
        assert config.num_warps <= 32
        assert config.num_stages in (1, 2)


@pytest.mark.parametrize("chip", CHIPS)
def test_names_are_unique(chip: str) -> None:
    variants = variants_of(CHIPS[chip])
    assert len({variant.name for variant in variants}) == len(variants) == len(set(variants))


def test_a_list_has_the_features_that_are_asked_for() -> None:
    def kinds(*features: Feature) -> set[tuple[str, str]]:
        variants = variants_of(CHIPS["T4"], headdims=(64,), features=features)
        return {(variant.source, getattr(variant, "cache_format", "")) for variant in variants}

    sources = ("forward.cuh", "decode.cuh", "append.cuh", "merge.cuh", "quantize_rows.cuh")
    assert kinds(*UNQUANTIZED) == {(source, "") for source in sources}
    assert kinds(Feature.INT8) == {(source, "int8") for source in ("forward.cuh", "decode.cuh", "append.cuh")}
    assert kinds() == set()
    kernels = kernels_of("T4")
    rules = {(one.source, *one.rules, one.paged) for one in kernels}
    assert len(rules) == 2 * (1 + len(SCORES) + 1)


@pytest.mark.parametrize(
    ("target", "arch"),
    [(60, 60), (61, 60), (70, 70), (72, 70), (75, 75), (80, 80), (86, 80), (89, 80), (90, 80), (120, 80)],
)
def test_a_gpu_takes_the_newest_code_path_that_is_not_newer(target: int, arch: int) -> None:
    assert arch_of(target) == arch


def test_a_gpu_older_than_pascal_is_refused() -> None:
    with pytest.raises(ValueError, match=r"compute capability 5.2 is not supported; Pascal \(6.0\) is the oldest"):
        arch_of(52)


def test_every_code_path_has_a_chip() -> None:
    assert {limits.arch for limits in CHIPS.values()} == set(ARCHS) == set(ARCH_FACTS)


@pytest.mark.parametrize(
    ("headdim", "columns"),
    [
        (1, 32), (32, 32), (33, 64), (40, 64), (64, 64), (72, 96), (96, 96), (128, 128), (136, 192), (192, 192),
        (256, 256), (257, 512), (512, 512),
    ],
)  # fmt: skip
def test_head_dimensions_are_rounded_up(headdim: int, columns: int) -> None:
    assert heuristics.padded_headdims(headdim, headdim) == (columns, columns)
    limits = CHIPS["A100"]
    assert choose_variant(80, limits, torch.float16, headdim, headdim).headdim == columns


@given(st.integers(1, MAX_HEADDIM), st.integers(1, MAX_HEADDIM_V))
def test_tiles_are_never_narrower_than_the_call(headdim: int, headdim_v: int) -> None:
    columns, columns_v = heuristics.padded_headdims(headdim, headdim_v)
    assert headdim <= columns
    assert headdim_v <= columns_v
    if max(headdim, headdim_v) > WIDEST_OF_A_WARP:
        assert (columns, columns_v) == (576 if headdim > 512 else 512, 512)
        return
    for size, asked in ((columns, headdim), (columns_v, headdim_v)):
        assert size == HEADDIMS[0] or asked > HEADDIMS[HEADDIMS.index(size) - 1]


RULES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, ()),
    "causal": ({"window_right": 0}, ()),
    "sinks": ({"score_tensors": ("sinks",)}, ()),
    "softcap": ({"softcap": 30.0}, ("softcaps",)),
    "high softcap": ({"softcap": 129.0}, ("softcaps", "extreme_scores")),
    "low softcap": ({"softcap": 1e-7}, ("softcaps", "extreme_scores")),
    "alibi": ({"score_tensors": ("alibi_slopes",)}, ("has_alibi",)),
    "bias": ({"score_tensors": ("attn_bias",)}, ("has_bias",)),
    "all": ({"score_tensors": ("alibi_slopes", "attn_bias"), "softcap": 9.0}, ("softcaps", "has_alibi", "has_bias")),
    "negative scale": ({"softmax_scale": -1.0}, ("extreme_scores",)),
    "zero scale": ({"softmax_scale": 0.0}, ("extreme_scores",)),
}


@pytest.mark.parametrize(("call", "rules"), RULES.values(), ids=RULES)
def test_a_kernel_has_the_rules_of_scores_that_a_call_has(call: dict[str, Any], rules: tuple[str, ...]) -> None:
    config = choose_config(problem_of(**UNIFORM | call), 80, CHIPS["A100"])
    every = "softcaps", "has_alibi", "has_bias", "extreme_scores"
    assert tuple(name for name in every if getattr(config, name)) == rules
    assert config.modifies_scores == bool(rules)


CONFIG = dataclasses.replace(
    choose_variant(80, CHIPS["A100"], torch.float16, 128, 128),
    tile_m=128, tile_n=64, num_warps=8, num_stages=2, min_ctas=1, queries_in_registers=True,
)  # fmt: skip


def test_shared_memory_is_queries_and_stages_of_keys_and_values() -> None:
    pitch = 128 * 2 + 16
    assert CONFIG.shared_bytes == pitch * (128 + 2 * (64 + 64))
    assert dataclasses.replace(CONFIG, num_stages=1).shared_bytes == pitch * (128 + 64 + 64)
    # Rows of the output pass through the memory of the queries.
    assert dataclasses.replace(CONFIG, headdim=32).shared_bytes == pitch * 128 + 2 * 64 * (32 * 2 + 16 + pitch)


NOT_FITTING: dict[str, tuple[dict[str, int], dict[str, int], str]] = {
    "a CTA's memory": ({}, {"shared_per_cta": 100_000}, "104448 bytes of shared memory, the GPU has 100000 a CTA"),
    "an SM's memory": ({"min_ctas": 2}, {"shared_per_sm": 200_000}, "2 CTAs of 104448 bytes, the GPU has 200000"),
    "a thread's registers": ({"tile_m": 256}, {}, "registers of accumulators, a thread has 255"),
    "an SM's registers": ({}, {"registers_per_sm": 32768}, "registers of accumulators, a thread has 128"),
}


@pytest.mark.parametrize(("change", "limits", "reason"), NOT_FITTING.values(), ids=NOT_FITTING)
def test_the_reason_says_what_is_needed_and_what_there_is(
    change: dict[str, int], limits: dict[str, int], reason: str
) -> None:
    assert why_not_fitting(CONFIG, CHIPS["A100"]) is None
    found = why_not_fitting(dataclasses.replace(CONFIG, **change), CHIPS["A100"]._replace(**limits))
    assert reason in (found or "fits")


def test_no_kernel_at_all_is_an_error_with_every_reason() -> None:
    tiny = CHIPS["A100"]._replace(shared_per_cta=1000)
    candidates = heuristics.candidates_for(problem_of(headdim=128), 80)
    with pytest.raises(CompileError, match=r"no kernel fits compute capability 8\.0") as raised:
        choose_config(problem_of(), 80, tiny)
    assert len(candidates) > 1
    assert all(f"{config.name}: " in str(raised.value) for config in candidates)


def plain(limits: Limits, headdim: int, seqlen: int) -> KernelConfig:
    return choose_variant(limits.arch, limits, torch.float16, headdim, headdim, (Feature.PLAIN,), seqlen)


# Changing a choice on purpose changes this list with it.
# (chip, headdim, seqlen) -> (tile_m, tile_n, num_warps, num_stages, min_ctas)
GOLDEN = {
    ("P100", 64, 4096): (64, 32, 4, 1, 1),
    ("V100", 64, 1): (64, 32, 2, 1, 2),
    ("V100", 64, 65): (128, 64, 4, 1, 2),
    ("V100", 64, 4096): (128, 64, 4, 1, 2),
    ("V100", 128, 64): (64, 16, 2, 1, 2),
    ("V100", 128, 128): (128, 16, 4, 1, 1),
    ("V100", 128, 129): (256, 32, 8, 1, 1),
    ("V100", 192, 65): (128, 32, 4, 1, 1),
    ("V100", 256, 64): (64, 8, 2, 1, 1),
    ("V100", 256, 65): (128, 16, 4, 1, 1),
    ("T4", 64, 4096): (128, 32, 4, 1, 2),
    ("T4", 128, 4096): (128, 32, 8, 1, 1),
    ("A100", 64, 4096): (128, 32, 4, 2, 3),
    ("A100", 64, 8191): (128, 32, 4, 2, 3),
    ("A100", 64, 8192): (192, 48, 4, 2, 2),
    ("A100", 128, 4096): (128, 64, 4, 1, 2),
    ("RTX 3090", 64, 4096): (128, 64, 4, 1, 2),
    ("RTX 3090", 128, 4096): (128, 64, 8, 1, 1),
    ("H100", 64, 16384): (192, 48, 4, 2, 2),
    ("H100", 128, 16384): (128, 64, 4, 1, 2),
}


@pytest.mark.parametrize(("chip", "headdim", "seqlen"), GOLDEN, ids=["-".join(map(str, key)) for key in GOLDEN])
def test_choices_are_the_known_ones(chip: str, headdim: int, seqlen: int) -> None:
    config = plain(CHIPS[chip], headdim, seqlen)
    found = config.tile_m, config.tile_n, config.num_warps, config.num_stages, config.min_ctas
    assert found == GOLDEN[chip, headdim, seqlen]


@pytest.mark.parametrize("feature", [Feature.ALIBI, Feature.BIAS])
@pytest.mark.parametrize(("chip", "headdim", "tile"), [("A100", 64, (128, 64)), ("V100", 128, (256, 16))])
def test_what_is_added_to_scores_gets_tiles_with_registers_to_spare(
    chip: str, headdim: int, tile: tuple[int, int], feature: Feature
) -> None:
    limits = CHIPS[chip]
    config = choose_variant(limits.arch, limits, torch.float16, headdim, headdim, (feature,), 16384)
    assert (config.tile_m, config.tile_n) == tile


@pytest.mark.parametrize("chip", CHIPS)
def test_a_softcap_gets_the_tiles_of_plain_scores(chip: str) -> None:
    limits = CHIPS[chip]
    # Narrow heads on newer GPUs are bound by arithmetic of scores, and do better with larger tiles.
    for headdim in (headdim for headdim in HEADDIMS if headdim > 64 or limits.arch < 80):
        call = limits.arch, limits, torch.float16, headdim, headdim
        assert choose_variant(*call, (Feature.SOFTCAP,)) == dataclasses.replace(choose_variant(*call), softcaps=True)


@pytest.mark.parametrize("chip", CHIPS)
def test_older_code_paths_serve_every_newer_gpu(chip: str) -> None:
    limits = CHIPS[chip]
    for arch, headdim, feature, seqlen in itertools.product(ARCHS, HEADDIMS, UNQUANTIZED, (1, 100, 4096, 16384)):
        if arch <= limits.target and (feature is not Feature.PRODUCTS or multiplies_int8(arch, headdim)):
            choose_variant(arch, limits, torch.float16, headdim, headdim, (feature,), seqlen)


def test_every_choice_by_length_has_its_representative() -> None:
    lengths = heuristics.representative_seqlens()
    for limits, headdim in itertools.product(CHIPS.values(), HEADDIMS):
        chosen = {plain(limits, headdim, seqlen) for seqlen in lengths}
        for seqlen in (1, 7, 32, 63, 66, 127, 130, 1000, 8000, 8193, 100_000):
            assert plain(limits, headdim, seqlen) in chosen
