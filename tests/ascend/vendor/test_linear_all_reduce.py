"""The product of a row-parallel linear layer with the sum over its ranks, under the real schema."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ascend.vendor.communication import on_ranks
from ascend.vendor.environment import skip_without_torch_npu
from ascend.vendor.recorder import Recorder, on_meta
from fastattention.backends.ascend import vendor
from fastattention.errors import ArgumentError

skip_without_torch_npu()


def layer(num_ranks: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
    """x (37, 24) and weight (40, 24), whose columns the ranks divide."""
    generator = torch.Generator().manual_seed(num_ranks)
    return tuple(torch.randn(size, 24, generator=generator).to(dtype) for size in (37, 40))  # type: ignore[return-value]


def parts(tensor: Tensor, num_ranks: int) -> list[Tensor]:
    return [part.contiguous() for part in tensor.chunk(num_ranks, dim=1)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_every_rank_has_the_product_of_the_whole(dtype: torch.dtype, num_ranks: int) -> None:
    x, weight = layer(num_ranks, dtype)
    xs, weights = parts(x, num_ranks), parts(weight, num_ranks)
    results = on_ranks(num_ranks, lambda rank, name: vendor.linear_all_reduce(xs[rank], weights[rank], name))
    eps = torch.finfo(dtype).eps
    for out in results:
        assert out.dtype is dtype
        torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=eps, atol=eps)


def test_the_call_is_in_the_real_schema_and_the_real_shape_inference_agrees() -> None:
    x, weight = layer(1)

    def record(_: int, name: str) -> Recorder:
        with Recorder() as recorder:
            vendor.linear_all_reduce(x, weight, name)
        return recorder

    ((recorder,),) = (on_ranks(1, record),)
    (call,) = recorder.calls
    known = {argument.name for argument in call.operator._schema.arguments}
    assert set(call.arguments) <= known
    # A bias would be added once a rank.
    assert {name for name, value in call.arguments.items() if value is not None} <= {
        "x1", "x2", "hcom", "reduce_op", "comm_turn",
    }  # fmt: skip
    assert call.arguments["x2"].data_ptr() == weight.data_ptr()  # not copied
    inferred = call.operator(**{name: on_meta(value) for name, value in call.arguments.items()})
    assert tuple(inferred.shape) == (37, 40)


@pytest.mark.parametrize(
    ("x", "weight", "named"),
    [
        (torch.ones(3, 8), torch.ones(4, 8), r"x must be float16 or bfloat16.*float32"),
        (torch.ones(3, 8).half(), torch.ones(4, 8).bfloat16(), r"weight must be.*in the dtype of x.*bfloat16"),
        (torch.ones(8, 3).half().t(), torch.ones(4, 8).half(), r"x must be contiguous, got strides \(1, 3\)"),
        (torch.ones(3, 8).half(), torch.ones(8, 4).half().t(), r"weight must be contiguous"),
        (torch.ones(3, 8).half(), torch.ones(8, 8, 2).half(), r"weight \(out_features, in_features\)"),
        (torch.ones(3, 8).half(), torch.ones(4, 6).half(), r"got shapes \(3, 8\) and \(4, 6\)"),
        (torch.ones(0, 8).half(), torch.ones(4, 8).half(), r"x must not be empty"),
    ],
    ids=["float32", "dtypes", "transposed-x", "transposed-weight", "dimensions", "in_features", "no-rows"],
)
def test_other_tensors_are_refused_before_anything_is_communicated(x: Tensor, weight: Tensor, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        vendor.linear_all_reduce(x, weight, "no communicator")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((512, 128, 4096, torch.float16, 4), None),
        ((512, 128, 4096, torch.float32, 4), "float32"),
        ((512, 128, 4096, torch.float16, 3), "3 ranks"),
        ((512, 128, 4096, torch.float16, 16), "16 ranks"),
        ((0, 128, 4096, torch.bfloat16, 2), "rows=0"),
        ((2**31, 128, 4096, torch.bfloat16, 2), "rows=2147483648"),
    ],
)
def test_what_the_operator_does_not_take_is_known_beforehand(
    given: tuple[int, int, int, torch.dtype, int], named: str | None
) -> None:
    reason = vendor.why_not_linear_all_reduce(*given)
    assert reason is None if named is None else named in (reason or "")
