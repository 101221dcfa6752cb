"""Tensors of lengths that layers share."""

from __future__ import annotations

import torch

from fastattention.offload.lengths import LengthTensors


def test_layers_of_a_step_share_one_tensor() -> None:
    lengths = LengthTensors(torch.device("cpu"))
    first = lengths.of(3, 7)
    assert first.dtype is torch.int32
    assert first.tolist() == [7, 7, 7]
    assert lengths.of(3, 7) is first
    assert lengths.of(2, 7).tolist() == [7, 7]


def test_however_many_lengths_few_are_kept() -> None:
    lengths = LengthTensors(torch.device("cpu"))
    for length in range(1000):
        assert lengths.of(1, length).tolist() == [length]
        assert len(lengths._made) <= 64
