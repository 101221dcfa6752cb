"""The list of cases on the kernels of every architecture, emulated, and what these refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import emulator
import pytest
import torch
from conformance.block_cases import BLOCKS
from conformance.cases import BIASES, CASES, SCORES, VALUE_HEADDIMS
from conformance.check import check
from conformance.engines import RegisteredEngine
from conformance.int8_cases import INT8, INT8_TILES
from conformance.rows_behind import check_rows_behind
from emulator import EmulatedCudaBackend, path_of
from tiers import covering_paths, slow, tier_of
from torch import Tensor

from fastattention import fast_attn_with_kvcache
from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.attention.reference import reference_attention
from fastattention.attention.validation import KvCacheArguments, Options, prepare_dense, prepare_kvcache
from fastattention.attention.validation import lengths as lengths_module
from fastattention.backends.cuda.attention import launches
from fastattention.backends.cuda.attention.config import AppendConfig, KernelConfig
from fastattention.backends.cuda.attention.decode_heuristics import is_decode
from fastattention.backends.cuda.attention.launches import choose_launches
from fastattention.backends.cuda.attention.variants import variants_of
from fastattention.backends.cuda.attention.waves import Waves, choose_waves
from fastattention.errors import ArgumentError
from fastattention.gpu_runtime.variant import Variant
from fastattention.quantized import LARGEST_STORED, quantize
from fastattention.testing.calls import Call, problem_of
from fastattention.testing.case import Case, KvCacheCase


class EmulatedEngine(RegisteredEngine):
    """An engine for one of the emulator's backends."""

    @property
    def registered(self) -> dict[str, str]:
        return {backend.name: f"emulator:{backend.__name__}" for backend in emulator.EMULATED}

    def run_in_another_order(self, call: Call) -> tuple[Tensor, Tensor]:
        """CTAs and warps in another order, as a GPU may run them."""
        with emulator.shuffled(seed=1):
            out, lse = self.run(call)
        assert out.is_contiguous()  # compiled calls rely on it
        return out, lse


class Run(NamedTuple):
    """One test of the list."""

    case: Case
    dtype: torch.dtype
    backend: type[EmulatedCudaBackend]

    @property
    def name(self) -> str:
        return f"{self.case.name}-{str(self.dtype).removeprefix('torch.')}-{self.backend.name}"

    @property
    def is_refused(self) -> bool:
        """Whether the run needs int8 products that its kernels lack."""
        return self.case.qk_dtype is not None and self.backend().why_not(problem_of(self.case, self.dtype)) is not None

    @property
    def is_served_natively(self) -> bool:
        return self.dtype is torch.float16 or self.backend.limits.arch >= 80


# Where bfloat16 is computed in float16 kernels are the same, and only conversions are new.
CONVERTED = [*VALUE_HEADDIMS, *SCORES, *BIASES, *(case for case in CASES if "append-rotary" in case.name)]
CONVERTED_TOO = ("append-one", "cache-not-causal", "pages-16-append-1-rotary", "wide-int8-512-512-seqlen-q-1",
                 "wide-float8-512-512-seqlen-q-1")  # fmt: skip
CONVERTED += [case for case in CASES if case.name in CONVERTED_TOO]

# Backends vary fastest, so that the expected result of a case is computed once.
RUNS = [
    run
    for case in CASES
    for dtype in (torch.float16, torch.bfloat16)
    for run in (Run(case, dtype, backend) for backend in emulator.EMULATED)
    if (run.is_served_natively or case in CONVERTED) and not run.is_refused
]


EVERY_TIME = (
    "splits-many-float16-cuda-sm80",  # keys of one sequence in several CTAs, whose maxima differ
    "dropout-few-queries-scores-float16-cuda-sm80",  # a decode would serve so few queries without dropout
    "tiles-256-heads-20-of-1-float16-cuda-sm60",  # a tile that is not full, whose parts are merged in place
    "bias-copied-float16-cuda-sm80",
    "bias-copied-one-row-bfloat16-cuda-sm80",
    "bias-pairs-float16-cuda-sm80",  # rows do not begin where whole tiles can be copied
    "varlen-pages-int8-7-float16-cuda-sm80",  # the forward reads quantized pages
    "varlen-pages-float8-16-bfloat16-cuda-sm75",
)


