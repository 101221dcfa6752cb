"""Every kernel that is shipped, for every chip: Triton-Ascend takes it, and nothing in it is known to go wrong.

Kernels of the list of cases are lowered by test_executed.py, in every tier that has these tests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiers import deep
from triton.backends.ascend.compiler import NPUOptions

from ascend import buffers, static_checks
from ascend.lowering import Lowered, Variant, lower, variant_of
from ascend.matrix import HEADDIMS, Shipped, shipped
from fastattention.backends.ascend import kernels
from fastattention.backends.ascend.chips import CHIPS
from fastattention.backends.ascend.tiling import why_not_fit

pytestmark = deep


@pytest.fixture(scope="module")
def lowered() -> dict[Variant, Lowered]:
    """Every variant of the matrix. Options are for the vendor's compiler and change nothing before it."""
    variants = list({variant_of(entry.launch)._replace(options=()) for entry in shipped()})
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(variants, pool.map(lower, variants), strict=True))


def test_the_matrix_has_every_chip_and_kernel() -> None:
    assert {entry.chip.name for entry in shipped()} == set(CHIPS)
    assert {entry.launch.kernel for entry in shipped()} == {kernels.attention_forward, kernels.merge_splits}
    padded = {(entry.launch.constants["TILE_D"], entry.launch.constants["TILE_DV"]) for entry in attention()}
    assert len(padded) == len(HEADDIMS)


def attention() -> list[Shipped]:
    return [entry for entry in shipped() if entry.launch.kernel is kernels.attention_forward]


def test_attention_needs_cube_and_vector_units_and_merging_vector_units_alone(lowered: dict[Variant, Lowered]) -> None:
    modes = defaultdict(set)
    for variant, mlir in lowered.items():
        modes[variant.kernel].add(mlir.mix_mode)
    assert modes == {kernels.attention_forward: {"mix"}, kernels.merge_splits: {"aiv"}}


@pytest.mark.parametrize(
    "check",
    [static_checks.foreign_operations, static_checks.loaded_and_stored, static_checks.loops_that_may_not_run],
    ids=lambda check: check.__name__,
)
def test_nothing_known_to_go_wrong_is_in_it(
    check: Callable[[Lowered], list[str]], lowered: dict[Variant, Lowered]
) -> None:
    assert {str(variant): check(mlir) for variant, mlir in lowered.items() if check(mlir)} == {}


def test_every_tiling_fits_the_chip_it_is_chosen_for() -> None:
    reasons = {
        (entry.chip.name, entry.tiling, str(p.dtype)): why_not_fit(
            entry.tiling, p.headdim, p.headdim_v, p.dtype, entry.chip, int8_cache=p.cache_dtype is torch.int8
        )
        for entry in shipped()
        for p in [entry.problem]
    }
    assert {key: reason for key, reason in reasons.items() if reason is not None} == {}


def test_what_every_kernel_holds_fits_the_chip(lowered: dict[Variant, Lowered]) -> None:
    """An independent count, by the kernel's own tiles and the options it is compiled with."""
    counted, too_large = set(), {}
    for entry in attention():
        variant = variant_of(entry.launch)
        key = (entry.chip, variant)
        if key in counted:
            continue
        counted.add(key)
        chip = entry.chip
        allowed = {"L0C": chip.l0c_bytes, "L1": chip.l1_bytes, "UB": chip.ub_bytes}
        for buffer, used in buffers.held(lowered[variant._replace(options=())], entry.launch.options).items():
            if used > allowed[buffer]:
                too_large[chip.name, str(variant), buffer] = used
    assert too_large == {}


def test_options_are_those_of_the_compiler() -> None:
    for options in {tuple(entry.launch.options.items()) for entry in shipped()}:
        assert dict(options).keys() <= NPUOptions.__dataclass_fields__.keys()
        given = dict(options)
        assert {given.get("tile_mix_vector_loop", 1), given.get("tile_mix_cube_loop", 1)} <= {1, 2, 4, 8}
        assert given.get("set_workspace_multibuffer") in (None, 2, 4)
