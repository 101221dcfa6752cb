"""Fifty steps of training: losses, weights and logits stay those of torch's operations."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from integrations.models import assert_same, prompts

from .calls import Calls, by_torch
from .models import NUM_LINEAR, initial_model

STEPS = 50
TOLERANCE = 1e-4
LENGTHS = (75, 41)  # one is more than a chunk of 64
# What keeps torch's forms short. Mamba-2 pads sequences to chunks, which are 256 tokens by default.
SIZES: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_chunk_size": 32}, "kimi_linear": {"linear_num_heads": 2, "linear_head_dim": 16},
}  # fmt: skip
IGNORED = -100  # a label that has no loss


class Trained(NamedTuple):
    """What is compared after training."""

    losses: Tensor  # (STEPS,)
    weights: list[Tensor]
    logits: Tensor  # of sequences that were not trained on


def sequences(seed: int) -> list[Tensor]:
    """Sequences that repeat themselves, so that there is something to learn."""
    return [part.repeat(5)[:length] for part, length in zip(prompts(len(LENGTHS), 17, seed), LENGTHS, strict=True)]


def padded(seed: int) -> dict[str, Tensor]:
    """A batch with padding on the right."""
    ids, labels = (
        torch.nn.utils.rnn.pad_sequence(sequences(seed), batch_first=True, padding_value=value)
        for value in (0, IGNORED)
    )
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != IGNORED).long()}


def varlen(seed: int) -> dict[str, Any]:
    """The same sequences, concatenated. The first token of each has no loss, as nothing predicts it."""
    parts = sequences(seed)
    labels = [torch.cat([torch.tensor([IGNORED]), part[1:]]) for part in parts]
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return {
        "input_ids": torch.cat(parts)[None], "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None],
        "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS),
    }  # fmt: skip


LAYOUTS = {"padded": padded, "varlen": varlen}


def train(name: str, layout: str) -> Trained:
    """A new model, trained from the same weights on the same two batches in turns."""
    model = initial_model(name, **SIZES.get(name, {})).train()
    if layout == "varlen":
        model.set_attn_implementation("fast_attention")
    # Gradients of strong gates are below 1e-6, and 0.4% of them is rounding. With eps=1e-8 that moves weights by lr.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)
    losses = []
    for step in range(STEPS):
        loss = model(**LAYOUTS[layout](step % 2), use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    with torch.no_grad():
        logits = model.eval()(prompts(length=LENGTHS[0], seed=2)).logits
    return Trained(torch.stack(losses), list(model.parameters()), logits)


@functools.cache
def trained_by_torch(name: str) -> Trained:
    """By torch, which refuses varlen batches. Cached for both layouts of ours."""
    return by_torch(lambda: train(name, "padded"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "bamba"])
def test_fifty_steps_of_training_are_those_of_torch(name: str, layout: str, calls: Calls) -> None:
    """The losses of all steps, then the logits of other sequences (relative to the largest), and all weights."""
    ours = train(name, layout)
    assert calls.counts == ((STEPS + 1) * NUM_LINEAR, 0)
    wanted = trained_by_torch(name)
    assert calls.counts == ((STEPS + 1) * NUM_LINEAR, 0)
    assert wanted.losses[-1] < 0.1 * wanted.losses[0]
    torch.testing.assert_close(ours.losses, wanted.losses, rtol=0, atol=TOLERANCE)
    assert_same(ours.logits, wanted.logits, tolerance=TOLERANCE)
    for one, other in zip(ours.weights, wanted.weights, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