def variants_for(run: Run) -> set[Variant]:
    """The kernels that a run needs."""
    problem, limits = problem_of(run.case, run.dtype), run.backend.limits
    values_in_keys = run.case.values_in_keys and problem.cache_dtype is None
    launches = choose_launches(problem, limits.arch, limits, values_in_keys)
    append = [] if launches.append is None else [launches.append]
    return {step.variant for step in (*append, *launches.attention)}


@slow
@pytest.mark.parametrize("backend", emulator.EMULATED, ids=[backend.name for backend in emulator.EMULATED])
def test_the_list_runs_every_kernel(backend: type[EmulatedCudaBackend]) -> None:
    ran = {variant for run in RUNS if run.backend is backend for variant in variants_for(run)}
    wanted = [kernel for kernel in variants_of(backend.limits) if isinstance(kernel, KernelConfig | AppendConfig)]
    paths = {path_of(kernel) for kernel in ran if not is_sampled(kernel)}
    assert [kernel.name for kernel in wanted if not is_sampled(kernel) and path_of(kernel) not in paths] == []
    # Decodes cover every tile, every head dimension, and every combination of features, but not their whole product.
    # Forwards of quantized pages cover every combination of features.
    attending = [kernel for kernel in wanted if isinstance(kernel, KernelConfig)]
    for part, kernels in ((tile_of, "decode.cuh"), (headdim_of, "decode.cuh"), (features_of, ".cuh")):
        missing = {part(kernel) for kernel in attending if kernel.source.endswith(kernels)} - {
            part(kernel) for kernel in ran if isinstance(kernel, KernelConfig) and kernel.source.endswith(kernels)
        }
        assert missing == set()


def is_sampled(kernel: Variant) -> bool:
    return isinstance(kernel, KernelConfig) and (kernel.decodes or kernel.quantized)


def tile_of(kernel: Variant) -> tuple[object, ...]:
    assert isinstance(kernel, KernelConfig)
    sizes = (kernel.tile_m, kernel.tile_n, kernel.num_warps, kernel.num_stages)
    sharing = kernel.split_keys_across_warps, kernel.column_warps, kernel.num_value_parts
    return (*sizes, *sharing, kernel.queries_in_registers)


def headdim_of(kernel: Variant) -> int:
    assert isinstance(kernel, KernelConfig)
    return kernel.headdim


def features_of(kernel: Variant) -> tuple[object, ...]:
    assert isinstance(kernel, KernelConfig)
    return kernel.source, kernel.cache_format, *kernel.rules, kernel.paged, kernel.int8_products


def tiles_for(run: Run) -> str:
    """The tiles of the attention kernels that a run needs, on its GPU."""
    tiles = {repr(tile_of(kernel)) for kernel in variants_for(run) if isinstance(kernel, KernelConfig)}
    return " ".join((run.backend.name, *sorted(tiles)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "run" in metafunc.fixturenames:
        runs = covering_paths(tier_of(metafunc.config), RUNS, tiles_for)
        runs += [run for run in RUNS if run.name in EVERY_TIME and run not in runs]
        metafunc.parametrize("run", runs, ids=[run.name for run in runs])


@pytest.mark.parametrize("backend", emulator.EMULATED, ids=lambda backend: backend.name)
def test_the_list_has_caches_for_both_kernels(backend: type[EmulatedCudaBackend]) -> None:
    problems = [problem_of(case, torch.float16) for case in CASES if isinstance(case, KvCacheCase)]
    decodes = [is_decode(problem, backend.limits) for problem in problems if problem.is_paged]
    assert decodes.count(True) > 10
    assert decodes.count(False) > 0


def test_is_right_repeats_and_writes_nothing_else(run: Run) -> None:
    check(EmulatedEngine(run.backend.name), run.case, run.dtype)


@pytest.mark.parametrize("backend", emulator.EMULATED, ids=lambda backend: backend.name)
def test_more_blocks_than_a_cta_has_threads(backend: type[EmulatedCudaBackend]) -> None:
    case = next(case for case in BLOCKS if case.name == "blocks-285-of-keys")
    check(EmulatedEngine(backend.name), case, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_only_float32_is_refused(dtype: torch.dtype) -> None:
    """The other tests skip what is refused."""
    for case in (case for case in CASES if case.qk_dtype is None and getattr(case, "quantized", None) is None):
        problem = problem_of(case, dtype)
        for backend in emulator.EMULATED:
            reason = backend().why_not(problem)
            assert (reason is not None) == (dtype is torch.float32), f"{case.name} on {backend.name}: {reason}"
            assert reason is None or "float32" in reason


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"dropout_p": 0.1, "return_mask": True}, "return_attn_probs"),
        ({"grads": ("alibi_slopes",)}, "alibi_slopes"),
        ({"grads": ("v",), "headdim_v": 0}, "headdim_v=0"),
        ({"in_transform": True}, "torch.func"),
    ],
    ids=["dropout-mask", "slopes", "no-columns", "transforms"],
)
def test_a_refusal_names_what_is_not_served(fields: dict[str, Any], named: str) -> None:
    problem = problem_of(CASES[0], torch.float16)
    for backend in emulator.EMULATED:
        assert backend().why_not(problem) is None
        reason = backend().why_not(replace(problem, **fields))
        assert reason is not None
        assert named in reason


