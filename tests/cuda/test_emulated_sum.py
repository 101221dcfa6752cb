"""The kernel that adds parts up, emulated: every dtype, odd counts, any place in memory."""

from __future__ import annotations

import pytest
import torch
from emulator import Range, launch
from torch import Tensor

from fastattention.backends.cuda.params import MOST_PARTS
from fastattention.backends.cuda.summing import NUMBERS_OF_CTA, sum_launch, sum_params

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
COUNTS = (1, 3, 4, 5, 127, 1000, NUMBERS_OF_CTA, NUMBERS_OF_CTA + 1, 3 * NUMBERS_OF_CTA - 2)

every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


def amid_nan(values: Tensor, offset: int) -> Tensor:
    """A copy that begins `offset` elements into its memory, with NaN on both sides."""
    memory = torch.full((values.numel() + offset + 8,), torch.nan, dtype=values.dtype)
    place = memory[offset : offset + values.numel()]
    place.copy_(values)
    return place


def add_up(parts: list[Tensor], shared: Tensor, out: Tensor) -> None:
    """One launch."""
    addresses = [part.data_ptr() for part in parts]
    params = sum_params(addresses, shared.data_ptr(), out.data_ptr(), out.numel())
    launch(sum_launch(out.dtype, out.numel()), params, [Range(x.data_ptr(), x.nbytes) for x in (*parts, shared, out)])


@every_dtype
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("num_parts", [1, 2, 4, MOST_PARTS])
def test_sums_are_rounded_once(dtype: torch.dtype, count: int, num_parts: int) -> None:
    torch.manual_seed(count + num_parts)
    parts = [amid_nan(torch.randn(count).to(dtype), 0) for _ in range(num_parts)]
    out, shared = (amid_nan(torch.zeros(count, dtype=dtype), 0) for _ in range(2))
    add_up(parts, shared, out)
    total = torch.zeros(count)
    for part in parts:
        total += part.float()  # in the order of the parts
    assert torch.equal(out, total.to(dtype))
    assert torch.equal(shared, out)


@every_dtype
@pytest.mark.parametrize("offset", [1, 2, 3, 5])
def test_parts_and_results_may_begin_anywhere(dtype: torch.dtype, offset: int) -> None:
    parts = [amid_nan(torch.randn(133).to(dtype), offset * part % 7) for part in range(3)]
    out, shared = amid_nan(torch.zeros(133, dtype=dtype), offset), amid_nan(torch.zeros(133, dtype=dtype), 7 - offset)
    add_up(parts, shared, out)
    expected = ((parts[0].float() + parts[1].float()) + parts[2].float()).to(dtype)
    assert torch.equal(out, expected)
    assert torch.equal(shared, expected)


@every_dtype
def test_the_sum_may_take_the_place_of_a_part(dtype: torch.dtype) -> None:
    parts = [amid_nan(torch.randn(70).to(dtype), 0) for _ in range(4)]
    expected = sum((part.float() for part in parts), torch.zeros(70)).to(dtype)
    out = amid_nan(torch.zeros(70, dtype=dtype), 0)
    add_up(parts, parts[2], out)
    assert torch.equal(parts[2], expected)
    assert torch.equal(out, expected)
