"""Models that Transformers' Trainer trains with fast_attention take the steps that they take with eager attention.

The kernels are those of the cpu backend.
"""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
from tiers import deep, slow
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from fastattention.attention.problem import Layout, Problem
from fastattention.backends.cpu.attention.backend import CpuBackend
from integrations.models import VOCABULARY, pair

Batch = dict[str, Any]  # arguments of a model

STEPS, SEQLEN, BATCHES = 50, 96, 5
NUM_LAYERS = 2  # layers of all models here
# Losses begin near 6. Gradients of q, k or v that are 1% off move them by 6e-4 or more, rounding by 1e-5.
TOLERANCE = 1e-4


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """The problems that the cpu backend's own backward computed, one for each call."""
    problems: list[Problem] = []
    backward = CpuBackend.backward

    def recorded(self: CpuBackend, problem: Problem, *args: Any) -> dict[str, Tensor]:
        problems.append(problem)
        return backward(self, problem, *args)

    monkeypatch.setattr(CpuBackend, "backward", recorded)
    return problems


def repeated_words(seed: int, batch_size: int = 4, seqlen: int = SEQLEN) -> Tensor:
    """int64 (batch_size, seqlen): five random tokens again and again, so that attention helps to predict them."""
    word = torch.randint(3, VOCABULARY, (batch_size, 5), generator=torch.Generator().manual_seed(seed))
    return word.repeat(1, seqlen // 5 + 1)[:, :seqlen].contiguous()


def batch_for(name: str, seed: int) -> Batch:
    """Labels are the tokens, so BERT learns to repeat what it sees; rows of its batch end at different places."""
    ids = repeated_words(seed)
    if name == "t5":
        return {"input_ids": ids, "labels": ids}
    if name != "bert":
        return {"input_ids": ids, "labels": ids, "use_cache": False}
    mask = torch.arange(SEQLEN) < torch.tensor([SEQLEN, 66, 35, 90])[:, None]
    hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.15
    labels = ids.masked_fill(~(hidden & mask), -100)
    return {"input_ids": ids.masked_fill(hidden, 2), "labels": labels, "attention_mask": mask.long()}


def batches_for(name: str) -> list[Batch]:
    return [batch_for(name, seed) for seed in range(BATCHES)]


def trainable(model: nn.Module, attention_dropout: float = 0.0) -> Any:
    """A copy in training mode, without dropout but that of attention weights."""
    model = copy.deepcopy(model).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for attribute in ("attention_dropout", "dropout"):  # in Llama and similar models, in T5
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, attention_dropout)
    return model


class RecordingTrainer(Trainer):
    """Takes whole batches in their order, and keeps the loss of every step."""

    def __init__(self, model: nn.Module, batches: list[Batch], arguments: TrainingArguments) -> None:
        super().__init__(model, arguments)
        self.model_accepts_loss_kwargs = False  # a loss is the mean over its batch, as the model has it
        self.batches, self.losses = batches, list[float]()

    def get_train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        loss = super().compute_loss(*arguments, **options)
        self.losses.append(loss.item())
        return loss


def train(
    model: nn.Module, batches: list[Batch], steps: int = STEPS, learning_rate: float = 1e-3, seed: int = 0
) -> Tensor:
    """Trains in place. Returns the loss before every step."""
    with tempfile.TemporaryDirectory() as folder:
        # No norm of gradients is limited, which would hide a wrong one.
        arguments = TrainingArguments(
            folder, max_steps=steps, learning_rate=learning_rate, seed=seed, lr_scheduler_type="constant",
            weight_decay=0.01, max_grad_norm=0.0, use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True,
            logging_strategy="no",
        )  # fmt: skip
        trainer = RecordingTrainer(model, batches, arguments)
        trainer.train()
    assert len(trainer.losses) == steps
    return torch.tensor(trainer.losses)


def enable_checkpointing(model: Any) -> None:
    """Enables checkpointing by its name, which Transformers 5.24 changed."""
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()


def assert_same_losses(fast: Tensor, eager: Tensor) -> None:
    assert eager[-BATCHES:].mean() < 0.5 * eager[:BATCHES].mean(), "the model must learn for this to mean anything"
    difference, step = (fast - eager).abs().max(dim=0)
    assert difference <= TOLERANCE, f"losses differ by {difference:.1e} at step {step}"


