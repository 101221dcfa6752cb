"""Calls of gated delta rules and Kimi delta attention: served as torch computes them, or left to the model."""

from __future__ import annotations

import functools
import logging
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tiers import slow
from transformers.models.qwen3_next import modeling_qwen3_next

from fastattention.errors import ArgumentError
from fastattention.integrations.transformers import linear_layers

from .calls import Calls, arguments, by_torch, modeling_of, names_of_models


@slow
@pytest.mark.parametrize("name", names_of_models("torch_chunk_gated_delta_rule"))
def test_every_model_with_gated_delta_rules_is_served(name: str, calls: Calls, warned: Mock) -> None:
    modeling_of(name).torch_chunk_gated_delta_rule(**arguments())
    modeling_of(name).torch_recurrent_gated_delta_rule(**arguments())
    assert calls.counts == (1, 1)
    assert not warned.called


@pytest.mark.parametrize("name", names_of_models("chunk_kimi_delta_attention"))
def test_every_model_with_kimi_delta_attention_is_served(name: str, calls: Calls, warned: Mock) -> None:
    given = arguments()
    given |= {name: given[name].repeat_interleave(2, dim=2) for name in ("query", "key")}
    given["g"] = given["g"][..., None].expand(-1, -1, -1, 8)
    ours = (
        modeling_of(name).chunk_kimi_delta_attention(**given),
        modeling_of(name).recurrent_kimi_delta_attention(initial_state=None, **given),
    )
    assert calls.counts == (1, 1)
    assert not warned.called
    for one, other in zip(*ours, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_refused_call_of_concatenated_sequences_warns_that_they_mix(warned: Mock) -> None:
    """Kimi-Linear passes on what models call the offsets, which torch's function ignores."""
    given = arguments(dtype=torch.float64) | {"cu_seq_lens_q": torch.tensor([0, 4, 9], dtype=torch.int32)}
    given["g"] = given["g"][..., None].expand(-1, -1, -1, 8)
    given |= {name: given[name].repeat_interleave(2, dim=2) for name in ("query", "key")}
    modeling_of("kimi_linear").chunk_kimi_delta_attention(**given)
    assert any("there, neighbouring sequences mix" in call.args[0] for call in warned.call_args_list)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (arguments(headdim=300), "a head dimension is 300; allowed are 1 to 256"),
        (arguments(dtype=torch.float64), "query is torch.float64"),
        (
            arguments() | {"value": arguments()["value"].half()},
            "query, key and value are torch.float32, torch.float32 and torch.float16",
        ),
    ],
    ids=["headdim", "float64", "mixed"],
)
@pytest.mark.parametrize("kind", Calls._fields)
def test_what_is_refused_is_computed_by_the_model_with_a_warning(
    kind: str, given: dict[str, Any], reason: str, calls: Calls, warned: Mock
) -> None:
    function = getattr(modeling_qwen3_next, f"torch_{kind}_gated_delta_rule")
    out, state = function(**given)
    assert calls.counts == (0, 0)
    assert any(reason in call.args[0] for call in warned.call_args_list)
    out_of_torch, state_of_torch = by_torch(lambda: function(**given))
    assert torch.equal(out, out_of_torch)
    assert torch.equal(state, state_of_torch)


def test_a_reason_is_given_once(caplog: pytest.LogCaptureFixture) -> None:
    given = arguments(headdim=301)
    with caplog.at_level(logging.WARNING, logger=linear_layers.__name__):
        for _ in range(2):
            modeling_qwen3_next.torch_chunk_gated_delta_rule(**given)
    assert sum("head dimension is 301" in record.message for record in caplog.records) == 1


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_call_gives_its_reason_too(warned: Mock) -> None:
    given = arguments(headdim=302)
    compiled = torch.compile(modeling_qwen3_next.torch_recurrent_gated_delta_rule, backend="eager", fullgraph=True)
    out, _ = compiled(**given)
    assert any("head dimension is 302" in call.args[0] for call in warned.call_args_list)
    assert torch.equal(out, by_torch(lambda: modeling_qwen3_next.torch_recurrent_gated_delta_rule(**given))[0])


@pytest.mark.parametrize("kind", Calls._fields)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_states_of_any_dtype_are_taken_and_float32_is_returned(kind: str, dtype: torch.dtype) -> None:
    state = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    given = arguments() | {"initial_state": state}
    function = getattr(modeling_qwen3_next, f"torch_{kind}_gated_delta_rule")
    ours, theirs = function(**given), by_torch(lambda: function(**given))
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype is other.dtype is torch.float32
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_arguments_may_be_positional() -> None:
    given = arguments()
    five = [given[name] for name in ("query", "key", "value", "g", "beta")]
    state = torch.ones(1, 4, 8, 8)
    for function, rest in (
        (modeling_qwen3_next.torch_chunk_gated_delta_rule, (16, state, True, True)),
        (modeling_qwen3_next.torch_recurrent_gated_delta_rule, (state, True, True)),
    ):
        ours, theirs = function(*five, *rest), by_torch(functools.partial(function, *five, *rest))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", Calls._fields)
def test_concatenated_sequences_are_kept_apart(kind: str, warned: Mock) -> None:
    function = getattr(modeling_qwen3_next, f"torch_{kind}_gated_delta_rule")
    first, second = arguments(5, seed=1), arguments(7, seed=2)
    both = {name: torch.cat([first[name], second[name]], dim=1) for name in ("query", "key", "value", "g", "beta")}
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    rows = {"seq_idx": torch.tensor([5 * [0] + 7 * [1]], dtype=torch.int32)}
    for sequences in ({"cu_seqlens": offsets}, {"cu_seq_lens_q": offsets}, rows):
        out, states = function(**first | both | sequences)
        for part, state, given in zip(out.split([5, 7], dim=1), states.split(1), (first, second), strict=True):
            wanted = function(**given)
            torch.testing.assert_close(part, wanted[0])
            torch.testing.assert_close(state, wanted[1])
    assert not warned.called
    with pytest.raises(ArgumentError, match="cu_seqlens"):
        function(**first | both | {"cu_seqlens": offsets + 1})