def test_before_ampere_gradients_of_wide_heads_are_refused() -> None:
    wide = replace(problem_of(CASES[0], torch.float16), grads=("q",), headdim=257)
    reasons = {backend.limits.arch: backend().why_not(wide) for backend in emulator.EMULATED}
    assert reasons.pop(80) is None
    assert all(reason is not None and "headdim=257" in reason for reason in reasons.values())


def test_products_in_int8_need_turing_rows_and_narrow_heads() -> None:
    for case in (*INT8, *INT8_TILES):
        problem = problem_of(case, torch.float16)
        for backend in emulator.EMULATED:
            reason = backend().why_not(problem) or ""
            if backend.limits.arch < 75:
                assert "Turing (7.5) or newer" in reason
            elif problem.is_paged:
                assert "pages is not served" in reason
            elif problem.headdim > 256:
                assert f"headdim={problem.headdim} is not served; up to 256 it is" in reason
            else:
                assert reason == ""
                assert "approximate" in backend().how(problem)


def test_emulated_backends_are_not_registered() -> None:
    with EmulatedEngine("cuda-sm80").active():
        assert "cuda-sm80" in ATTENTION_BACKENDS.order
    assert not {backend.name for backend in emulator.EMULATED} & set(ATTENTION_BACKENDS.order)


def test_bfloat16_beyond_float16_is_refused_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.ones(1, 3, 1, 32, dtype=torch.bfloat16) for _ in range(3))
    v[0, 1] = 1e5
    backend = emulator.EmulatedSm70()
    problem, inputs = prepare_dense(q, k, v, Options())
    assert backend.forward(problem, inputs).out.isinf().all()
    monkeypatch.setenv("FASTATTENTION_CHECK_RANGE", "1")
    with pytest.raises(ArgumentError, match=r"v holds 9\.\d+e\+04.*float16, which ends at 65504"):
        backend.forward(problem, inputs)


