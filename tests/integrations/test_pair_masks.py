"""A mask that reaches several calls as one tensor is read once, as a mask of single pairs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fastattention import sparse
from fastattention.integrations import pair_masks
from fastattention.integrations.pytorch import scaled_dot_product_attention
from fastattention.integrations.transformers.attention import fast_attention_forward

from .models import assert_same, deep, prompts

LENGTH = 150


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The masks that have been read."""
    masks: list[Tensor] = []

    def from_pairs(pairs: Tensor) -> sparse.PairMask:
        masks.append(pairs)
        return sparse.from_pairs(pairs)

    monkeypatch.setattr(pair_masks, "from_pairs", from_pairs)
    return masks


def text_with_images(batch_size: int = 2) -> Tensor:
    """Bool (batch_size, 1, LENGTH, LENGTH): causal, but tokens of an image see each other; one image a sequence."""
    image = torch.zeros(batch_size, LENGTH, dtype=torch.bool)
    for index, row in enumerate(image):
        row[20 + 30 * index : 90 + 20 * index] = True
    return (torch.ones(LENGTH, LENGTH).tril() > 0) | (image[:, None, :, None] & image[:, None, None])


def layer(mask: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(what a layer gives, what it must give)."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(len(mask), heads, LENGTH, 16, generator=generator) for heads in (4, 2, 2))
    out, _ = fast_attention_forward(nn.Module(), q, k, v, mask)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2), expected.nan_to_num(0.0)


def test_the_second_layer_reads_it_and_later_ones_use_that(read: list[Tensor]) -> None:
    mask = text_with_images()
    for seed in range(4):
        assert len(read) == min(max(seed - 1, 0), 1)
        torch.testing.assert_close(*layer(mask, seed), atol=2e-6, rtol=1e-5)
    assert len(read) == 1


def test_a_mask_that_is_written_to_is_read_again(read: list[Tensor]) -> None:
    mask = text_with_images()
    for changes in range(3):
        mask[:, :, 100 + changes] = False  # a row without keys
        for _ in range(2):
            torch.testing.assert_close(*layer(mask), atol=2e-6, rtol=1e-5)
        assert len(read) == changes + 1


@pytest.mark.parametrize("kind", ["float", "one row"])
def test_other_tensors_stay_biases(kind: str, read: list[Tensor]) -> None:
    mask = {
        "float": torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(~text_with_images(), -torch.inf),
        "one row": torch.arange(LENGTH)[None, None, None] < 100,
    }[kind]
    for _ in range(3):
        torch.testing.assert_close(*layer(mask), atol=2e-6, rtol=1e-5)
    assert read == []


def test_a_tensor_of_inference_mode_stays_a_bias(read: list[Tensor]) -> None:
    """It does not tell whether it has been written to."""
    with torch.inference_mode():
        mask = text_with_images()
    for _ in range(3):
        torch.testing.assert_close(*layer(mask), atol=2e-6, rtol=1e-5)
    assert read == []


@pytest.mark.parametrize("axes", [2, 3, 4])
def test_the_function_in_place_of_that_of_torch_reads_it_too(axes: int, read: list[Tensor]) -> None:
    mask = text_with_images(1)[(0,) * (4 - axes)]
    for seed in range(3):
        q, k, v = torch.randn(3, 2, 4, LENGTH, 16, generator=torch.Generator().manual_seed(seed))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask), expected, atol=2e-6, rtol=1e-5)
    assert len(read) == 1


def test_a_model_gives_what_it_gives_with_a_bias(read: list[Tensor]) -> None:
    model, ids, mask = deep("llama", 4), prompts(2, LENGTH), text_with_images()
    biased = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        given, wanted = (model(ids, attention_mask=one).logits for one in (mask, biased))
    assert len(read) == 1
    assert_same(given, wanted)
