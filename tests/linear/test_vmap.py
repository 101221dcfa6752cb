"""torch.vmap over linear attention: one call for all indices of the mapped axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from conformance.mapped import check_mapped
from torch import Tensor
from torch.testing import assert_close

from fastattention import ArgumentError
from fastattention.linear import (
    chunk_gated_delta_rule,
    chunk_kda,
    chunk_ssd,
    recurrent_gla,
    recurrent_kda,
    recurrent_ssd,
)
from fastattention.linear.operator import LINEAR_ATTENTION
from fastattention.linear.problem import LinearInputs
from fastattention.testing.linear import LinearCase

SEQLENS = {"dense": None, "varlen": (3, 0, 6)}
OFFSETS = [[0, 3, 3, 9], [0, 9, 9, 9], [0, 1, 4, 9]]

every_form = pytest.mark.parametrize("chunked", [True, False], ids=["chunks", "tokens"])
every_rule = pytest.mark.parametrize("rule", ["delta", "head", "key", "kda", "ssd"])


def case_of(rule: str, layout: str) -> LinearCase:
    return LinearCase(
        rule, batch_size=2, seqlen=9, seqlens=SEQLENS[layout], nheads=4, headdim_k=8, headdim_v=6, initial_state=True
    )


def stacked(name: str, tensor: Tensor) -> Tensor:
    """A different tensor for each of three indices, valid for its argument."""
    if name == "cu_seqlens":
        return torch.tensor(OFFSETS, dtype=torch.int32)
    return torch.stack([tensor, tensor.flip(0), tensor / 2])


@every_form
@every_rule
@pytest.mark.parametrize("layout", SEQLENS)
def test_vmap_of_any_tensor_is_one_call(rule: str, chunked: bool, layout: str) -> None:
    case = case_of(rule, layout)
    inputs = case.tensors(torch.float32)
    given = {name: x for name, x in inputs._asdict().items() if x is not None}

    def call(**tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, state = LINEAR_ATTENTION(LinearInputs(**tensors), case.options(chunked), "auto")
        return out, state

    values = [{"q", "k", "v"}, {"q", "k", "v", "g", "initial_state"}]
    for names in [{name} for name in given] + values + [given.keys() - {"skip"}, given.keys() - {"cu_seqlens"}]:
        check_mapped(
            LINEAR_ATTENTION, call, given, {name: stacked(name, given[name]) for name in given if name in names}
        )


def test_vmap_of_offsets_and_of_what_joins_the_heads_is_a_call_for_each_index() -> None:
    case = case_of("ssd", "varlen")
    given = case.tensors(torch.float32)._asdict()
    mapped = {name: stacked(name, given[name]) for name in ("cu_seqlens", "skip")}
    check_mapped(
        LINEAR_ATTENTION, lambda **x: LINEAR_ATTENTION(LinearInputs(**x), case.options(True), "auto"), given, mapped, 3
    )


@pytest.mark.parametrize("function", [chunk_kda, recurrent_kda])
@pytest.mark.parametrize("names", [("A_log",), ("dt_bias",), ("A_log", "dt_bias", "g", "initial_state")], ids=" ".join)
def test_vmap_of_gate_parameters_is_one_call(function: Callable[..., Any], names: tuple[str, ...]) -> None:
    q, k, v, g, beta, state, *_ = case_of("kda", "dense").tensors(torch.float32)
    q, k = (x.repeat_interleave(2, dim=2) for x in (q, k))
    assert state is not None
    given = {
        "q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": torch.randn(4), "dt_bias": torch.randn(4, 8),
        "initial_state": state.mT.contiguous(),
    }  # fmt: skip

    def call(**tensors: Tensor) -> Any:
        return function(
            **tensors, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            output_final_state=True, state_v_first=True,
        )  # fmt: skip

    check_mapped(LINEAR_ATTENTION, call, given, {name: stacked(name, given[name]) for name in names})


@pytest.mark.parametrize("function", [chunk_ssd, recurrent_ssd])
@pytest.mark.parametrize(
    "names", [("A",), ("D",), ("dt_bias",), ("x", "dt", "A", "B", "C", "D", "dt_bias")], ids=" ".join
)
def test_vmap_of_mamba_parameters_is_one_call(function: Callable[..., Any], names: tuple[str, ...]) -> None:
    given = {
        "x": torch.randn(2, 9, 4, 6), "dt": torch.randn(2, 9, 4), "A": -torch.rand(4), "B": torch.randn(2, 9, 2, 8),
        "C": torch.randn(2, 9, 2, 8), "D": torch.randn(4), "dt_bias": torch.randn(4),
        "initial_state": torch.randn(2, 4, 6, 8),
    }  # fmt: skip

    def call(**tensors: Tensor) -> Any:
        return function(**tensors, dt_softplus=True, output_final_state=True)

    check_mapped(LINEAR_ATTENTION, call, given, {name: stacked(name, given[name]) for name in names})


def test_vmap_of_another_axis_and_within_vmap_is_one_call() -> None:
    q, v, g = torch.randn(2, 9, 4, 8, 5), torch.randn(2, 3, 5, 9, 4, 6), -torch.rand(2, 9, 4)

    def call(q: Tensor, v: Tensor) -> Any:
        return recurrent_gla(q, q, v, g, output_final_state=True)

    alone = [[call(q[..., i], v[:, j, i]) for j in range(3)] for i in range(5)]
    with mock.patch.object(LINEAR_ATTENTION, "plan", wraps=LINEAR_ATTENTION.plan) as plan:
        out, state = torch.vmap(torch.vmap(call, in_dims=(None, 1)), in_dims=(4, 2), out_dims=1)(q, v)
    assert plan.call_count == 1
    assert_close(out, torch.stack([torch.stack([one for one, _ in row]) for row in alone], dim=1))
    assert_close(state, torch.stack([torch.stack([one for _, one in row]) for row in alone], dim=1))


@pytest.mark.parametrize("wrong", [[0, 3, 3, 8], [1, 3, 3, 9], [0, 4, 3, 9]], ids=["short", "late", "falling"])
@pytest.mark.parametrize("index", [0, 1, None], ids=["first", "second", "every"])
def test_wrong_offsets_of_an_index_are_an_error(wrong: list[int], index: int | None) -> None:
    case = case_of("delta", "varlen")
    inputs = case.tensors(torch.float32)
    right = [0, 3, 3, 9]
    rows = torch.tensor([wrong if index in (i, None) else right for i in range(3)])
    v = stacked("v", inputs.v)

    def call(v: Tensor, offsets: Tensor) -> Any:
        given = inputs._replace(v=v, cu_seqlens=offsets)
        return LINEAR_ATTENTION(given, case.options(True), "auto")

    with pytest.raises(ArgumentError, match=r"cu_seqlens=\[.* must rise from 0 to the number of tokens, 27"):
        torch.vmap(call)(v, rows)
    if index is None:
        with pytest.raises(ArgumentError, match=r"cu_seqlens=\[.* must rise from 0 to the number of tokens, 27"):
            torch.vmap(lambda v: call(v, rows[0]))(v)


def test_gradients_through_vmap_are_those_of_a_loop() -> None:
    inputs = case_of("delta", "dense").tensors(torch.float32)
    assert inputs.beta is not None
    leaves = [x.requires_grad_() for x in (stacked("v", inputs.v), inputs.k, stacked("beta", inputs.beta))]
    v, k, beta = leaves

    def loss(v: Tensor, beta: Tensor) -> Tensor:
        return chunk_gated_delta_rule(inputs.q, k, v, inputs.g, beta, use_qk_l2norm_in_kernel=True)[0].square().sum()

    found, wanted = (
        torch.autograd.grad(losses.sum(), leaves)
        for losses in (torch.vmap(loss)(v, beta), torch.stack([loss(*pair) for pair in zip(v, beta, strict=True)]))
    )
    assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"q": torch.zeros(3)}, "q must be"),
        ({"v": torch.zeros(3, 1, 9, 4)}, "v must be"),
        ({"cu_seqlens": torch.zeros(3, dtype=torch.int32)}, "cu_seqlens must be"),
        ({"initial_state": torch.zeros(3, 4)}, "initial_state must be"),
    ],
    ids=["q", "v", "offsets", "state"],
)
def test_mapped_tensors_of_wrong_ranks_are_named(wrong: dict[str, Tensor], reason: str) -> None:
    case = case_of("delta", "varlen")
    given = {name: x for name, x in case.tensors(torch.float32)._asdict().items() if name not in wrong}
    with pytest.raises(ArgumentError, match=reason):
        torch.vmap(lambda wrong: LINEAR_ATTENTION(LinearInputs(**given, **wrong), case.options(True), "auto"))(wrong)
