"""Calls of the causal convolution in front of linear layers: served as torch computes them, or left to the model."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next

from .calls import by_torch, modeling_of, names_of_models


def arguments_of_convolution(**changed: Any) -> dict[str, Any]:
    """Arguments of a convolution of 12 tokens, as models give them: 6 channels, four weights each."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((1, 12, 6), (6, 4), (6,)))
    return {"hidden_states": x.transpose(1, 2), "weight": weight, "bias": bias, "activation": "silu"} | changed


@pytest.mark.parametrize("name", names_of_models("causal_conv1d_fn"))
def test_every_causal_convolution_is_served(name: str, warned: Mock) -> None:
    modeling, given = modeling_of(name), arguments_of_convolution()
    torch.testing.assert_close(
        modeling.causal_conv1d_fn(**given), by_torch(lambda: modeling.causal_conv1d_fn(**given)), rtol=1e-5, atol=1e-5
    )
    states = [torch.linspace(-1, 1, 24).reshape(1, 6, 4) for _ in range(2)]
    tokens = [given | {"hidden_states": given["hidden_states"][..., :1], "conv_state": state} for state in states]
    warned.reset_mock()
    ours = modeling.causal_conv1d_update(**tokens[0])
    assert not warned.called
    torch.testing.assert_close(ours, by_torch(lambda: modeling.causal_conv1d_update(**tokens[1])), rtol=1e-5, atol=1e-5)
    assert torch.equal(*states)


@pytest.mark.parametrize(
    "sequences",
    [
        {"cu_seq_lens_q": torch.tensor([0, 5, 12], dtype=torch.int32)},
        {"seq_idx": torch.tensor([5 * [0] + 7 * [1]], dtype=torch.int32)},
    ],
    ids=["cu_seq_lens_q", "seq_idx"],
)
def test_a_convolution_keeps_concatenated_sequences_apart(sequences: dict[str, Tensor], warned: Mock) -> None:
    given = arguments_of_convolution()
    out = modeling_qwen3_next.causal_conv1d_fn(**given, **sequences)
    for part, x in zip(*(x.split([5, 7], dim=-1) for x in (out, given["hidden_states"])), strict=True):
        torch.testing.assert_close(part, modeling_qwen3_next.causal_conv1d_fn(**given | {"hidden_states": x}))
    assert not warned.called


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"weight": torch.ones(6, 5)}, "leaves a causal convolution to the model itself: a filter has 5 weights"),
        ({"activation": "gelu"}, "activation='gelu'; allowed are None, 'silu' and 'swish'"),
        (
            {"activation": "gelu", "cu_seq_lens_q": torch.tensor([0, 5, 12], dtype=torch.int32)},
            "there, neighbouring sequences mix",
        ),
    ],
    ids=["width", "activation", "sequences"],
)
def test_a_convolution_that_is_refused_is_computed_by_the_model(
    changed: dict[str, Any], reason: str, warned: Mock
) -> None:
    given = arguments_of_convolution(**changed)
    out = modeling_qwen3_next.causal_conv1d_fn(**given)
    assert any(reason in call.args[0] for call in warned.call_args_list)
    assert torch.equal(out, by_torch(lambda: modeling_qwen3_next.causal_conv1d_fn(**given)))


def test_sequences_in_several_rows_are_refused(warned: Mock) -> None:
    """Transformers raises, as its own function cannot keep them apart."""
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        modeling_qwen3_next.causal_conv1d_fn(**arguments_of_convolution(seq_idx=torch.zeros(2, 12)))
    assert any("seq_idx has 2 rows" in call.args[0] for call in warned.call_args_list)


def test_a_token_of_a_convolution_with_gradients_is_left_to_the_model(warned: Mock) -> None:
    given = arguments_of_convolution()
    given["weight"].requires_grad_()
    given["hidden_states"] = given["hidden_states"][..., :1]
    out = modeling_qwen3_next.causal_conv1d_update(**given, conv_state=torch.zeros(1, 6, 4))
    assert out.requires_grad
    assert any("a token is decoded with gradients" in call.args[0] for call in warned.call_args_list)
