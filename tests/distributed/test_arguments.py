"""Wrong arguments are refused by name before anything is communicated or written; a single rank needs no sum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from unit.refusals import Refusal, assert_refused, refusals, refused

from distributed.sums import Sum, check, run_part
from fastattention import ArgumentError, UnsupportedError, explain
from fastattention.distributed import (
    agreement,
    attention_out_proj_allreduce,
    attention_out_proj_allreduce_with_kvcache,
    object_collectives,
)
from fastattention.testing.case import DenseCase

HIDDEN = 10


@pytest.fixture
def not_alone(alone: None) -> Iterator[None]:
    """A group that seems to have two ranks: communicating fails the test."""
    silent = mock.Mock(side_effect=AssertionError("communicated"))
    with (
        mock.patch.object(dist, "get_world_size", return_value=2),
        mock.patch.object(agreement.Agreement, "of", silent),
        mock.patch.object(object_collectives.dist, "all_gather_object", silent),
    ):
        yield


def dense(**changes: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    shapes = {"q": (2, 6, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 5), "w_o": (HIDDEN, 20)}
    return {name: torch.randn(shape) for name, shape in shapes.items()} | changes


def cached(**changes: Any) -> dict[str, Any]:
    arguments = dense(cache_seqlens=torch.tensor([7, 6], dtype=torch.int32))
    return {{"k": "k_cache", "v": "v_cache"}.get(name, name): value for name, value in arguments.items()} | changes


WRONG = refusals(
    refused("w_o", "(any, 4 * 5 = 20)", "(10, 21)", w_o=torch.zeros(HIDDEN, 21)),
    refused("w_o", "(hidden, nheads * headdim_v)", "(20, 10)", w_o=torch.zeros(20, HIDDEN)),
    refused("w_o", "(10, 4, 5)", w_o=torch.zeros(HIDDEN, 4, 5)),
    refused("w_o", "bfloat16", "q has", w_o=torch.zeros(HIDDEN, 20, dtype=torch.bfloat16)),
    refused("w_o", "meta", "cpu", w_o=torch.zeros(HIDDEN, 20, device="meta")),
    refused("w_o", "torch.Tensor", "list", w_o=[1.0]),
    refused("bias", "(hidden) = (10,)", "(11,)", bias=torch.zeros(HIDDEN + 1)),
    refused("bias", "(10,)", "(2, 6, 10)", bias=torch.zeros(2, 6, HIDDEN), out=None),
    refused("bias", "float16", "float32", bias=torch.zeros(HIDDEN, dtype=torch.float16)),
    refused("bias", "torch.Tensor", "float", bias=1.0),
    refused("out", "(2, 6, 10)", "(2, 6, 11)", out=torch.zeros(2, 6, HIDDEN + 1)),
    refused("out", "float64", "float32", out=torch.zeros(2, 6, HIDDEN, dtype=torch.float64)),
    refused("out", "contiguous", "(60, 1, 6)", out=torch.zeros(2, HIDDEN, 6).mT),
    refused("partition='fast'", '"auto"', partition="fast"),
    refused("partition=12", '"auto"', "sequence", partition=12),
    refused("partition=[6, 5]", "batch_size * seqlen_q = 12", "11", partition=[6, 5]),
    refused("partition=[12, 0]", "positive", partition=[12, 0]),
    refused("partition=[13, -1]", "positive", partition=[13, -1]),
    refused("partition=[]", "12", partition=[]),
    refused("partition", "integers", "6.0", partition=[6.0, 6.0]),
    refused("partition", "row 9", "seqlen_q=6", partition=[6, 3, 3], alibi_slopes=torch.ones(4)),
    refused("transport='pigeon'", "'auto'", "'c10d', 'ring_product', 'pe", transport="pigeon"),
    refused("transport=['c10d']", "'auto'", transport=["c10d"]),
    refused("backend='abacus'", "'auto'", backend="abacus"),
    refused("backend=['cpu']", "'auto'", backend=["cpu"]),
    refused("group", "ProcessGroup", "str", group="tp"),
    refused("group", "this rank is in", "int", group=dist.GroupMember.NON_GROUP_MEMBER),
    refused("softcap=-1.0", softcap=-1.0),
    refused("gradient", "torch.no_grad()", q=torch.zeros(2, 6, 4, 8, requires_grad=True)),
    refused("gradient", "torch.no_grad()", w_o=torch.zeros(HIDDEN, 20, requires_grad=True)),
    refused("gradient", "torch.no_grad()", out=torch.zeros(2, 6, HIDDEN, requires_grad=True)),
    refused("gradient", "torch.no_grad()", bias=torch.zeros(HIDDEN, requires_grad=True)),
)


@WRONG
def test_dense_refuses(not_alone: None, refusal: Refusal) -> None:
    out = torch.full((2, 6, HIDDEN), 7.0)
    assert_refused(lambda: attention_out_proj_allreduce(**(dense(out=out) | refusal.changes)), refusal)
    assert (out == 7.0).all()


@WRONG
def test_explaining_refuses(not_alone: None, refusal: Refusal) -> None:
    assert_refused(lambda: explain(**dense(**refusal.changes), function=attention_out_proj_allreduce), refusal)


def test_explaining_communicates_nothing(not_alone: None) -> None:
    assert explain(**dense(), function=attention_out_proj_allreduce).backend == "cpu"


@WRONG
def test_with_kvcache_refuses(not_alone: None, refusal: Refusal) -> None:
    assert_refused(lambda: attention_out_proj_allreduce_with_kvcache(**cached(**refusal.changes)), refusal)


@refusals(
    refused("v has seqlen_k 8", "k has 7", v=torch.zeros(2, 8, 2, 5)),
    refused("nheads=4", "nheads_k=3", k=torch.zeros(2, 7, 3, 8), v=torch.zeros(2, 7, 3, 5)),
    refused("q must be a torch.Tensor", q=None),
    refused(
        "q is Tensor on meta",
        "plain tensor that holds data",
        **{name: value.to("meta") for name, value in dense().items()},
    ),
)
def test_arguments_of_attention_are_refused_as_ever(not_alone: None, refusal: Refusal) -> None:
    assert_refused(lambda: attention_out_proj_allreduce(**dense(**refusal.changes)), refusal)


def test_lengths_of_a_cache_are_refused_as_ever(not_alone: None) -> None:
    with pytest.raises(ArgumentError, match=r"cache_seqlens\[1\]=8 is out of range"):
        attention_out_proj_allreduce_with_kvcache(**cached(cache_seqlens=torch.tensor([7, 8], dtype=torch.int32)))


def test_a_call_that_no_backend_serves_is_refused_before_it_communicates(not_alone: None) -> None:
    with pytest.raises(UnsupportedError, match="cuda:"):
        attention_out_proj_allreduce(**dense(backend="cuda"))


def test_without_torch_distributed_the_error_says_what_to_do() -> None:
    with pytest.raises(ArgumentError, match="is not initialized; call init_process_group first"):
        attention_out_proj_allreduce(**dense())


def test_a_group_that_has_been_destroyed_is_refused(alone: None) -> None:
    group = dist.new_group([0])
    dist.destroy_process_group(group)
    with pytest.raises(ArgumentError, match=r"group has been destroyed; .*, or None after init_process_group"):
        attention_out_proj_allreduce(**dense(group=group))


def test_a_group_without_a_backend_for_the_device_is_refused_at_once(alone: None) -> None:
    silent = mock.Mock(side_effect=AssertionError("communicated"))
    with (
        mock.patch.object(dist, "get_world_size", return_value=2),
        mock.patch.object(dist.ProcessGroup, "_get_backend", side_effect=RuntimeError("none")),
        mock.patch.object(object_collectives.dist, "all_gather_object", silent),
        pytest.raises(ArgumentError, match="group has no backend for tensors on cpu; its backends are cpu:gloo"),
    ):
        attention_out_proj_allreduce(**dense())


def test_fake_tensors_of_a_gpu_are_refused_where_there_is_none(not_alone: None) -> None:
    with FakeTensorMode():
        fakes = {name: torch.empty(value.shape, device="cuda") for name, value in dense().items()}
    with pytest.raises(ArgumentError, match="q is FakeTensor on cuda:0"):
        attention_out_proj_allreduce(**fakes)


@pytest.mark.parametrize("partition", ["auto", [5, 7]], ids=["auto", "given"])
def test_a_single_rank_computes_alone(alone: None, partition: Any) -> None:
    one = Sum(DenseCase(name="alone", batch_size=2, seqlen_q=6, seqlen_k=9, causal=True), partition, bias=True)
    check(one, [run_part(one)])


def test_parameters_are_welcome_where_no_gradient_is_recorded(alone: None) -> None:
    weight = torch.nn.Parameter(dense()["w_o"])
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            out = attention_out_proj_allreduce(**dense(w_o=weight))
        assert not out.requires_grad


@pytest.mark.parametrize(("batch_size", "seqlen_q"), [(0, 6), (2, 0)])
def test_no_rows_need_no_sum(not_alone: None, batch_size: int, seqlen_q: int) -> None:
    arguments = dense(bias=torch.ones(HIDDEN))
    empty = {name: arguments[name][:batch_size] for name in ("k", "v")} | {"q": arguments["q"][:batch_size, :seqlen_q]}
    for partition in ("auto", []):
        out = attention_out_proj_allreduce(**arguments | empty, partition=partition)
        assert out.shape == (batch_size, seqlen_q, HIDDEN)
