"""tile_allreduce: models under Transformers' tensor parallelism compute what the whole model does, in row blocks."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import pytest
import torch
from distributed.team import Team
from tiers import deep, sampled
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import DynamicCache
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from fastattention.distributed import DeferredAttention, NotTiledWarning, TilingAllReduce
from fastattention.errors import UnsupportedError
from fastattention.integrations.transformers import FastAttentionCache
from fastattention.integrations.transformers.tensor_parallel import NAME, tile_allreduce
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT

from .budgets import LARGE, cache_arguments
from .models import assert_same, assert_varied, greedy, padding_mask, pair, prompts, random_masks, stepwise

TILED = ("llama", "mistral", "qwen3", "gemma2")
LAYERS = 2
USUAL = "attention, projection and all-reduce run one after the other: "


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """Two, as many as the models have key heads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTATTENTION_CACHE", str(tmp_path_factory.mktemp("cache")))
        made = Team(2, tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


def halves(num_rows: int) -> list[int]:
    """Two blocks that end within a sequence, if there are enough rows."""
    return [num_rows] if num_rows < 5 else [num_rows // 2 + 1, num_rows - num_rows // 2 - 1]


def divided(model: Any, device_type: str) -> Any:
    """A model on two ranks. Newer versions of Transformers take the plan, older ones ask the model for it."""
    expand = getattr(model, "_expand_parallel_plan", None)
    plan = () if expand is None else (expand(model.tp_plan),)
    return apply_tensor_parallelism(model, init_device_mesh(device_type, (2,)), *plan)


@functools.cache
def parallel(name: str) -> Any:
    """The model called `name` on two ranks, as from_pretrained with a DistributedConfig makes it."""
    return divided(copy.deepcopy(pair(name).eager), "cpu")


@functools.cache
def tiled(name: str) -> Any:
    """The parallel model after tile_allreduce."""
    model = parallel(name)
    tile_allreduce(model, partition=halves)
    return model


class Projected:
    """Counts calls that were made in row blocks, and gathers the reasons why others were not."""

    def __init__(self) -> None:
        self.count = 0
        self.reasons: set[str] = set()


@contextlib.contextmanager
def projected() -> Iterator[Projected]:
    seen, project = Projected(), DeferredAttention.project

    def counted(self: DeferredAttention, *args: Any, **kwargs: Any) -> Tensor:
        seen.count += 1
        return project(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(DeferredAttention, "project", counted)
        yield seen
    for warning in caught:
        assert warning.category is NotTiledWarning, warning.message
        seen.reasons.add(str(warning.message).removeprefix(USUAL))


@torch.no_grad()
def passes(name: str, side: str, cache: str) -> None:
    expected, real = stepwise(pair(name).eager, side, cache)
    with projected() as calls:
        out, _ = stepwise(tiled(name), side, cache)
    if side == "right":
        assert calls.reasons
        assert all("pad on the left" in reason for reason in calls.reasons), calls.reasons
    else:
        assert (calls.count, calls.reasons) == (LAYERS * (1 if cache == "no cache" else 4), set())
    assert_same(out, expected, real)


@sampled
@pytest.mark.parametrize("cache", ["no cache", "dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", TILED)
def test_logits_are_those_of_the_whole_model(ranks: Team, name: str, side: str, cache: str) -> None:
    ranks.run(passes, name, side, cache)


def generation(name: str, side: str, cache: str | None) -> list[list[int]]:
    eager, fast = (greedy(model, prompts(), padding_mask(side), 12, cache) for model in (pair(name).eager, tiled(name)))
    assert_varied(eager)
    assert fast == eager
    return fast  # type: ignore[no-any-return]


@sampled
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", TILED)
def test_greedy_generation_is_that_of_the_whole_model(ranks: Team, name: str, side: str, cache: str | None) -> None:
    first, second = ranks.run(generation, name, side, cache)
    assert first == second


def not_tiled(kind: str) -> None:
    ids, cache = prompts(), DynamicCache()
    if kind == "cache":
        cache = FastAttentionCache(tiled("llama").config, **cache_arguments(LARGE, None, {}))
    autocast = torch.autocast("cpu", dtype=torch.bfloat16) if kind == "autocast" else contextlib.nullcontext()
    with torch.set_grad_enabled(kind == "gradients"), autocast:
        with projected():
            tiled("llama")(ids[:, :6], **{CACHE_ARGUMENT: cache})
        with projected() as calls:
            out = tiled("llama")(ids[:, 6:], **{CACHE_ARGUMENT: cache}).logits
    assert calls.count == 0
    (reason,) = calls.reasons
    named = {"gradients": "gradients are wanted", "cache": "a FastAttentionCache", "autocast": "torch.bfloat16"}[kind]
    assert named in reason
    with torch.no_grad():
        expected = pair("llama").eager(ids).logits[:, 6:]
    assert_same(out, expected, tolerance=0.1 if kind == "autocast" else 1e-5)


@pytest.mark.parametrize("kind", ["gradients", "cache", "autocast"])
def test_what_cannot_be_tiled_is_told_and_computed(ranks: Team, kind: str) -> None:
    ranks.run(not_tiled, kind)


@torch.no_grad()
def torch_compile_traces_the_usual_way() -> None:
    model = torch.compile(tiled("llama"), backend="eager")
    with projected() as calls:
        out = model(prompts(), attention_mask=padding_mask("left")).logits
    assert (calls.count, calls.reasons) == (0, {"the call is traced by torch.compile"})
    expected = pair("llama").eager(prompts(), attention_mask=padding_mask("left")).logits
    assert_same(out, expected, padding_mask("left"))


@torch.no_grad()
def a_mask_of_four_dimensions_is_obeyed() -> None:
    seen, added = random_masks()
    with projected() as calls:
        out = tiled("llama")(prompts(), attention_mask=seen).logits
    assert (calls.count, calls.reasons) == (LAYERS, set())
    assert_same(out, pair("llama").eager(prompts(), attention_mask=added).logits)


@torch.no_grad()
def short_prompts_and_decoding_take_the_usual_way_without_a_word() -> None:
    model = copy.deepcopy(pair("qwen3").eager)
    divided(model, "cpu")
    tile_allreduce(model)
    ids, long = prompts(), prompts(1, 96)
    with projected() as calls:
        assert_same(model(ids).logits, pair("qwen3").eager(ids).logits)
        assert (calls.count, calls.reasons) == (0, set())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fastattention.distributed.row_partitions.LEAST_BYTES", 1)
            patch.setattr("fastattention.distributed.row_partitions.LEAST_ROWS", 48)
            assert_same(model(long).logits, pair("qwen3").eager(long).logits)
    assert (calls.count, calls.reasons) == (LAYERS, set())


@torch.no_grad()
def torchs_own_parallelism_serves_models_of_transformers() -> None:
    model = copy.deepcopy(pair("llama").eager)
    styles: dict[str, Any] = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    styles["model.layers.*.self_attn.o_proj"] = TilingAllReduce(partition=halves)
    styles |= {f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    styles["model.layers.*.mlp.down_proj"] = RowwiseParallel()
    parallelize_module(model, init_device_mesh("cpu", (2,)), styles)
    model.set_attn_implementation(NAME)
    with projected() as calls:
        out = model(prompts(), attention_mask=padding_mask("left")).logits
    assert (calls.count, calls.reasons) == (LAYERS, set())
    expected = pair("llama").eager(prompts(), attention_mask=padding_mask("left")).logits
    assert_same(out, expected, padding_mask("left"))


@torch.no_grad()
def a_second_time_changes_nothing_and_another_implementation_is_served() -> None:
    model = tiled("llama")
    forward = model.model.layers[0].self_attn.o_proj.forward
    tile_allreduce(model)
    assert model.model.layers[0].self_attn.o_proj.forward is forward
    model.set_attn_implementation("fast_attention")
    with projected() as calls:
        assert_same(model(prompts()).logits, pair("llama").eager(prompts()).logits)
    assert (calls.count, calls.reasons) == (0, {"the projection was given a tensor, not deferred attention"})
    model.set_attn_implementation(NAME)


def a_projection_that_is_divided_in_another_way_is_refused() -> None:
    model = copy.deepcopy(pair("llama").fast)
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"model.layers.*.self_attn.o_proj": ColwiseParallel()})
    with pytest.raises(UnsupportedError, match=r"divided among the ranks by rows.* placed \(Shard\(dim=0\),\)"):
        tile_allreduce(model)


PROMISES = [
    pytest.param(torch_compile_traces_the_usual_way, marks=deep),
    a_mask_of_four_dimensions_is_obeyed,
    short_prompts_and_decoding_take_the_usual_way_without_a_word,
    torchs_own_parallelism_serves_models_of_transformers,
    a_second_time_changes_nothing_and_another_implementation_is_served,
    a_projection_that_is_divided_in_another_way_is_refused,
]


@pytest.mark.parametrize("promise", PROMISES, ids=attrgetter("__name__"))
def test_on_every_rank(ranks: Team, promise: Callable[[], None]) -> None:
    ranks.run(promise)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama", r"model\.layers\.0\.self_attn\.o_proj must be divided .*whole.*DistributedConfig"),
        ("bert", "BertForMaskedLM has no attention module with a linear o_proj"),
    ],
)
def test_models_that_cannot_be_tiled_are_refused_and_stay_as_they_are(name: str, message: str) -> None:
    model = copy.deepcopy(pair(name).fast)
    with pytest.raises(UnsupportedError, match=message):
        tile_allreduce(model)
    assert model.config._attn_implementation == "fast_attention"


def test_the_name_alone_computes_what_eager_does() -> None:
    model = copy.deepcopy(pair("llama").eager)
    model.set_attn_implementation(NAME)
    mask = padding_mask("left")
    with torch.no_grad():
        out, expected = (each(prompts(), attention_mask=mask).logits for each in (model, pair("llama").eager))
    assert_same(out, expected, mask)
