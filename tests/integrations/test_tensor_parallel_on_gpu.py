"""tile_allreduce on GPUs: models divided between two compute what the whole model does; skipped without two GPUs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from distributed.team import GPU_PATIENCE, Team, skip_module_without_two_gpus

from fastattention.integrations.transformers.tensor_parallel import tile_allreduce

from .models import pair, stepwise
from .test_tensor_parallel import LAYERS, TILED, divided, halves, projected

skip_module_without_two_gpus()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """Two, as many as the models have key heads."""
    made = Team(2, tmp_path_factory.mktemp("ranks"), backend="nccl", patience=GPU_PATIENCE)
    yield made
    made.close()


@functools.cache
def whole(name: str) -> Any:
    """The model called `name` on this rank's GPU, in bfloat16."""
    return copy.deepcopy(pair(name).eager).to("cuda", torch.bfloat16)


@functools.cache
def tiled(name: str) -> Any:
    """The same on two GPUs, its prompts in row blocks."""
    model = divided(copy.deepcopy(whole(name)), "cuda")
    tile_allreduce(model, partition=halves)
    return model


@torch.no_grad()
def passes(name: str, side: str, cache: str) -> None:
    """Asserts at most twice the error that the whole model has in bfloat16, relative to float32."""
    exact, real = stepwise(pair(name).eager, side, cache)
    usual, _ = stepwise(whole(name), side, cache)
    with projected() as calls:
        given, _ = stepwise(tiled(name), side, cache)
    assert (calls.count, calls.reasons) == (LAYERS * 4, set())
    errors = [(each.float().cpu() - exact)[real.bool()].abs().max().item() for each in (given, usual)]
    floor = 4 * torch.finfo(torch.bfloat16).eps * exact[real.bool()].abs().max().item()
    assert errors[0] <= max(2 * errors[1], floor), f"error {errors[0]:.1e}, of the whole model {errors[1]:.1e}"


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", TILED)
def test_logits_are_those_of_the_whole_model(ranks: Team, name: str, side: str, cache: str) -> None:
    ranks.run(passes, name, side, cache)
