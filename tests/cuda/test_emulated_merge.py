"""The kernel that merges parts, emulated: any number, shape and memory of parts, and its callers."""

from __future__ import annotations

from collections.abc import Iterator

import emulator
import pytest
import torch
from conformance.engines import forget_backends
from emulator import EmulatedSm80
from merges import CASES, DTYPES, MergeCase, check_merge, check_what_is_not_finite
from torch import Tensor

from fastattention import merge_attn_states
from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.attention.problem import MergeProblem
from fastattention.backends.cuda.attention.config import MergeConfig
from fastattention.backends.cuda.attention.merging import MOST_WARPS

every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
STEP = MergeCase("step", 3, (1, 1, 32, 128))


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedSm80]:
    """The emulated backend, asked before all others."""
    monkeypatch.setattr(ATTENTION_BACKENDS, "order", {"cuda-sm80": "emulator:EmulatedSm80", **ATTENTION_BACKENDS.order})
    forget_backends()
    emulated = ATTENTION_BACKENDS.get("cuda-sm80")
    assert isinstance(emulated, EmulatedSm80)
    emulated.reports = []
    yield emulated
    forget_backends()


@every_dtype
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_parts_are_merged_exactly_and_repeatably(dtype: torch.dtype, case: MergeCase) -> None:
    check_merge(merge_attn_states, *case.parts(dtype))


@every_dtype
def test_the_order_of_ctas_and_warps_does_not_change_a_bit(dtype: torch.dtype) -> None:
    outs, lses = MergeCase("order", 3, (3, 37, 6, 128)).parts(dtype)
    out, lse = merge_attn_states(outs, lses)
    with emulator.shuffled(seed=1):
        again, lse_again = merge_attn_states(outs, lses)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


@every_dtype
def test_what_is_not_finite_stays_where_it_is(dtype: torch.dtype) -> None:
    check_what_is_not_finite(merge_attn_states, dtype)


@every_dtype
def test_a_part_alone_stays_as_it_is(dtype: torch.dtype) -> None:
    (out, empty), (lse, no_keys) = MergeCase("alone", 2, (2, 3, 4, 64)).parts(dtype)
    out.nan_to_num_()
    no_keys.fill_(-torch.inf)
    for parts in (([out], [lse]), ([empty, out, empty], [no_keys, lse, no_keys])):
        merged, merged_lse = merge_attn_states(*parts)
        assert torch.equal(merged, out.masked_fill(lse.isneginf().transpose(-1, -2).unsqueeze(-1), 0.0))
        assert torch.equal(merged_lse, lse)


def test_large_numbers_do_not_overflow() -> None:
    outs, lses = torch.full((8, 1, 2, 3, 8), 3e38), torch.full((8, 1, 3, 2), 500.0)
    out, lse = merge_attn_states(outs, lses)
    torch.testing.assert_close(out, outs[0])
    torch.testing.assert_close(lse, torch.full((1, 3, 2), 502.0794415))


@pytest.mark.parametrize(("num_parts", "launches"), [(1, 1), (3, 1), (8, 1), (9, 3), (64, 9), (65, 12)])
def test_up_to_eight_parts_are_one_launch(backend: EmulatedSm80, num_parts: int, launches: int) -> None:
    merge_attn_states(*MergeCase("launches", num_parts, (1, 1, 2, 8)).parts(torch.float16))
    assert len(backend.reports) == launches


def test_more_than_eight_parts_are_rounded_once() -> None:
    outs, lses = MergeCase("rounded", 20, (1, 5, 4, 16)).parts(torch.bfloat16)
    merged, _ = merge_attn_states(outs, lses)
    in_float32, _ = merge_attn_states([out.float() for out in outs], lses)
    assert torch.equal(merged, in_float32.bfloat16())


def test_nothing_is_launched_for_nothing(backend: EmulatedSm80) -> None:
    for shape in ((0, 1, 4, 8), (2, 0, 4, 8), (0, 4, 8), (3, 0, 8)):
        out, _ = merge_attn_states(*MergeCase("nothing", 2, shape).parts(torch.float16))
        assert out.shape == shape
    assert backend.reports == []


def gradient_wanted(outs: list[Tensor], lses: list[Tensor]) -> None:
    lses[1].requires_grad_()


def in_float64(outs: list[Tensor], lses: list[Tensor]) -> None:
    outs[:] = [out.double() for out in outs]


@pytest.mark.parametrize("change", [gradient_wanted, in_float64])
def test_what_the_kernel_does_not_serve_is_merged_by_torch(backend: EmulatedSm80, change: object) -> None:
    outs, lses = STEP.parts(torch.float32)
    assert callable(change)
    expected, _ = merge_attn_states(outs, lses)
    assert len(backend.reports) == 1
    backend.reports = []
    change(outs, lses)
    merged, lse = merge_attn_states(outs, lses)
    assert backend.reports == []
    assert lse.requires_grad == (change is gradient_wanted)
    torch.testing.assert_close(merged.float(), expected)


def test_a_compiled_merge_is_operations_of_torch(backend: EmulatedSm80) -> None:
    outs, lses = STEP.parts(torch.float16)
    expected, expected_lse = merge_attn_states(outs, lses)
    backend.reports = []
    merged, lse = torch.compile(merge_attn_states, fullgraph=True, backend="aot_eager")(outs, lses)
    assert backend.reports == []
    torch.testing.assert_close(merged, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"needs_grad": True}, "a gradient is needed"),
        ({"dtype": torch.float64}, "torch.float64 is not merged"),
        ({"device": torch.device("meta")}, "tensors are on meta"),
        ({"out_shape": (MOST_WARPS // 2 + 1, 1, MergeConfig.columns_of_warp + 1)}, "more rows than one launch takes"),
    ],
    ids=["gradient", "dtype", "device", "rows"],
)
def test_a_refusal_says_why(backend: EmulatedSm80, change: dict[str, object], reason: str) -> None:
    problem = MergeProblem((1, 1, 32, 128), torch.float16, torch.device("cpu"), needs_grad=False)
    assert backend.why_not_merge(problem) is None
    refusal = backend.why_not_merge(problem._replace(**change))
    assert refusal is not None
    assert reason in refusal
