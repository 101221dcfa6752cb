"""Index tensors that never change are read from their device once; all others every time."""

from __future__ import annotations

import torch

from fastattention.host_numbers import constant, read_numbers


def test_a_constant_tensor_is_read_once() -> None:
    lengths = constant(torch.tensor([3, 1], dtype=torch.int32))
    numbers = read_numbers(lengths)
    numbers.append(7)  # the caller's own list
    lengths.zero_()  # breaks the promise, so that a second look would be seen
    assert read_numbers(lengths) == [3, 1]


def test_numbers_that_are_told_are_not_read() -> None:
    assert read_numbers(constant(torch.zeros(2, dtype=torch.int32), [3, 1])) == [3, 1]


def test_other_tensors_are_read_every_time() -> None:
    constant(torch.tensor([3, 1], dtype=torch.int32))
    lengths = torch.tensor([3, 1], dtype=torch.int32)
    assert read_numbers(lengths) == [3, 1]
    lengths.add_(1)
    assert read_numbers(lengths) == [4, 2]


def test_a_compiled_call_promises_nothing() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def double(lengths: torch.Tensor) -> torch.Tensor:
        return constant(lengths * 2)

    doubled = double(torch.tensor([3, 1]))
    assert read_numbers(doubled) == [6, 2]
    doubled.zero_()
    assert read_numbers(doubled) == [0, 0]