@pytest.mark.parametrize(
    "name",
    ["gpt_oss", pytest.param("llama", marks=slow), *(pytest.param(name, marks=deep) for name in ("gemma2", "bert"))],
)
def test_losses_are_those_of_eager_at_every_step(name: str, served: list[Problem]) -> None:
    eager, fast = (train(trainable(model), batches_for(name)) for model in pair(name))
    assert_same_losses(fast, eager)
    assert len(served) == STEPS * NUM_LAYERS
    assert {problem.layout for problem in served} == {Layout.VARLEN if name == "bert" else Layout.DENSE}
    assert {problem.grads for problem in served} == {("q", "k", "v", "sinks") if name == "gpt_oss" else ("q", "k", "v")}


@slow
def test_losses_of_varlen_batches_are_those_of_eager_with_padding(served: list[Problem]) -> None:
    lengths = (40, 9, 47)
    varlen, padded = [], []
    for seed in range(BATCHES):
        ids = repeated_words(seed, len(lengths), max(lengths))
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        labels = ids.masked_fill(~mask, -100)
        padded.append({"input_ids": ids, "labels": labels, "attention_mask": mask.long(), "use_cache": False})
        labels = labels.clone()
        labels[:, 0] = -100  # the last token of one sequence does not predict the first of the next
        position_ids = torch.cat([torch.arange(length) for length in lengths])
        rows = {"input_ids": ids[mask], "labels": labels[mask], "position_ids": position_ids}
        varlen.append({**{key: row[None] for key, row in rows.items()}, "use_cache": False})
    models = pair("llama")
    assert_same_losses(train(trainable(models.fast), varlen), train(trainable(models.eager), padded))
    assert len(served) == STEPS * NUM_LAYERS
    assert {problem.layout for problem in served} == {Layout.VARLEN}


def test_a_learned_position_bias_leaves_self_attention_to_sdpa(served: list[Problem]) -> None:
    """The gradient of a bias is not computed by the cpu backend; cross-attention has none."""
    eager, fast = (train(trainable(model), batches_for("t5"), steps=10) for model in pair("t5"))
    torch.testing.assert_close(fast, eager, rtol=0, atol=TOLERANCE)
    assert len(served) == 10 * NUM_LAYERS


@slow
@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=deep) for name in ("gemma2", "gpt_oss", "bert"))])
def test_bfloat16_losses_are_as_near_to_float32_as_those_of_eager(name: str, served: list[Problem]) -> None:
    """At most 1.5 times as far, on average over all steps: two runs with rounded weights soon differ by chance."""
    # Weights of 0.2 in bfloat16 are 1e-3 apart: smaller steps would be lost.
    steps = 20
    options: dict[str, Any] = {"batches": batches_for(name), "learning_rate": 3e-3, "steps": steps}
    exact = train(trainable(pair(name).eager), **options)
    eager, fast = (train(trainable(model).bfloat16(), **options) for model in pair(name))
    assert {problem.dtype for problem in served} == {torch.bfloat16}
    assert len(served) == steps * NUM_LAYERS
    error, allowed = ((losses - exact).abs().mean().item() for losses in (fast, eager))
    assert 0 < error <= 1.5 * max(allowed, 5e-3)


@pytest.mark.parametrize("attention_dropout", [0.0, 0.3])
def test_gradient_checkpointing_gives_the_same_losses(attention_dropout: float, served: list[Problem]) -> None:
    losses, calls = [], []
    for checkpointing in (False, True):
        model = trainable(pair("llama").fast, attention_dropout)
        if checkpointing:
            enable_checkpointing(model)
        model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(checkpointing))  # noqa: B023
        losses.append(train(model, batches_for("llama"), steps=10).tolist())
    assert losses[0] == losses[1]
    assert (calls.count(False), calls.count(True)) == (10, 20), "checkpointing computes the forward again"
    assert len(served) == 2 * 10 * NUM_LAYERS


@slow
def test_training_with_dropout_repeats_with_the_seed_of_torch(served: list[Problem]) -> None:
    losses = []
    for seed in (0, 0, 1):
        losses.append(train(trainable(pair("llama").fast, 0.3), batches_for("llama"), steps=10, seed=seed).tolist())
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[2][0]
    assert losses[0][-1] < 0.9 * losses[0][0]
    assert len(served) == 3 * 10 * NUM_LAYERS
    assert {problem.dropout_p for problem in served} == {0.3}