@pytest.mark.parametrize("seqlen_q", [1, 40], ids=["decode", "many-queries"])
@pytest.mark.parametrize("backend", emulator.EMULATED, ids=[backend.name for backend in emulator.EMULATED])
def test_a_sequence_without_room_is_nan_and_its_cache_is_left_alone(
    backend: type[EmulatedCudaBackend], seqlen_q: int
) -> None:
    """On a GPU lengths are not checked before the kernels run. Rotary tables that are too short limit the room too."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, seqlen_q, heads, 32, generator=generator).half() for heads in (4, 2, 2))
    caches = [torch.randn(4, 90, 2, 32, generator=generator).half() for _ in range(2)]
    angles = torch.rand(60, 8, generator=generator)
    lengths = torch.tensor([5, 91 - seqlen_q, 61 - seqlen_q, 15], dtype=torch.int32)
    arguments = KvCacheArguments(q, *caches, k, v, angles.cos().half(), angles.sin().half(), lengths)
    with mock.patch.object(lengths_module, "are_checked", return_value=False):
        problem, inputs = prepare_kvcache(arguments, Options(causal=True, window_right=0, return_lse=True))
    before, serving = [cache.clone() for cache in caches], backend()
    out, lse, _ = serving.forward(problem, inputs)
    assert lse is not None
    with pytest.raises(ArgumentError, match=rf"cache_seqlens\[[12]\]=({91 - seqlen_q}|{61 - seqlen_q}) of an earlier"):
        serving.forward(problem, inputs)
    assert out[[1, 2]].isnan().all()
    assert lse[[1, 2]].isnan().all()
    assert_right_alone(backend, arguments, before, out, sequences=[0, 3])
    for cache, old in zip(caches, before, strict=True):
        changed = (cache != old).flatten(2).any(-1).nonzero().tolist()
        assert changed == [[b, int(lengths[b]) + i] for b in (0, 3) for i in range(seqlen_q)]


@pytest.mark.parametrize("backend", emulator.EMULATED, ids=[backend.name for backend in emulator.EMULATED])
def test_a_cta_may_end_one_sequence_and_begin_another(backend: type[EmulatedCudaBackend]) -> None:
    """Long sequences, whose lengths no number of CTAs divides, whatever the order in which CTAs run."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, length, 1, 32, generator=generator).half() for length in (1, 2900, 2900))
    lengths = torch.tensor([1900, 2900, 2300], dtype=torch.int32)
    problem, inputs = prepare_kvcache(KvCacheArguments(q, k, v, cache_seqlens=lengths), Options())
    expected = reference_attention(problem, inputs).out
    for seed in range(4):
        with emulator.shuffled(seed):
            out = backend().forward(problem, inputs).out
        torch.testing.assert_close(out.double(), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("before_last", [0, 2, 4])
def test_the_last_heads_that_start_together_may_be_fewer_or_more(before_last: int) -> None:
    """CTAs of two heads start together, and there are five."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 300, 5, 32, generator=generator).half() for _ in range(3))
    call = prepare_dense(q, k, v, Options(causal=True, window_right=0))
    expected = emulator.EmulatedSm80().forward(*call).out

    def choose(*launch: Any) -> Waves:
        return choose_waves(*launch)._replace(heads_per_wave=2, heads_before_last=before_last)

    with mock.patch.object(launches, "choose_waves", side_effect=choose) as asked:
        assert torch.equal(emulator.EmulatedSm80().forward(*call).out, expected)
    asked.assert_called_once()


@pytest.mark.parametrize("stored", LARGEST_STORED, ids=["int8", "float8"])
def test_numbers_between_two_stored_ones_are_rounded_to_even(stored: torch.dtype) -> None:
    """The largest value of each row makes its scale 1, so that all others are ties."""
    largest = LARGEST_STORED[stored]
    grid = torch.arange(127, dtype=torch.uint8).view(stored).float()  # what can be stored, from 0 on, without NaN
    ties = torch.nn.functional.pad((grid[1:] + grid[:-1]) / 2, (1, 1), value=largest).clamp(max=largest)
    new = torch.stack((ties, -ties))[None, :, None].half()  # (1, 2 tokens, 1 head, 128)
    caches = [torch.zeros(1, 4, 1, 128).to(stored) for _ in range(2)]
    scales = [torch.zeros(1, 4, 1) for _ in range(2)]
    engine = EmulatedEngine("cuda-sm80")
    with engine.active():
        fast_attn_with_kvcache(
            new[:, :1], *caches, new, new, cache_seqlens=1, k_scale=scales[0], v_scale=scales[1], backend=engine.backend
        )
    wanted, scale = quantize(new, stored)
    for cache, given in zip(caches, scales, strict=True):
        assert torch.equal(cache[:, 1:3].float(), wanted.float())
        assert torch.equal(given[:, 1:3], scale)


def assert_right_alone(
    backend: type[EmulatedCudaBackend],
    arguments: KvCacheArguments,
    caches: list[torch.Tensor],
    out: torch.Tensor,
    sequences: list[int],
) -> None:
    """Asserts that sequences of a call have the results of a call of their own, up to rounding."""
    alone = KvCacheArguments(
        *(
            cut[sequences].clone() if cut is not None and len(cut) == len(arguments.q) else cut
            for cut in arguments._replace(k_cache=caches[0], v_cache=caches[1])
        )
    )
    problem, inputs = prepare_kvcache(alone, Options(causal=True, window_right=0))
    torch.testing.assert_close(out[sequences], backend().forward(problem, inputs).out, atol=2e-3, rtol=0)


@pytest.mark.parametrize("longest", [1, 40])
@pytest.mark.parametrize("backend", emulator.EMULATED, ids=[backend.name for backend in emulator.EMULATED])
def test_rows_behind_the_last_sequence_see_no_keys(backend: type[EmulatedCudaBackend], longest: int) -> None:
    check_rows_behind(backend(), torch.float16, longest)
