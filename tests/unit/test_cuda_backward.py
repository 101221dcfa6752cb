"""Which kernels compute gradients."""

from __future__ import annotations

import pytest

from fastattention.backends.cuda.attention.backward_heuristics import choose_backward
from fastattention.errors import CompileError
from fastattention.gpu_runtime.chips import CHIPS
from unit.samples import problem_of

GRADS = ("q", "k", "v")


def kernels(chip: str, headdim: int = 64, **changes: object) -> list[str]:
    limits = CHIPS[chip]
    problem = problem_of(**{"headdim": headdim, "grads": GRADS, **changes})
    return [config.gradients for config in choose_backward(problem, limits.arch, limits)]


@pytest.mark.parametrize(
    ("chip", "widest"), [("P100", 0), ("V100", 0), ("T4", 64), ("RTX 3090", 256), ("A100", 256), ("H100", 256)]
)
def test_one_kernel_computes_all_gradients_where_it_is_faster(chip: str, widest: int) -> None:
    for headdim in (32, 64, 256):
        assert (kernels(chip, headdim) == ["qkv"]) == (headdim <= widest)


@pytest.mark.parametrize(
    ("chip", "found"),
    [("H100", ["qkv"]), ("A100", ["qkv"]), ("RTX 3090", ["k", "v", "q"]), ("T4", None), ("V100", None)],
)
def test_wide_heads_have_kernels_from_ampere_on(chip: str, found: list[str] | None) -> None:
    if found is None:
        with pytest.raises(CompileError, match="512"):
            kernels(chip, 512)
    else:
        assert kernels(chip, 512) == found


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_deterministic_gradients_are_not_summed_in_any_order(chip: str, headdim: int) -> None:
    assert "qkv" not in kernels(chip, headdim, deterministic=True)


def test_some_gradients_alone_need_no_sums() -> None:
    assert kernels("H100", grads=("q",)) == ["q"]
    assert kernels("H100", grads=("k", "v")) == ["kv"]
    assert kernels("H100", grads=(*GRADS, "sinks")) == ["qkv"]


@pytest.mark.parametrize(("headdim", "headdim_v"), [(128, 32), (256, 64), (96, 96), (192, 128), (32, 256)])
def test_warps_share_out_columns_in_sixteens(headdim: int, headdim_v: int) -> None:
    limits = CHIPS["H100"]
    for dropout_p in (0.0, 0.1):
        problem = problem_of(headdim=headdim, headdim_v=headdim_v, grads=GRADS, dropout_p=dropout_p)
        (config,) = choose_backward(problem, 80, limits)
        assert headdim % (16 * config.column_warps) == 0
        assert headdim_v % (16 * config.column_warps) == 0
        assert headdim * config.query_parts % (16 * config.num_warps) == 0
