"""Chunked linear attention by the CUDA kernels, which the emulator runs on the processor."""

from __future__ import annotations

import itertools
from dataclasses import replace

import emulator
import pytest
import torch
from emulated_chunks import LIMITS, EmulatedChunks, sliced
from emulator import Report, Wavefronts
from linear.cases import CASES
from linear.check import check
from tiers import covering, sampled, tier_of
from torch.testing import assert_close

from fastattention.backends.cuda.linear.chunk_heuristics import choose_chunk_kernels
from fastattention.errors import ArgumentError
from fastattention.gpu_runtime.chips import CHIPS
from fastattention.linear.problem import LinearInputs
from fastattention.linear.validation import prepare
from fastattention.testing.linear import LinearCase

RULES = ("delta", "head", "key", "kda")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        names = {case: name for name, case in CASES.items()}
        every_run = itertools.product(names, LIMITS, [torch.float16, torch.bfloat16])
        runs = covering(tier_of(metafunc.config), every_run)
        ids = ["-".join((names[case], chip, str(dtype).removeprefix("torch."))) for case, chip, dtype in runs]
        metafunc.parametrize(("case", "chip", "dtype"), runs, ids=ids)


def test_chunks_are_as_exact_as_the_recurrence(case: LinearCase, chip: str, dtype: torch.dtype) -> None:
    problem, inputs = prepare(case.tensors(dtype), case.options(chunked=True))
    check(problem, inputs, EmulatedChunks(LIMITS[chip]).run(problem, inputs))


@pytest.mark.parametrize("rule", RULES)
def test_strides_and_addresses_may_be_odd(rule: str) -> None:
    case = CASES[f"{rule}-plain"]
    problem, inputs = prepare(case.tensors(torch.float16), case.options(chunked=True))
    engine = EmulatedChunks(LIMITS["cuda-sm80"])
    aligned = engine.run(problem, inputs)
    odd = engine.run(problem, LinearInputs(*(None if x is None else sliced(x) for x in inputs)))
    assert torch.equal(aligned.out, odd.out)
    assert torch.equal(aligned.final_state, odd.final_state)


@pytest.mark.parametrize("rule", RULES)
def test_order_of_ctas_and_warps_changes_nothing(rule: str) -> None:
    case = replace(CASES[f"{rule}-varlen"], headdim_v=128)
    problem, inputs = prepare(case.tensors(torch.float16), case.options(chunked=True))
    engine = EmulatedChunks(LIMITS["cuda-sm80"])
    first = engine.run(problem, inputs)
    with emulator.shuffled(7):
        second = engine.run(problem, inputs)
    assert torch.equal(first.out, second.out)
    assert torch.equal(first.final_state, second.final_state)


@pytest.mark.parametrize("rule", ["delta", "kda"])
def test_a_key_of_zeros_writes_nothing(rule: str) -> None:
    """This holds for any value: in float16 a value times the inverse of its length, 1000, would be infinite."""
    case = LinearCase(rule, seqlen=70, gates=1e-4)
    given = case.tensors(torch.float16)
    given.k[:, 10] = 0
    given.v[:, 10] = 500
    problem, inputs = prepare(given, case.options(chunked=True))
    check(problem, inputs, EmulatedChunks(LIMITS["cuda-sm80"]).run(problem, inputs))


@pytest.mark.parametrize("chip", ["cuda-sm75", "cuda-sm80"], ids=["32-tokens", "64-tokens"])
@pytest.mark.parametrize("rule", RULES)
def test_a_gate_may_forget_everything(rule: str, chip: str) -> None:
    """Gates are 0, within and at the borders of the parts whose products are formed first."""
    case = LinearCase(rule, seqlen=130, initial_state=True)
    given = case.tensors(torch.float16)
    given.g[:, [5, 15, 16, 40, 63, 64, 65, 111]] = -torch.inf
    problem, inputs = prepare(given, case.options(chunked=True))
    check(problem, inputs, EmulatedChunks(LIMITS[chip]).run(problem, inputs))


@pytest.mark.parametrize("rule", ["delta", "kda"])
def test_updates_may_grow_within_a_chunk(rule: str) -> None:
    """With equal keys, elements of the inverse do not decay with the distance of tokens."""
    case = LinearCase(rule, seqlen=128, gates=1e-3)
    given = case.tensors(torch.float16)
    given.k[:] = given.k[:, :1] + 0.1 * given.k
    problem, inputs = prepare(given, case.options(chunked=True))
    check(problem, inputs, EmulatedChunks(LIMITS["cuda-sm80"]).run(problem, inputs))


@sampled
@pytest.mark.parametrize(
    ("rule", "name"), [(rule, name) for rule in RULES for name in "kvg"] + [("delta", "beta"), ("kda", "beta")]
)
@pytest.mark.parametrize("chip", LIMITS)
def test_a_nan_reaches_no_earlier_token(chip: str, rule: str, name: str) -> None:
    case = LinearCase(rule, seqlen=100, initial_state=True)
    given = case.tensors(torch.float16)
    engine = EmulatedChunks(LIMITS[chip])
    wanted = engine.run(*prepare(given, case.options(chunked=True))).out
    getattr(given, name)[:, 85:87] = torch.nan
    out = engine.run(*prepare(given, case.options(chunked=True))).out
    assert_close(out[:, :85], wanted[:, :85], atol=2e-3, rtol=1e-2)
    assert out[:, 85:].isnan().any(dim=-1).all()


