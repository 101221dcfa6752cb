"""Every tensor of every public function, as each kind of tensor of PyTorch: served correctly, or refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils._pytree import tree_map

from fastattention import DenseKVStore, PackedKVStore, merge_attn_states
from fastattention.errors import ArgumentError, FastAttentionError, UnsupportedError
from unit.functions import FunctionCall, every_call

Kind = Callable[[Tensor], Tensor]


class Plain(Tensor):
    """A subclass without a __torch_dispatch__ of its own."""


class Wrapper(Tensor):
    """A subclass that wraps a tensor and has no memory itself."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, strides=inner.stride()
        )
        assert isinstance(made, Wrapper)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, cls) else value

        return func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))


FAKE = FakeTensorMode()


def gathered(tensor: Tensor) -> Tensor:
    """The result of a collective that may still be running."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # a newer name that older releases lack
        return all_gather_tensor(tensor, 0, dist.group.WORLD)


def nested(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # for a prototype
        return torch.nested.nested_tensor(list(tensor))


def without_storage(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


SERVED: dict[str, Kind] = {
    "plain-subclass": lambda x: x.as_subclass(Plain),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "wrapper-subclass": Wrapper,
    "async-collective": gathered,
}
REFUSED: dict[str, Kind] = {
    "fake": FAKE.from_tensor,
    "meta": lambda x: x.to("meta"),
    "dtensor": lambda x: distribute_tensor(x, init_device_mesh("cpu", (1,)), [Replicate()]),
    "functional": torch._to_functional_tensor,
    "nested": nested,
    "jagged": lambda x: torch.nested.nested_tensor([x[:1], x], layout=torch.jagged),
    "sparse": lambda x: x.to_sparse(),
    "without-storage": without_storage,
}


def negated(tensor: Tensor) -> Tensor:
    """The same values, as a view that negates its memory."""
    return torch._neg_view(tensor.neg())


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of one rank, for collectives and DTensors."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made_of(call: FunctionCall, kind: Kind, names: list[str]) -> dict[str, Tensor]:
    return {name: kind(x) if name in names else x for name, x in call.tensors().items()}


def values(results: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.as_subclass(Tensor) if isinstance(x, Plain) else x for x in results]


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
@pytest.mark.parametrize("kind", SERVED)
@every_call
@torch.no_grad()
def test_a_kind_that_is_served_gives_the_same_bits(call: FunctionCall, kind: str, backend: str) -> None:
    expected_tensors = call.tensors()
    expected = call.run(expected_tensors, backend)
    for names in (*([name] for name in expected_tensors), list(expected_tensors)):
        given = made_of(call, SERVED[kind], names)
        for got, right in zip(values(call.run(given, backend)), expected, strict=True):
            assert torch.equal(got, right), names
        if kind != "async-collective":  # the result of a collective is not used as a cache
            for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
                if name in given:
                    held = given[name].inner if isinstance(given[name], Wrapper) else given[name].as_subclass(Tensor)
                    assert torch.equal(held, expected_tensors[name])


@pytest.mark.parametrize("kind", REFUSED)
@every_call
@torch.no_grad()
def test_a_kind_that_is_not_served_is_refused(call: FunctionCall, kind: str) -> None:
    for name, tensor in call.tensors().items():
        if kind in ("fake", "meta") and len(call.tensors()) == 1:
            continue  # all tensors are of that kind
        try:
            given = made_of(call, REFUSED[kind], [name])
        except RuntimeError:
            assert tensor.dim() < 2 or kind in ("nested", "jagged")  # torch makes no such tensor of them
            continue
        with pytest.raises(FastAttentionError) as refused:
            call.run(given, "auto")
        assert isinstance(refused.value, (ArgumentError, UnsupportedError))
        shown = {"qkv": ("q", "qkv"), "kv": ("k", "kv"), "cu_seqlens": ("cu_seqlens",)}.get(name, (name,))
        assert any(str(refused.value).find(one) >= 0 for one in shown), (name, str(refused.value))


@every_call
@torch.no_grad()
def test_a_view_that_negates_is_read_negated_and_never_written(call: FunctionCall) -> None:
    expected = call.run(call.tensors(), "auto")
    for name, tensor in call.tensors().items():
        if not tensor.dtype.is_floating_point:
            continue
        given = made_of(call, negated, [name])
        if name in ("k_cache", "v_cache", "k_scale", "v_scale"):
            before = given[name].clone()
            with pytest.raises(ArgumentError, match=f"{name} is a view that negates"):
                call.run(given, "auto")
            assert torch.equal(given[name], before)
        else:
            for got, right in zip(call.run(given, "auto"), expected, strict=True):
                assert torch.equal(got, right), name


def merged() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"outs[0]": (2, 5, 4, 8), "outs[1]": (2, 5, 4, 8), "lses[0]": (2, 4, 5), "lses[1]": (2, 4, 5)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def merge(tensors: dict[str, Tensor]) -> Tensor:
    first, second, first_lse, second_lse = tensors.values()
    return merge_attn_states([first, second], [first_lse, second_lse])[0]


@pytest.mark.parametrize("kind", [*SERVED, *REFUSED, "negated"])
def test_merges_serve_or_refuse(kind: str) -> None:
    expected = merge(merged())
    make = (SERVED | REFUSED | {"negated": negated})[kind]
    for name in merged():
        given = merged()
        given[name] = make(given[name])
        if kind in REFUSED:
            with pytest.raises(FastAttentionError):
                merge(given)
        else:
            assert torch.equal(values((merge(given),))[0], expected)


@pytest.mark.parametrize("store", [DenseKVStore, PackedKVStore])
@pytest.mark.parametrize("kind", SERVED | REFUSED)
@torch.no_grad()
def test_stores_serve_or_refuse_and_stay_as_they_were(kind: str, store: type[DenseKVStore | PackedKVStore]) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(2, 3, 2, 8, generator=generator) for name in ("q", "k", "v")}
    for name in tensors:
        expected = store(2, 8, 2, 8, dtype=torch.float32).attend(**tensors)
        held = store(2, 8, 2, 8, dtype=torch.float32)
        held.append(tensors["k"], tensors["v"])
        try:
            given = tensors | {name: (SERVED | REFUSED)[kind](tensors[name])}
            fresh = store(2, 8, 2, 8, dtype=torch.float32).attend(**given)
        except FastAttentionError:
            assert kind in REFUSED or store is PackedKVStore
            with pytest.raises(FastAttentionError):
                held.attend(**given)
            assert held.seqlens.tolist() == [3, 3]
        else:
            assert kind in SERVED
            assert torch.equal(values((fresh,))[0], expected)


def test_a_sum_over_ranks_refuses_by_name() -> None:
    from fastattention.distributed import attention_out_proj_allreduce

    tensors = {name: torch.randn(1, 4, 2, 8) for name in ("q", "k", "v")} | {"w_o": torch.randn(16, 16)}
    for kind, make in {**SERVED, **REFUSED}.items():
        if kind == "parameter":
            continue
        for name, tensor in tensors.items():
            with torch.no_grad(), pytest.raises(FastAttentionError, match=f"{name} (is|has|and)|(is|and) {name}"):
                attention_out_proj_allreduce(**(tensors | {name: make(tensor)}))
