"""The emulator itself: instructions against numpy, each detector on a kernel with one fault, counts of wavefronts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import emulator
import numpy as np
import numpy.typing as npt
import pytest
import torch
from emulator import EmulatorError
from probing import CTA, NONE, WARP, aligned, probe

from fastattention.backends.cuda.common.arch import COMMON_FOLDERS

LANES = np.arange(32)


def test_every_intrinsic_is_emulated() -> None:
    """Otherwise a kernel that no test runs might use a missing one."""

    def functions(path: Path) -> set[str]:
        text = path.read_text()
        declared = re.findall(r"FA_DEVICE [\w ]+?[ *](\w+)\(", text)
        return {*declared, *re.findall(r"^FA_MMA_\w+\((\w+),", text, re.MULTILINE)}

    real = functions(COMMON_FOLDERS[0] / "intrinsics.cuh") - {"name"}
    assert "mma_m8n8k4_row_col" in real
    assert "cta_barrier" in real
    assert real <= functions(emulator.SOURCES / "intrinsics.hpp")


# --- instructions ---


def random_halves(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Random values of a 16-bit type: as float64, and their bits."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.double().numpy(), x.view(torch.int16).numpy().view(np.uint16)


def words(halves: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """(lanes, registers) from what each lane holds in the low and high halves of its registers, in turn."""
    return np.stack(halves, axis=-1).astype(np.uint16).copy().view(np.uint32)


def run_mma(name: str, operands: npt.NDArray[Any], accumulators: npt.NDArray[Any]) -> npt.NDArray[Any]:
    out = aligned(accumulators.astype(np.float32))
    probe(name, aligned(operands), out)
    return out


@pytest.mark.parametrize(
    ("name", "k", "dtype"),
    [
        ("m16n8k8_float16", 8, torch.float16),
        ("m16n8k16_float16", 16, torch.float16),
        ("m16n8k16_bfloat16", 16, torch.bfloat16),
    ],
)
def test_mma_m16n8(name: str, k: int, dtype: torch.dtype) -> None:
    """Fragments as the PTX ISA gives them for .m16n8k8 and .m16n8k16: a0, a1, ..., b0, b1, ..., c0 ... c3."""
    a, a_bits = random_halves((16, k), dtype, 0)
    b, b_bits = random_halves((k, 8), dtype, 1)
    c = np.random.default_rng(2).standard_normal((16, 8)).astype(np.float32)
    group, thread = LANES >> 2, LANES % 4
    held = []
    for i in range(k // 2):  # row: group for i in {0, 1, 4, 5}, else group + 8; column: + 8 for i >= 4
        row = group + (0 if i in (0, 1, 4, 5) else 8)
        held.append(a_bits[row, thread * 2 + (i & 1) + (8 if i >= 4 else 0)])
    for i in range(k // 4):
        held.append(b_bits[thread * 2 + (i & 1) + (8 if i >= 2 else 0), group])
    rows = [group + (8 if i >= 2 else 0) for i in range(4)]
    columns = [thread * 2 + (i & 1) for i in range(4)]
    out = run_mma(name, words(held), np.stack([c[r, n] for r, n in zip(rows, columns, strict=True)], axis=-1))
    result = np.zeros((16, 8))
    for i in range(4):
        result[rows[i], columns[i]] = out[:, i]
    np.testing.assert_allclose(result, a @ b + c, atol=2e-5)


@pytest.mark.parametrize("layout_b", ["col", "row"])
def test_mma_m8n8k4(layout_b: str) -> None:
    """Four products; fragments as the PTX ISA gives them for .m8n8k4 with float accumulators."""
    a, a_bits = random_halves((4, 8, 4), torch.float16, 0)
    b, b_bits = random_halves((4, 4, 8), torch.float16, 1)
    c = np.random.default_rng(2).standard_normal((4, 8, 8)).astype(np.float32)
    quadpair, high = LANES % 16 // 4, LANES // 16
    line = LANES % 4 + 4 * high
    held = [a_bits[quadpair, line, i] for i in range(4)]
    if layout_b == "col":
        held += [b_bits[quadpair, i, line] for i in range(4)]
    else:
        held += [b_bits[quadpair, LANES % 4, i + 4 * high] for i in range(4)]
    rows = [(LANES & 1) + (i & 2) + 4 * high for i in range(8)]
    columns = [(i & 4) + (LANES & 2) + (i & 1) for i in range(8)]
    before = np.stack([c[quadpair, r, n] for r, n in zip(rows, columns, strict=True)], axis=-1)
    out = run_mma(f"m8n8k4_row_{layout_b}", words(held), before)
    result = np.zeros((4, 8, 8))
    for i in range(8):
        result[quadpair, rows[i], columns[i]] = out[:, i]
    np.testing.assert_allclose(result, a @ b + c, atol=2e-5)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
def test_load_matrices(transposed: bool) -> None:
    matrices = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    out = aligned(np.zeros((32, 4), np.uint32))
    probe("load_matrices" + "_transposed" * transposed, aligned(matrices), out)
    read = matrices.transpose(0, 2, 1) if transposed else matrices
    for m in range(4):
        expected = words([read[m, LANES // 4, LANES % 4 * 2], read[m, LANES // 4, LANES % 4 * 2 + 1]])
        np.testing.assert_array_equal(out[:, m], expected[:, 0])


def test_lanes_exchange_values() -> None:
    out = aligned(np.zeros((64, 4), np.int32))
    probe("exchange", target=out, first=5, second=40)
    np.testing.assert_array_equal(out[:, 0], np.arange(64) // 32)
    np.testing.assert_array_equal(out[:, 1], np.arange(64) % 32 ^ 5)
    np.testing.assert_array_equal(out[:, 2], np.full(64, 7))
    np.testing.assert_array_equal(out[:, 3], np.arange(64) // 32)


# Ties, the ends of both ranges, subnormals and what is too large or small; then random ones.
CONVERTED = [0.0, -0.0, 1.0, 1.0004883, 1.00048828125, 1.0014648, 65504.0, 65519.9, 65520.0, -1e30, np.inf, -np.inf]
CONVERTED += [6.1e-5, 6.0975e-5, 2.0**-24, 2.0**-25, 2.9e-8, 3.1e-8, -1.5 * 2.0**-24, 3e-39, 1.0039062, 1.01171875]


@pytest.mark.parametrize(("first", "seen"), [(0, 3), (63, 3), (64, 2)])
def test_all_threads_see_a_vote_and_the_next_one_afresh(first: int, seen: int) -> None:
    out = aligned(np.zeros(64, np.uint32))
    probe("vote", target=out, first=first)
    assert out.tolist() == [seen] * 64


def test_conversions_round_as_torch_does() -> None:
    rng = np.random.default_rng(0)
    values = [*CONVERTED, *(rng.standard_normal(32 - len(CONVERTED)) * 10.0 ** rng.integers(-8, 8))]
    source = aligned(np.array(values, dtype=np.float32))
    out = aligned(np.zeros((32, 2), np.uint16))
    probe("convert", source, out)
    for column, dtype in enumerate((torch.float16, torch.bfloat16)):
        expected = torch.from_numpy(source.copy()).to(dtype).view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(out[:, column], expected)


def test_every_float16_widens_exactly() -> None:
    for first in range(0, 65536, 32):
        bits = aligned(np.arange(first, first + 32).astype(np.uint16))
        out = aligned(np.zeros(32, np.float32))
        probe("widen", bits, out)
        np.testing.assert_array_equal(out, bits.view(np.float16).astype(np.float32))


# --- detectors ---

RACES = ["write_then_read", "read_then_write", "write_then_write", "copy_then_read", "read_then_copy"]
RACES += ["read_then_add", "write_then_add", "copy_then_add"]


@pytest.mark.parametrize("name", RACES)
@pytest.mark.parametrize(
    ("first", "second", "barrier"),
    [(3, 7, NONE), (7, 3, NONE), (3, 40, NONE), (40, 3, NONE), (3, 40, WARP), (40, 3, WARP)],
)
def test_a_race_is_found(name: str, first: int, second: int, barrier: int) -> None:
    """It is found for either order of the two threads, and with only the barrier of one warp between them."""
    with pytest.raises(EmulatorError, match=rf"thread ({first}|{second}) .*shared memory at 1024"):
        probe(name, first=first, second=second, barrier=barrier)


@pytest.mark.parametrize("name", RACES)
@pytest.mark.parametrize(
    ("first", "second", "barrier"),
    [(3, 3, NONE), (3, 7, WARP), (7, 3, WARP), (3, 7, CTA), (3, 40, CTA), (40, 3, CTA)],
)
def test_a_barrier_prevents_a_race(name: str, first: int, second: int, barrier: int) -> None:
    probe(name, first=first, second=second, barrier=barrier)


@pytest.mark.parametrize("name", ["add_then_read", "add_then_write"])
@pytest.mark.parametrize(("first", "second"), [(3, 7), (3, 40), (40, 3)])
def test_a_barrier_of_the_cta_ends_what_threads_add(name: str, first: int, second: int) -> None:
    for barrier in (NONE, WARP):
        with pytest.raises(EmulatorError, match=r"at 1024, .* since their last barrier"):
            probe(name, first=first, second=second, barrier=barrier)
    probe(name, first=first, second=second, barrier=CTA)


@pytest.mark.parametrize("seed", [0, 1])
def test_threads_may_add_to_one_word(seed: int) -> None:
    out = aligned(np.zeros(2, np.int32))
    with emulator.shuffled(seed):
        probe("add_then_read", target=out, first=20, second=40, barrier=CTA)
    assert out.tolist() == [sum(range(64)), -44]


@pytest.mark.parametrize("writer", [0, 31, 63])
def test_a_race_with_one_of_many_readers_is_found(writer: int) -> None:
    for barrier in (NONE, WARP):
        with pytest.raises(EmulatorError, match="since their last barrier"):
            probe("all_read_then_one_writes", second=writer, barrier=barrier)
    probe("all_read_then_one_writes", second=writer, barrier=CTA)


FAULTS = {
    "copy_without_wait": r"thread (\d+) reads shared memory at \d+ under an asynchronous copy that thread \1 has not",
    "copy_without_commit": "thread 0 reads shared memory at 1024 under an asynchronous copy",
    "read_unwritten": "thread 0 reads shared memory at 1088, which nobody wrote",
    "add_to_unwritten": "thread 0 adds to shared memory at 1088, which nobody wrote",
    "add_to_a_copy": r"thread (\d+) adds to shared memory at \d+ under an asynchronous copy that thread \1 has not",
    "add_past_the_end": r"thread 0 adds to 4 bytes of shared memory at 9216, outside of 1024 \.\.\. 9215",
    "past_the_end": r"thread 0 writes 4 bytes of shared memory at 9216, outside of 1024 \.\.\. 9215",
    "before_the_beginning": "thread 0 writes 4 bytes of shared memory at 1020, outside",
    "misaligned": "thread 0 writes 16 bytes of shared memory at 1032, which is not a multiple of 16",
    "matrices_past_the_end": "thread (31|63) reads 16 bytes of shared memory at 9216, outside",
    "one_warp_misses_a_barrier": r"waits at cta_barrier, but thread \d+ returned after an earlier barrier",
    "one_lane_misses_a_barrier": "waits at cta_barrier, but thread 40 returned after an earlier barrier",
    "lanes_wait_apart": "thread 5 waits at any_lane while lanes of its warp wait at warp_barrier",
    "half_a_warp_waits_for_the_cta": "thread 16 waits at warp_barrier while lanes of its warp wait at cta_barrier",
    "shuffle_without_a_lane": "thread 9 returned while lanes of its warp wait at shuffle",
    "return_before_others_shuffle": "thread 1 waits at shuffle, but lanes of its warp have returned",
}


@pytest.mark.parametrize(("name", "message"), FAULTS.items(), ids=FAULTS.keys())
def test_a_fault_is_found(name: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        probe(name)


def test_an_error_says_which_kernel_and_block() -> None:
    with pytest.raises(EmulatorError, match=r"^fail_in_the_second_cta: cta 1, thread 33 reads"):
        probe("fail_in_the_second_cta", num_ctas=3)


def turns(num_ctas: int) -> list[list[int]]:
    """The turns in which each warp of each CTA ran."""
    out = aligned(np.zeros(1 + 2 * num_ctas, np.int32))
    probe("take_turns", target=out, num_ctas=num_ctas)
    assert out[0] == 2 * num_ctas
    return [[int(turn) for turn in cta] for cta in out[1:].reshape(num_ctas, 2)]


def test_ctas_and_warps_run_in_their_order_or_shuffled() -> None:
    in_order = [[2 * cta, 2 * cta + 1] for cta in range(20)]
    assert turns(20) == in_order
    with emulator.shuffled(1):
        first = turns(20)
        assert turns(20) == first
    with emulator.shuffled(2):
        second = turns(20)
    assert turns(20) == in_order
    for shuffled in (first, second):
        assert sorted(sorted(cta) for cta in shuffled) == in_order  # each CTA by itself
        assert [min(cta) for cta in shuffled] != [min(cta) for cta in in_order]
        assert {cta[0] < cta[1] for cta in shuffled} == {False, True}
    assert first != second


def test_an_error_ends_the_shuffled_order() -> None:
    with pytest.raises(EmulatorError), emulator.shuffled(1):
        probe("copy_without_wait")
    assert turns(20) == [[2 * cta, 2 * cta + 1] for cta in range(20)]


def test_a_launch_after_an_error_starts_afresh() -> None:
    with pytest.raises(EmulatorError):
        probe("copy_without_wait")
    probe("write_then_read", first=3, second=7, barrier=CTA)


def test_threads_that_return_before_the_first_barrier_do_not_count() -> None:
    out = aligned(np.zeros(1, np.int32))
    probe("one_warp_returns_first", target=out)
    assert out[0] == 1


def test_a_wait_completes_the_oldest_groups() -> None:
    source = aligned(np.full(4, 7, np.uint32))
    out = aligned(np.zeros(32, np.uint32))
    probe("two_copies", source, out, barrier=WARP)
    np.testing.assert_array_equal(out, 7)
    with pytest.raises(EmulatorError, match="at 1040 under an asynchronous copy"):
        probe("two_copies", source, out)


@pytest.mark.parametrize("name", ["load_global", "store_global", "copy_global"])
def test_global_accesses_are_checked(name: str) -> None:
    arrays = aligned(np.zeros(64, np.uint8)), aligned(np.zeros(64, np.uint8))
    for offset in (0, 48):
        probe(name, *arrays, first=offset)
    for offset in (-16, 64):
        with pytest.raises(
            EmulatorError, match=r"16 bytes of global memory at 0x[0-9a-f]+, which is in none of the ranges"
        ):
            probe(name, *arrays, first=offset)
    with pytest.raises(EmulatorError, match=r"16 bytes of global memory at 0x[0-9a-f]+, which is not a multiple of 16"):
        probe(name, *arrays, first=2)


def test_a_copy_of_nothing_may_point_anywhere_aligned() -> None:
    probe("copy_nothing", first=160)
    with pytest.raises(EmulatorError, match="not a multiple of 16"):
        probe("copy_nothing", first=2)


# --- wavefronts ---


@pytest.mark.parametrize(
    ("size", "stride", "counted", "ideal"),
    [
        (4, 4, 1, 1), (4, 0, 1, 1), (4, 8, 2, 1), (4, 128, 32, 1), (4, 132, 1, 1),
        (8, 8, 2, 2), (8, 16, 4, 2), (8, 128, 32, 2), (8, 136, 2, 2), (8, 0, 2, 2),
        (16, 16, 4, 4), (16, 32, 8, 4), (16, 128, 32, 4), (16, 144, 4, 4), (16, 0, 4, 4),
    ],
)  # fmt: skip
def test_wavefronts_of_loads(size: int, stride: int, counted: int, ideal: int) -> None:
    report = probe("strided_loads", first=size, second=stride)
    assert (report.loads.counted, report.loads.ideal) == (counted, ideal)


@pytest.mark.parametrize(("size", "stride", "counted", "ideal"), [(4, 8, 2, 1), (16, 144, 4, 4), (16, 64, 16, 4)])
def test_wavefronts_of_stores(size: int, stride: int, counted: int, ideal: int) -> None:
    report = probe("strided_stores", first=size, second=stride)
    assert (report.stores.counted, report.stores.ideal) == (counted, ideal)


@pytest.mark.parametrize(("stride", "counted"), [(16, 4), (80, 4), (96, 8), (128, 32), (144, 4)])
@pytest.mark.parametrize("kind", ["matrices", "copies"])
def test_wavefronts_of_rows(kind: str, stride: int, counted: int) -> None:
    wavefronts = getattr(probe(f"strided_{kind}", second=stride), kind)
    assert (wavefronts.counted, wavefronts.ideal) == (counted, 4)