def wavefronts_of_a_chunk(kernel: int, chip: str, headdim: int, rule: str) -> dict[str, Wavefronts]:
    """Wavefronts of one of the kernels for one more full chunk."""

    def count(chunks: int) -> Report:
        case = LinearCase(rule, seqlen=64 * chunks, nheads=1, nheads_k=1, headdim_k=headdim, headdim_v=headdim)
        engine = EmulatedChunks(LIMITS[chip])
        engine.run(*prepare(case.tensors(torch.float16), case.options(chunked=True)))
        return engine.reports[kernel]

    less, more = count(1), count(2)
    kinds = "loads", "stores", "matrices", "copies"
    return {
        kind: Wavefronts(
            *(getattr(getattr(more, kind), n) - getattr(getattr(less, kind), n) for n in ("counted", "ideal"))
        )
        for kind in kinds
    }


@sampled
@pytest.mark.parametrize("kernel", [1, 2], ids=["states", "outputs"])
@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chip", ["cuda-sm70", "cuda-sm75", "cuda-sm80"])
def test_main_loops_have_few_bank_conflicts(chip: str, rule: str, headdim: int, kernel: int) -> None:
    """Operands have no conflicts. Values, which are transposed, and copies of few columns of v have some."""
    found = wavefronts_of_a_chunk(kernel, chip, headdim, rule)
    assert found["matrices"].counted == found["matrices"].ideal
    counted, ideal = (sum(getattr(kind, name) for kind in found.values()) for name in ("counted", "ideal"))
    assert ideal > 0
    assert counted <= (1.06 if chip == "cuda-sm80" else 1.2) * ideal


@pytest.mark.parametrize(
    ("chip", "batch_size", "columns"),
    [("H100", 1, 16), ("H100", 2, 32), ("H100", 8, 64), ("A100", 8, 64), ("V100", 1, 32), ("V100", 8, 64)],
)
def test_few_heads_share_out_columns_among_all_multiprocessors(chip: str, batch_size: int, columns: int) -> None:
    """With many heads a CTA has more columns, as many as shared memory holds with chunks of the same length."""
    case = LinearCase("delta", batch_size, seqlen=1, nheads=16, nheads_k=16, headdim_k=128, headdim_v=128)
    problem, _ = prepare(case.tensors(torch.float16), case.options(chunked=True))
    kernels = choose_chunk_kernels(problem, CHIPS[chip].arch, CHIPS[chip])
    assert kernels.states.value_columns == columns
    assert kernels.states.chunk == (64 if CHIPS[chip].arch >= 80 else 32)


def test_two_tiles_of_keys_may_leave_room_for_short_chunks_only() -> None:
    """KDA takes chunks of 32 tokens on chips with 99 KB of shared memory."""
    for headdim, chunk in ((64, 64), (128, 32)):
        case = LinearCase("kda", seqlen=1, headdim_k=headdim, headdim_v=128)
        problem, _ = prepare(case.tensors(torch.bfloat16), case.options(chunked=True))
        assert {config.chunk for config in choose_chunk_kernels(problem, 80, CHIPS["RTX 4090"])} == {chunk}


@pytest.mark.parametrize("rule", ["head", "key"])
def test_few_heads_share_out_key_dimensions_without_the_delta_rule(rule: str) -> None:
    """Squares of a state copy the fewest keys and values."""
    chip = CHIPS["H100"]
    for batch_size, columns, keys in ((1, 32, 64), (8, 64, 128)):
        case = LinearCase(rule, batch_size, seqlen=1, nheads=16, nheads_k=16, headdim_k=128, headdim_v=128)
        problem, _ = prepare(case.tensors(torch.float16), case.options(chunked=True))
        states = choose_chunk_kernels(problem, chip.arch, chip).states
        assert (states.value_columns, states.key_columns) == (columns, keys)


@sampled
@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chip", ["cuda-sm75", "cuda-sm80"])
def test_preparation_has_few_bank_conflicts(chip: str, rule: str, headdim: int) -> None:
    """The remaining conflicts come from products of gates and from stores."""
    found = wavefronts_of_a_chunk(0, chip, headdim, rule)
    assert found["matrices"].counted == found["matrices"].ideal
    counted, ideal = (sum(getattr(kind, name) for kind in found.values()) for name in ("counted", "ideal"))
    assert ideal > 0
    assert counted <= 1.15 * ideal


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("rule", RULES)
def test_kernels_fit_every_chip(chip: str, rule: str) -> None:
    limits = CHIPS[chip]
    for headdim_k, headdim_v, batch_size in itertools.product((1, 64, 65, 128, 256), (1, 48, 128, 256), (1, 64)):
        case = LinearCase(rule, batch_size, seqlen=1, headdim_k=headdim_k, headdim_v=headdim_v)
        problem, _ = prepare(case.tensors(torch.float16), case.options(chunked=True))
        kernels = choose_chunk_kernels(problem, limits.arch, limits)
        for config in kernels:
            assert max(entry.shared_bytes for entry in config.entries) <= limits.shared_per_cta
        assert kernels.prepare.chunk == kernels.states.chunk == kernels.outputs.chunk
        assert kernels.states.headdim == kernels.outputs.headdim >= headdim_k


def test_bfloat16_beyond_float16_is_refused_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests code paths that compute in float16."""
    case = CASES["delta-plain"]
    problem, inputs = prepare(case.tensors(torch.bfloat16), case.options(chunked=True))
    inputs.v[0, 3] = 1e6
    monkeypatch.setenv("FASTATTENTION_CHECK_RANGE", "1")
    with pytest.raises(ArgumentError, match=r"v holds 9.\d+e\+05, .* use backend='torch'"):
        EmulatedChunks(LIMITS["cuda-sm75"]).run(problem, inputs)
    assert EmulatedChunks(LIMITS["cuda-sm80"]).run(problem, inputs).out.isfinite().all()
