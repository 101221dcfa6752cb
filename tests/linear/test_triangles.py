"""Derivatives of products and systems of lower triangles, in every way that torch takes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, func
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from fastattention.backends.torch import triangles

Function = Callable[[Tensor, Tensor], Tensor]
# In the second derivatives of each are the products and systems of transposed triangles.
FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "scores": (triangles.scores, lambda a, b: (a @ b.mT).tril()),
    "times": (lambda a, b: triangles.times(a.tril(), b), lambda a, b: a.tril() @ b),
    "solve": (triangles.solve, lambda a, b: torch.linalg.solve(a.tril(-1) + torch.eye(5, dtype=a.dtype), b)),
}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def operands(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 5, 3 if name == "scores" else 5), (2, 5, 3)
    a, b = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes)
    return a, b


@every_function
def test_a_triangle_is_that_of_plain_operations(name: str) -> None:
    ours, plain = FUNCTIONS[name]
    assert_close(ours(*operands(name)), plain(*operands(name)))


@every_function
def test_derivatives_are_right_forward_backward_and_batched(name: str) -> None:
    function = FUNCTIONS[name][0]
    assert gradcheck(function, operands(name), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, operands(name), check_fwd_over_rev=True, check_batched_grad=True)


@every_function
def test_transforms_follow_derivatives(name: str) -> None:
    ours, plain = (
        func.hessian(lambda a, b, f=f: f(a, b).square().sum(), argnums=(0, 1))(*map(Tensor.detach, operands(name)))
        for f in FUNCTIONS[name]
    )
    assert_close(ours, plain)
