"""Products and systems of lower triangles, in which a value that is not finite reaches no earlier token.

A triangle has a row and a column for each token of a chunk: the row of token i holds what tokens j <= i give to it, and
zeros for later tokens. A plain product also multiplies these zeros, and zero times NaN is NaN. Here such values are
replaced by zeros before a product. Afterwards NaN is added to every token that they reach, column by column. Gradients
are products and systems of the same kind, so the same holds for them with earlier and later tokens exchanged.

No function looks at values on the host.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function


def scores(rows: Tensor, columns: Tensor) -> Tensor:
    """The lower triangle of rows @ columns^T: (..., tokens, tokens)."""
    return rows @ columns.mT if rows.shape[-2] == 1 else _product(_Kind.SCORES, rows, columns)


def times(triangle: Tensor, values: Tensor) -> Tensor:
    """The product triangle @ values. What lies above the diagonal of the triangle must be zero."""
    return triangle @ values if triangle.shape[-1] == 1 else _product(_Kind.TIMES, triangle, values)


def solve(triangle: Tensor, values: Tensor) -> Tensor:
    """The x of (1 + N) x = values, N being what the triangle holds below its diagonal. The rest is not read."""
    return values if triangle.shape[-1] == 1 else _solution(triangle, values)


class _Kind(Enum):
    SCORES = auto()
    TIMES = auto()
    TRANSPOSED_TIMES = auto()  # triangle^T @ values


def _solution(triangle: Tensor, values: Tensor, transposed: bool = False) -> Tensor:
    return _Solution.apply(triangle, values, transposed)  # type: ignore[no-untyped-call, no-any-return]


def _product(kind: _Kind, a: Tensor, b: Tensor) -> Tensor:
    return _Product.apply(kind, a, b)  # type: ignore[no-untyped-call, no-any-return]


class _Product(Function):
    """A product of a kind, which is linear in both operands. Its gradients are products of the other kinds."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kind: _Kind, a: Tensor, b: Tensor) -> Tensor:
        if kind is _Kind.SCORES:
            return (a @ b.mT).tril()
        if kind is _Kind.TIMES:
            return a @ _finite(b) + _reached(b * 0.0)
        return a.mT @ _finite(b) + _reached(b * 0.0, earlier=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[_Kind, Tensor, Tensor], output: Tensor) -> None:
        ctx.kind, *operands = inputs
        ctx.save_for_backward(*operands)
        ctx.save_for_forward(*operands)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        if ctx.kind is _Kind.SCORES:
            grad = grad.tril()
            of_a, of_b = (_Kind.TIMES, grad, b), (_Kind.TRANSPOSED_TIMES, grad, a)
        elif ctx.kind is _Kind.TIMES:
            of_a, of_b = (_Kind.SCORES, grad, b), (_Kind.TRANSPOSED_TIMES, a, grad)
        else:
            of_a, of_b = (_Kind.SCORES, b, grad), (_Kind.TIMES, a, grad)
        needed = ctx.needs_input_grad[1:]
        return None, *(_product(*of) if need else None for of, need in zip((of_a, of_b), needed, strict=True))

    @staticmethod
    def jvp(ctx: Any, _: None, tangent_a: Tensor | None, tangent_b: Tensor | None) -> Tensor:
        a, b = ctx.saved_tensors
        pairs = [(x, y) for x, y in ((tangent_a, b), (a, tangent_b)) if x is not None and y is not None]
        parts = [_product(ctx.kind, *pair) for pair in pairs]
        return sum(parts[1:], start=parts[0])


class _Solution(Function):
    """The x of (1 + N) x = values, or of the transposed system. N is what the triangle holds below its diagonal."""

    generate_vmap_rule = True

    @staticmethod
    def forward(triangle: Tensor, values: Tensor, transposed: bool) -> Tensor:
        below = triangle.tril(-1)
        system = _finite(below)
        # A token whose coefficients are not finite is reached in every column.
        marks = values * 0.0 + (below * 0.0).sum(-2 if transposed else -1).unsqueeze(-1)
        if transposed:
            system = system.mT
        solution: Tensor = torch.linalg.solve_triangular(system, _finite(values), upper=transposed, unitriangular=True)
        return solution + _reached(marks, earlier=transposed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        triangle, values, ctx.transposed = inputs
        ctx.save_for_backward(triangle, output)
        ctx.save_for_forward(triangle, values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        triangle, solution = ctx.saved_tensors
        of_values = _solution(triangle, grad, not ctx.transposed)
        pair = (solution, of_values) if ctx.transposed else (of_values, solution)
        return -_product(_Kind.SCORES, *pair).tril(-1), of_values, None

    @staticmethod
    def jvp(ctx: Any, tangent_triangle: Tensor | None, tangent_values: Tensor | None, _: None) -> Tensor:
        triangle, values = ctx.saved_tensors
        right = torch.zeros_like(values) if tangent_values is None else tangent_values
        if tangent_triangle is not None:
            solution = _solution(triangle, values, ctx.transposed)
            kind = _Kind.TRANSPOSED_TIMES if ctx.transposed else _Kind.TIMES
            right = right - _product(kind, tangent_triangle.tril(-1), solution)
        return _solution(triangle, right, ctx.transposed)


def _finite(values: Tensor) -> Tensor:
    return values.nan_to_num(0.0, 0.0, 0.0)


def _reached(marks: Tensor, earlier: bool = False) -> Tensor:
    """NaN for the tokens from the first mark of a column on, or up to the last one; zeros elsewhere. Marks are NaN."""
    return marks.flip(-2).cumsum(-2).flip(-2) if earlier else marks.cumsum(-2)
