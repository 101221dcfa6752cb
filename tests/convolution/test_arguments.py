"""Refusals of the causal convolution, and their messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastattention import ArgumentError, UnsupportedError, explain
from fastattention.convolution import causal_conv1d, causal_conv1d_update

X = torch.zeros(2, 5, 8)
WEIGHT = torch.zeros(8, 4)
STATE = torch.zeros(2, 8, 3)
OFFSETS = torch.tensor([0, 2, 5], dtype=torch.int32)

# What both functions refuse.
OF_BOTH: dict[str, tuple[dict[str, Any], str]] = {
    "x-no-tensor": ({"x": 3}, r"x must be a torch.Tensor, got int"),
    "x-rank": ({"x": X[0]}, r"x must be \(batch_size, seqlen, channels\), got shape \(5, 8\)"),
    "x-dtype": ({"x": X.double()}, r"x has dtype torch.float64; allowed are float16, bfloat16, float32"),
    "weight-no-tensor": ({"weight": None}, r"weight must be a torch.Tensor, got NoneType"),
    "weight-rank": ({"weight": WEIGHT[0]}, r"weight must be \(channels, width\), got shape \(4,\)"),
    "weight-of-conv1d": ({"weight": WEIGHT[:, None]}, r"got shape \(8, 1, 4\); give weight.squeeze\(1\)"),
    "weight-channels": ({"weight": WEIGHT[1:]}, r"weight must have the channels of x, 8, got shape \(7, 4\)"),
    "weight-dtype": ({"weight": WEIGHT.double()}, r"weight must be float32, float16 or bfloat16, got torch.float64"),
    "width": ({"weight": torch.zeros(8, 5)}, r"width=5 is not supported; allowed are 2 to 4"),
    "bias-shape": ({"bias": WEIGHT[1:, 0]}, r"bias must be \(channels,\) = \(8,\), got shape \(7,\)"),
    "bias-dtype": ({"bias": WEIGHT[:, 0].int()}, r"bias must be float32, float16 or bfloat16, got torch.int32"),
    "bias-device": (
        {"bias": WEIGHT[:, 0].to("meta")},
        r"bias is on meta and x on cpu; they must be on the same device",
    ),
    "activation": ({"activation": "gelu"}, r"activation='gelu' is not known; choose None, 'silu' or 'swish'"),
    "activation-type": ({"activation": True}, r"activation=True is not known"),
    "backend": ({"backend": "cdpu"}, r"backend='cdpu' is not known; choose 'auto' or one of .*'cpu', 'torch'"),
}
OF_CONVOLUTION: dict[str, tuple[dict[str, Any], str]] = {
    "flag": ({"output_final_state": 2}, r"output_final_state must be True or False, got 2"),
    "state-shape": (
        {"initial_state": STATE[:1]},
        r"initial_state must be .* = \(2, 8, 3\), got shape \(1, 8, 3\)",
    ),
    "state-dtype": (
        {"initial_state": STATE.half()},
        r"initial_state must have the dtype of x, torch.float32, got torch.float16",
    ),
    "offsets-batch": ({"cu_seqlens": OFFSETS}, r"with cu_seqlens x must have batch_size 1.*got 2"),
    "offsets-dtype": ({"x": X[:1], "cu_seqlens": OFFSETS.float()}, r"cu_seqlens must be int32 or int64"),
    "offsets-end": ({"x": X[:1], "cu_seqlens": OFFSETS[:2]}, r"cu_seqlens=\[0, 2\] must rise from 0 to .*, 5"),
}
OF_UPDATE: dict[str, tuple[dict[str, Any], str]] = {
    "state-no-tensor": ({"state": None}, r"state must be a torch.Tensor, got NoneType"),
    "state-rank": ({"state": STATE[0]}, r"state must be \(batch_size, channels, state_len\), got shape \(8, 3\)"),
    "state-batch": (
        {"state": STATE[:1]},
        r"state must have the batch_size and channels of x, \(2, 8\), got shape \(1, 8, 3\)",
    ),
    "state-short": ({"state": STATE[..., :2]}, r"state_len=2 of state must be at least width - 1 = 3"),
    "state-dtype": (
        {"state": STATE.half()},
        r"state must have the dtype of x, torch.float32, or float32, got torch.float16",
    ),
    "state-expanded": (
        {"state": STATE[:1].expand(2, 8, 3)},
        r"state has shape \(2, 8, 3\) and strides \(0, 3, 1\), whose elements share memory",
    ),
    "state-overlaps": ({"state": STATE.as_strided((2, 8, 3), (8, 1, 1))}, r"state has .* whose elements share memory"),
}


@pytest.mark.parametrize("name", [*OF_BOTH, *OF_CONVOLUTION])
def test_an_error_of_the_convolution_names_the_argument(name: str) -> None:
    changes, message = (OF_BOTH | OF_CONVOLUTION)[name]
    with pytest.raises(ArgumentError, match=message):
        causal_conv1d(**{"x": X, "weight": WEIGHT} | changes)


@pytest.mark.parametrize("name", [*OF_BOTH, *OF_UPDATE])
def test_an_error_of_an_update_names_the_argument(name: str) -> None:
    changes, message = (OF_BOTH | OF_UPDATE)[name]
    with pytest.raises(ArgumentError, match=message):
        causal_conv1d_update(**{"x": X, "state": STATE, "weight": WEIGHT} | changes)


def test_offsets_are_checked_in_every_call() -> None:
    """Calls with a cached plan check them too."""
    causal_conv1d(X[:1], WEIGHT, cu_seqlens=OFFSETS)
    with pytest.raises(ArgumentError, match="must rise from 0"):
        causal_conv1d(X[:1], WEIGHT, cu_seqlens=torch.tensor([0, 3, 4], dtype=torch.int32))


def test_a_state_that_is_refused_is_not_written() -> None:
    state = torch.ones(1, 8, 3)
    for backend in ("auto", "torch"):
        with pytest.raises(ArgumentError, match="share memory"):
            causal_conv1d_update(X, state.expand(2, 8, 3), WEIGHT, backend=backend)
    assert torch.equal(state, torch.ones(1, 8, 3))


@pytest.mark.parametrize("name", ["x", "state", "weight"])
def test_an_update_has_no_gradients(name: str) -> None:
    given = {"x": X, "state": STATE, "weight": WEIGHT}
    given[name] = given[name].clone().requires_grad_()
    for call in (causal_conv1d_update, torch.compile(causal_conv1d_update, backend="eager")):
        with pytest.raises(UnsupportedError, match="causal_conv1d_update has no backward"):
            call(**given)
    with torch.no_grad():
        assert causal_conv1d_update(**given).shape == X.shape


@pytest.mark.parametrize(
    ("name", "advice"),
    [("initial_states", "give initial_state"), ("return_final_states", "give output_final_state"),
     ("seq_idx", "give cu_seqlens")],
)  # fmt: skip
def test_arguments_of_causal_conv1d_are_answered_by_ours(name: str, advice: str) -> None:
    wrong: dict[str, Any] = {name: None}
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'; {advice}"):
        causal_conv1d(X, WEIGHT, **wrong)


def test_explain_lists_backends_with_reasons() -> None:
    explanation = explain(X.clone().requires_grad_(), WEIGHT, function=causal_conv1d)
    assert explanation.backend == "cpu"
    assert "batch_size=2, seqlen=5, channels=8, width=4" in str(explanation)
    update = explain(X, STATE.clone().requires_grad_(), WEIGHT, function=causal_conv1d_update)
    assert update.backend is None
    assert str(update).count("causal_conv1d_update has no backward") >= 2
