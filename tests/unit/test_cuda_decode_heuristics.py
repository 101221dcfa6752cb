"""The choice of a decode kernel: pure Python, for every supported GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiers import sampled

from fastattention.attention.problem import Layout
from fastattention.backends.cuda.attention import decode_heuristics
from fastattention.backends.cuda.attention.config import WIDEST_OF_A_WARP, KernelConfig, why_not_fitting
from fastattention.backends.cuda.attention.decode_heuristics import choose_decode, choose_split, is_decode
from fastattention.backends.cuda.attention.heuristics import padded_headdims
from fastattention.backends.cuda.attention.variants import (
    DTYPES,
    HEADDIMS,
    SCORES,
    Feature,
    choose_decode_variant,
    variants_of,
)
from fastattention.backends.cuda.common.arch import ARCH_FACTS
from fastattention.errors import CompileError
from fastattention.gpu_runtime.chips import ARCHS, CHIPS

from .decode_schedule import DECODE

MANY_KEYS = 10**6  # keys for each multiprocessor
CACHES: list[tuple[Feature, ...]] = [(), (Feature.INT8,), (Feature.FLOAT8,)]
FEATURES: list[tuple[Feature, ...]] = [(), SCORES, (*SCORES, Feature.PAGED), (Feature.PAGED,)]


def decodes_of(chip: str) -> list[KernelConfig]:
    """All decodes of a GPU."""
    variants = variants_of(CHIPS[chip])
    return [variant for variant in variants if isinstance(variant, KernelConfig) and variant.decodes]


def plain(chip: str, headdim: int, rows: int, keys: int = 0) -> KernelConfig:
    limits = CHIPS[chip]
    return choose_decode_variant(limits.arch, limits, torch.float16, headdim, headdim, (), rows, keys)


@sampled
@pytest.mark.parametrize("headdim", HEADDIMS)
@pytest.mark.parametrize("chip", CHIPS)
def test_every_call_gets_a_kernel_that_fits_its_gpu(chip: str, headdim: int) -> None:
    limits = CHIPS[chip]
    calls = itertools.product(HEADDIMS, DTYPES, FEATURES, CACHES, (1, 17, 33, 65, 129), (0, MANY_KEYS))
    for headdim_v, dtype, features, cache, rows, keys in calls:
        given = (*features, *cache)
        config = choose_decode_variant(limits.arch, limits, dtype, headdim, headdim_v, given, rows, keys)
        assert why_not_fitting(config, limits) is None
        assert (config.arch, config.modifies_scores) == (limits.arch, not set(features).isdisjoint(SCORES))
        assert config.paged == (Feature.PAGED in features)
        assert (config.headdim, config.headdim_v * config.num_value_parts) == padded_headdims(headdim, headdim_v)
        assert (config.decodes, config.cache_format) == (True, "".join(one.value for one in cache))
        assert config.dtype == dtype  # of the cache, which is read where it lies


@pytest.mark.parametrize("chip", CHIPS)
def test_every_choice_by_rows_and_keys_has_its_representative(chip: str) -> None:
    pairs = decode_heuristics.representative_calls()
    for headdim in HEADDIMS:
        chosen = {plain(chip, headdim, rows, keys) for rows, keys in pairs}
        for rows, keys in itertools.product(range(1, 201), (0, 1000, 24_576, 24_577, MANY_KEYS)):
            assert plain(chip, headdim, rows, keys) in chosen


@sampled
@pytest.mark.parametrize("headdim", HEADDIMS)
@pytest.mark.parametrize("chip", CHIPS)
def test_no_smaller_tile_that_fits_holds_all_rows(chip: str, headdim: int) -> None:
    sizes = sorted({plain(chip, headdim, rows, keys).tile_m for rows in range(1, 201) for keys in (0, MANY_KEYS)})
    for rows, keys in itertools.product(range(1, 201), (0, MANY_KEYS)):
        holding = [size for size in sizes if size >= rows]
        assert plain(chip, headdim, rows, keys).tile_m == min(holding, default=sizes[-1])


@pytest.mark.parametrize("headdim", HEADDIMS)
@pytest.mark.parametrize("chip", CHIPS)
def test_one_row_gets_the_smallest_tile_there_is(chip: str, headdim: int) -> None:
    """This holds for any memory of the GPU: a larger tile would compute rows that do not exist."""
    for keys in (0, MANY_KEYS):
        config = plain(chip, headdim, 1, keys)
        # Copies of wide heads through registers take two warps, and both have rows.
        two = headdim > WIDEST_OF_A_WARP and config.arch == 75
        assert config.tile_m == ARCH_FACTS[config.arch].step_rows * (1 + two)


@pytest.mark.parametrize("chip", CHIPS)
def test_every_kernel_is_one_that_decode_cuh_accepts(chip: str) -> None:
    for config in decodes_of(chip):
        facts = ARCH_FACTS[config.arch]
        assert config.tile_m % (config.row_warps * facts.step_rows) == 0
        assert config.tile_n % (16 if config.arch >= 75 else 8) == 0
        assert config.num_stages == (2 if config.arch >= 80 else 1) or config.headdim > WIDEST_OF_A_WARP
        assert config.tile_n % (8 * config.column_warps) == 0
        assert not (config.split_keys_across_warps and config.tile_m > facts.step_rows * 2)
        assert config.headdim_v % 16 == 0


@pytest.mark.parametrize("chip", CHIPS)
def test_older_code_paths_serve_every_newer_gpu(chip: str) -> None:
    limits = CHIPS[chip]
    for arch, headdim, feature, rows in itertools.product(ARCHS, HEADDIMS, Feature, (1, 20, 50, 200)):
        if arch <= limits.target:
            choose_decode_variant(arch, limits, torch.float16, headdim, headdim, (feature,), rows)


def test_no_kernel_at_all_is_an_error_with_every_reason() -> None:
    tiny = CHIPS["A100"]._replace(shared_per_cta=1000)
    with pytest.raises(CompileError, match=r"no kernel fits compute capability 8\.0: decode_sm80_.*; decode_sm80_"):
        choose_decode_variant(80, tiny, torch.float16, 128, 128)


# --- shared memory ---


@pytest.mark.parametrize(
    ("arch", "dtype_bytes", "padding", "cache_format", "cache_bytes"),
    [
        (60, 4, 16, "", 4),
        (70, 2, 16, "", 2),
        (75, 2, 16, "", 2),
        (80, 2, 0, "", 2),
        (60, 4, 16, "int8", 4),  # widened on the way in
        (75, 2, 16, "float8", 2),
        (80, 2, 0, "int8", 1),
        (80, 2, 0, "float8", 1),
    ],
)
def test_shared_memory_is_queries_stages_and_statistics(
    arch: int, dtype_bytes: int, padding: int, cache_format: str, cache_bytes: int
) -> None:
    """Each warp with keys of its own holds keys and values with their scales, and a maximum and a sum of each row."""
    config = replace(
        plain("A100", 128, 16), arch=arch, headdim_v=64, tile_m=16, tile_n=32, num_warps=4, num_stages=2,
        split_keys_across_warps=True, cache_format=cache_format,
    )  # fmt: skip
    queries = 16 * (128 * dtype_bytes + padding)
    scales = 2 * 4 if cache_format else 0
    token = 128 * cache_bytes + padding + 64 * cache_bytes + padding + scales
    assert config.shared_bytes == queries + 4 * (2 * 32 * token + 16 * 2 * 4)
    shared_keys = replace(config, split_keys_across_warps=False)
    assert shared_keys.shared_bytes == queries + 2 * 32 * token + 16 * 2 * 4


def latent(chip: str, headdim: int, rows: int) -> KernelConfig:
    limits = CHIPS[chip]
    problem = replace(DECODE, nheads=rows, nheads_k=1, headdim=headdim, headdim_v=min(headdim, 512))
    return choose_decode(problem, limits.arch, limits, values_in_keys=True)


@pytest.mark.parametrize("rows", [16, 128])
def test_values_in_keys_take_no_memory_of_their_own(rows: int) -> None:
    """Probabilities and one value of each row do, where warps exchange them."""
    config = latent("H100", 576, rows)
    assert config.values_in_keys
    assert config.column_warps > 1
    keys = config.num_stages * config.tile_n * 576 * 2
    exchanged = config.tile_m * (2 * config.tile_n + 4 * config.column_warps)
    assert config.shared_bytes == config.tile_m * (576 * 2 + 8) + keys + exchanged


@pytest.mark.parametrize(("chip", "headdim"), [("T4", 576), ("V100", 576), ("P100", 512), ("H100", 256), ("A100", 64)])
def test_values_in_keys_are_read_apart_elsewhere(chip: str, headdim: int) -> None:
    """Older code paths read them separately, and so do warps that hold all columns."""
    assert not latent(chip, headdim, 16).values_in_keys


@pytest.mark.parametrize("chip", ["A100", "RTX 3090", "H100"])
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 128])
def test_values_in_keys_have_a_kernel_that_fits(chip: str, rows: int) -> None:
    config = latent(chip, 576, rows)
    assert config.values_in_keys
    assert why_not_fitting(config, CHIPS[chip]) is None


def test_warps_share_out_keys_or_rows() -> None:
    keys, rows = plain("A100", 128, 16), plain("A100", 128, 128)
    assert (keys.key_warps, keys.row_warps, keys.stream_tile) == (4, 1, 4 * keys.tile_n)
    assert (rows.key_warps, rows.row_warps, rows.stream_tile) == (1, 8, rows.tile_n)


# --- choices ---

# Changing a choice on purpose changes this list with it.
# (chip, headdim, rows, keys for each multiprocessor) ->
# (tile_m, tile_n, num_warps, num_stages, min_ctas, num_value_parts)
GOLDEN = {
    ("P100", 64, 1, 0): (16, 16, 2, 1, 1, 1),
    ("P100", 64, 17, 0): (64, 32, 4, 1, 1, 1),
    ("P100", 128, 8, 0): (16, 8, 2, 1, 1, 1),
    ("P100", 128, 200, 0): (32, 16, 2, 1, 1, 1),
    ("P100", 256, 100, 0): (16, 8, 1, 1, 1, 1),
    ("V100", 128, 1, 0): (32, 16, 4, 1, 2, 1),
    ("V100", 128, 33, 0): (128, 16, 4, 1, 1, 1),
    ("V100", 256, 1, 0): (32, 16, 4, 1, 1, 2),
    ("T4", 64, 1, 0): (16, 16, 4, 1, 2, 1),
    ("T4", 128, 16, 0): (16, 16, 4, 1, 1, 1),
    ("T4", 128, 64, 0): (64, 32, 4, 1, 1, 1),
    ("T4", 128, 65, 0): (128, 32, 8, 1, 1, 1),
    ("T4", 256, 1, 0): (16, 16, 2, 1, 1, 1),
    ("A100", 128, 1, 0): (16, 32, 4, 2, 1, 1),
    ("A100", 128, 1, 24_576): (16, 32, 4, 2, 1, 1),
    ("A100", 128, 1, 24_577): (16, 16, 4, 2, 2, 1),
    ("A100", 128, 17, 0): (32, 16, 4, 2, 2, 1),
    ("A100", 128, 33, 0): (64, 64, 4, 2, 2, 1),
    ("A100", 128, 128, 0): (128, 64, 8, 2, 1, 1),
    ("A100", 256, 1, 0): (16, 16, 4, 2, 1, 1),
    ("A100", 256, 17, 0): (64, 32, 4, 2, 1, 1),
    ("RTX 3090", 128, 1, 0): (16, 16, 4, 2, 1, 1),
    ("RTX 3090", 128, 1, 24_577): (16, 16, 4, 2, 1, 1),
    ("RTX 3090", 256, 1, 0): (16, 16, 2, 2, 1, 1),
    ("H100", 64, 1, 24_577): (16, 16, 4, 2, 2, 1),
    ("P100", 512, 1, 0): (16, 8, 1, 1, 1, 4),
    ("V100", 512, 33, 0): (64, 8, 2, 1, 1, 4),
    ("T4", 512, 1, 0): (32, 16, 2, 1, 1, 4),
    ("A100", 512, 1, 0): (16, 32, 4, 2, 1, 1),
    ("A100", 512, 17, 0): (64, 32, 8, 1, 1, 1),
    ("RTX 3090", 512, 1, 0): (16, 32, 4, 1, 1, 1),
    ("RTX 3090", 512, 17, 0): (64, 16, 4, 1, 1, 2),
    ("H100", 512, 17, 0): (64, 64, 8, 1, 1, 1),
}


@pytest.mark.parametrize(("chip", "headdim", "rows", "keys"), GOLDEN, ids=["-".join(map(str, key)) for key in GOLDEN])
def test_choices_are_the_known_ones(chip: str, headdim: int, rows: int, keys: int) -> None:
    config = plain(chip, headdim, rows, keys)
    found = (config.tile_m, config.tile_n, config.num_warps, config.num_stages, config.min_ctas, config.num_value_parts)
    assert found == GOLDEN[chip, headdim, rows, keys]


@pytest.mark.parametrize(
    ("batch_size", "num_splits", "teams"),
    [(1, 0, 16), (3, 0, 16), (4, 0, 4), (54, 0, 1), (500, 0, 1), (1, 4, 1), (1, 5, 4), (1, 32, 4), (1, 33, 16)],
)
def test_as_many_teams_merge_a_row_as_it_has_fours_of_parts(batch_size: int, num_splits: int, teams: int) -> None:
    """An A100 runs 108 CTAs of this kernel at once, each for one of two key heads."""
    call = replace(DECODE, batch_size=batch_size, nheads=80, seqlen_k=1 << 17, num_splits=num_splits)
    limits = CHIPS["A100"]
    config = choose_decode(call, 80, limits)
    assert (config.tile_m, config.min_ctas) == (64, 2)
    assert choose_split(call, config, limits).teams_of_row == teams


# --- which calls are decodes ---

CALL = replace(DECODE, nheads=32, nheads_k=8, window_right=0)


DECODES: dict[str, dict[str, Any]] = {
    "one query": {},
    "many sequences": {"batch_size": 1000},  # 4 rows
    "16 rows": {"seqlen_q": 4, "batch_size": 1000},
    "quantized": {"seqlen_q": 4096, "cache_dtype": torch.int8},
    "dense": {"layout": Layout.DENSE},
    "dense, 16 rows": {"layout": Layout.DENSE, "seqlen_q": 4, "batch_size": 1000, "seqlen_k": 256},
    "dense, 20 rows": {"layout": Layout.DENSE, "seqlen_q": 5, "seqlen_k": 1024},
    "four keys a query": {"layout": Layout.DENSE, "seqlen_q": 512, "seqlen_k": 2048, "nheads": 8},
    "bias": {"layout": Layout.DENSE, "score_tensors": ("attn_bias",)},
}
NO_DECODES: dict[str, dict[str, Any]] = {
    "prefill": {"seqlen_q": 4096},
    "dense, fewer keys": {"layout": Layout.DENSE, "seqlen_q": 5, "seqlen_k": 1023},
    "dense, few keys": {"layout": Layout.DENSE, "seqlen_k": 255},
    "fewer keys a query": {"layout": Layout.DENSE, "seqlen_q": 513, "seqlen_k": 2048, "nheads": 8},
    "varlen": {"layout": Layout.VARLEN, "page_block_size": 16},
}


@pytest.mark.parametrize("name", DECODES | NO_DECODES)
def test_few_rows_are_decodes(name: str) -> None:
    call = replace(CALL, **(DECODES | NO_DECODES)[name])
    assert is_decode(call, CHIPS["A100"]) == (name in DECODES)


# Milliseconds on an H100 by the forward and the decode kernel, 32 heads of 128
# (docs/decisions/0055-decode-whatever-leaves-multiprocessors-idle.md).
MEASURED = [
    # nheads_k, batch_size, seqlen_q, seqlen_k, forward, decode
    (8, 1, 32, 4096, 0.1177, 0.0210),
    (8, 1, 128, 4096, 0.1218, 0.0488),
    (8, 1, 256, 4096, 0.1219, 0.0701),
    (8, 1, 128, 1024, 0.0353, 0.0269),
    (8, 1, 128, 32768, 0.9319, 0.2448),
    (8, 4, 64, 4096, 0.1262, 0.0720),
    (8, 8, 64, 2048, 0.0963, 0.0724),
    (8, 8, 128, 2048, 0.0981, 0.1384),
    (8, 16, 32, 2048, 0.1435, 0.0719),
    (8, 1, 256, 1024, 0.0352, 0.0281),
    (32, 1, 64, 4096, 0.1226, 0.0404),
    (32, 1, 128, 4096, 0.1253, 0.0501),
    (32, 1, 256, 4096, 0.1245, 0.0713),
    (32, 4, 64, 4096, 0.1330, 0.1046),
    (32, 8, 128, 2048, 0.1079, 0.1483),
]


@pytest.mark.parametrize("measured", MEASURED, ids=str)
def test_the_kernel_that_was_faster_serves_dense_calls(measured: tuple[int, int, int, int, float, float]) -> None:
    nheads_k, batch_size, seqlen_q, seqlen_k, forward, decode = measured
    call = replace(CALL, layout=Layout.DENSE, nheads_k=nheads_k, batch_size=batch_size, seqlen_q=seqlen_q)
    assert is_decode(replace(call, seqlen_k=seqlen_k), CHIPS["H100"]) == (decode < forward)


@pytest.mark.parametrize(
    ("batch_size", "nheads", "is_split"),
    [(64, 128, False), (4096, 128, False), (16, 128, True), (1, 128, True), (64, 16, True)],
)
def test_selected_keys_are_split_only_where_few_queries_leave_multiprocessors_idle(
    batch_size: int, nheads: int, is_split: bool
) -> None:
    limits = CHIPS["H100"]
    call = replace(
        DECODE, batch_size=batch_size, seqlen_q=1, seqlen_k=2048, nheads=nheads, nheads_k=1, headdim=576, headdim_v=512,
        page_block_size=1,
    )  # fmt: skip
    config = choose_decode(call, limits.arch, limits, values_in_keys=True)
    assert (choose_split(call, config, limits).num_splits == 0) == is_split
    in_pages = replace(call, page_block_size=64)  # sequences of a cache may have any lengths
    assert choose_split(in_pages, config, limits).num_splits == 0
