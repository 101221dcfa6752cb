"""Refusals of linear attention, and their messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastattention import ArgumentError, UnsupportedError, explain
from fastattention.linear import (
    chunk_gated_delta_rule,
    chunk_gla,
    chunk_kda,
    recurrent_gated_delta_rule,
    recurrent_gla,
    recurrent_kda,
)

Q = torch.zeros(2, 5, 2, 8)
V = torch.zeros(2, 5, 4, 16)
G = torch.zeros(2, 5, 4)
STATE = torch.zeros(2, 4, 8, 16)
OFFSETS = torch.tensor([0, 2, 5], dtype=torch.int32)
ROW = {"q": Q[:1], "k": Q[:1], "v": V[:1], "g": G[:1], "beta": G[:1]}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "q-no-tensor": ({"q": 3}, r"q must be a torch.Tensor, got int"),
    "q-rank": ({"q": Q[0]}, r"q must be \(batch_size, seqlen, nheads_k, headdim_k\), got shape \(5, 2, 8\)"),
    "q-dtype": ({"q": Q.double()}, r"q has dtype torch.float64; allowed are float16, bfloat16, float32"),
    "k-shape": ({"k": Q[:, :4]}, r"k must be .* = \(2, 5, 2, 8\), got shape \(2, 4, 2, 8\)"),
    "k-dtype": ({"k": Q.half()}, r"k has dtype torch.float16 and q has torch.float32"),
    "v-rank": ({"v": V[0]}, r"v must be \(batch_size, seqlen, nheads, headdim_v\)"),
    "v-tokens": ({"v": V[:, :4]}, r"v must have the batch_size and seqlen of q, \(2, 5\), got shape \(2, 4, 4, 16\)"),
    "v-heads": ({"v": V[:, :, :3]}, r"nheads=3 of v must be a positive multiple of nheads_k=2 of q"),
    "v-device": ({"v": V.to("meta")}, r"v is on meta and q on cpu"),
    "headdim": (
        {"v": torch.zeros(2, 5, 4, 257)},
        r"headdim_v=257 is not supported; allowed are 1 to 256",
    ),
    "g-shape": ({"g": G[..., :2]}, r"g must be \(batch_size, seqlen, nheads\) = \(2, 5, 4\), got shape \(2, 5, 2\)"),
    "g-dtype": ({"g": G.double()}, r"g must be float32, float16 or bfloat16, got torch.float64"),
    "beta-missing": ({"beta": None}, r"beta must be a torch.Tensor, got NoneType"),
    "beta-shape": ({"beta": G[:, :1]}, r"beta must be \(batch_size, seqlen, nheads\)"),
    "state-shape": (
        {"initial_state": STATE[:1]},
        r"initial_state must be .* = \(2, 4, 8, 16\), got shape \(1, 4, 8, 16\)",
    ),
    "state-dtype": ({"initial_state": STATE.half()}, r"initial_state must be float32, got torch.float16"),
    "state-no-tensor": ({"initial_state": 1, "state_v_first": True}, r"initial_state must be a torch.Tensor, got int"),
    "scale": ({"scale": "x"}, r"scale must be a number, got 'x'"),
    "scale-infinite": ({"scale": float("inf")}, r"scale=inf must be finite"),
    "flag": ({"output_final_state": 2}, r"output_final_state must be True or False, got 2"),
    "l2norm": ({"use_qk_l2norm_in_kernel": "yes"}, r"use_qk_l2norm_in_kernel must be True or False, got 'yes'"),
    "doubled": ({"allow_neg_eigval": True}, r"allow_neg_eigval takes use_beta_sigmoid_in_kernel=True"),
    "offsets-batch": ({"cu_seqlens": OFFSETS}, r"with cu_seqlens q must have batch_size 1.*got 2"),
    "offsets-dtype": ({**ROW, "cu_seqlens": OFFSETS.float()}, r"cu_seqlens must be int32 or int64, got torch.float32"),
    "offsets-rank": ({**ROW, "cu_seqlens": OFFSETS[None]}, r"cu_seqlens must be \(num_sequences \+ 1,\)"),
    "offsets-end": (
        {**ROW, "cu_seqlens": OFFSETS[:2]},
        r"cu_seqlens=\[0, 2\] must rise from 0 to the number of tokens, 5",
    ),
    "offsets-fall": ({**ROW, "cu_seqlens": torch.tensor([0, 6, 5])}, r"must rise from 0 to the number of tokens, 5"),
    "state-v-first": (
        {"initial_state": STATE, "state_v_first": True},
        r"initial_state must be .*, headdim_v, headdim_k\) = \(2, 4, 16, 8\), got shape \(2, 4, 8, 16\)",
    ),
    "state-v-first-rank": (
        {"initial_state": STATE[0, 0, 0], "state_v_first": True},
        r"initial_state must be .* = \(2, 4, 16, 8\), got shape \(16,\)",
    ),
    "state-v-first-dtype": (
        {"initial_state": STATE.mT.half(), "state_v_first": True},
        r"initial_state must be float32, got torch.float16",
    ),
    "logits-dtype": (
        {"beta": G.long(), "use_beta_sigmoid_in_kernel": True},
        r"beta must be float32, float16 or bfloat16, got torch.int64",
    ),
    "logits-layout": (
        {"beta": G.to_sparse(), "use_beta_sigmoid_in_kernel": True},
        r"beta has layout torch.sparse_coo; it must be torch.strided",
    ),
    "nested": (
        {"v": torch.nested.nested_tensor([V[0], V[1]], layout=torch.jagged)},
        r"v is a nested tensor",
    ),
    "backend-list": ({"backend": ["cpu"]}, r"backend=\['cpu'\] is not known; choose 'auto' or one of"),
    "backend": ({"backend": "cdpu"}, r"backend='cdpu' is not known; choose 'auto' or one of .*'cpu', 'torch'"),
}


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, recurrent_gated_delta_rule])
@pytest.mark.parametrize("name", REFUSED)
def test_an_error_names_the_argument(name: str, function: Any) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=message):
        function(**{"q": Q, "k": Q, "v": V, "g": G, "beta": G} | changes)


KEY_GATES = torch.zeros(2, 5, 4, 8)
REFUSED_BY_KDA: dict[str, tuple[dict[str, Any], str]] = {
    "g-of-heads": (
        {"g": G},
        r"g must be \(batch_size, seqlen, nheads, headdim_k\) = \(2, 5, 4, 8\), got shape \(2, 5, 4\)",
    ),
    "beta": ({"beta": None}, r"beta must be a torch.Tensor, got NoneType"),
    "rate-alone": ({"A_log": torch.zeros(4)}, r"A_log, dt_bias and lower_bound take use_gate_in_kernel=True"),
    "flag": ({"use_gate_in_kernel": 1.5}, r"use_gate_in_kernel must be True or False, got 1.5"),
    "no-rate": (
        {"use_gate_in_kernel": True},
        r"A_log must be a torch.Tensor \(nheads,\) without lower_bound, got None",
    ),
    "rate-shape": (
        {"use_gate_in_kernel": True, "A_log": torch.zeros(2)},
        r"A_log must be \(nheads,\) = \(4,\), or flat, got shape \(2,\)",
    ),
    "bias-shape": (
        {"use_gate_in_kernel": True, "lower_bound": -5.0, "dt_bias": torch.zeros(8)},
        r"dt_bias must be \(nheads, headdim_k\) = \(4, 8\), or flat, got shape \(8,\)",
    ),
    "bias-dtype": (
        {"use_gate_in_kernel": True, "lower_bound": -5.0, "dt_bias": torch.zeros(32).double()},
        r"dt_bias must be float32, float16 or bfloat16, got torch.float64",
    ),
    "bound": ({"use_gate_in_kernel": True, "lower_bound": 5.0}, r"lower_bound=5.0 must be negative and finite"),
    "raw-g-shape": (
        {"use_gate_in_kernel": True, "lower_bound": -5.0, "g": G},
        r"g must be .* = \(2, 5, 4, 8\), got shape \(2, 5, 4\)",
    ),
}


@pytest.mark.parametrize("function", [chunk_kda, recurrent_kda])
@pytest.mark.parametrize("name", REFUSED_BY_KDA)
def test_an_error_of_kda_names_the_argument(name: str, function: Any) -> None:
    changes, message = REFUSED_BY_KDA[name]
    with pytest.raises(ArgumentError, match=message):
        function(**{"q": Q, "k": Q, "v": V, "g": KEY_GATES, "beta": G} | changes)


@pytest.mark.parametrize("function", [chunk_gla, recurrent_gla])
def test_gates_of_gla_are_of_heads_or_of_keys(function: Any) -> None:
    for g in (G, torch.zeros(2, 5, 4, 8)):
        assert function(Q, Q, V, g)[0].shape == V.shape
    with pytest.raises(
        ArgumentError, match=r"g must be .* = \(2, 5, 4, 8\) or, .* = \(2, 5, 4\), got shape \(2, 5, 4, 7\)"
    ):
        function(Q, Q, V, torch.zeros(2, 5, 4, 7))


def test_offsets_are_checked_in_every_call() -> None:
    """Calls with a cached plan check them too."""
    arguments = {**ROW, "cu_seqlens": OFFSETS}
    chunk_gated_delta_rule(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="must rise from 0"):
        chunk_gated_delta_rule(**{**arguments, "cu_seqlens": torch.tensor([0, 3, 4], dtype=torch.int32)})  # type: ignore[arg-type]


def test_sigmoid_and_doubling_of_beta() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(x.shape, generator=generator) for x in (Q, Q, V))
    logits = torch.randn(G.shape, generator=generator)
    for doubled in (False, True):
        beta = logits.sigmoid() * (2 if doubled else 1)
        wanted, _ = chunk_gated_delta_rule(q, k, v, G, beta, use_qk_l2norm_in_kernel=True)
        out, _ = chunk_gated_delta_rule(
            q, k, v, G, logits, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=doubled
        )
        assert torch.equal(out, wanted)


def test_explain_lists_backends_with_reasons() -> None:
    explanation = explain(Q, Q, V, G, function=chunk_gla)
    assert explanation.backend == "cpu"
    assert "-> cpu: serves this call by chunks of 48 tokens" in str(explanation)
    assert explain(Q.clone().requires_grad_(), Q, V, G, function=chunk_gla).backend == "cpu"


def test_a_backend_that_cannot_serve_says_why() -> None:
    with pytest.raises(UnsupportedError, match="forward-mode differentiation follows operations of torch"):
        torch.func.grad(lambda q: chunk_gla(q, q, V, G, backend="cpu")[0].sum())(Q)


@pytest.mark.parametrize(
    "name", [name for name, (changes, _) in REFUSED.items() if not name.startswith(("offsets-end", "offsets-fall"))]
)
def test_calls_on_the_meta_device_are_checked(name: str) -> None:
    changes, message = REFUSED[name]
    tensors = {"q": Q, "k": Q, "v": V, "g": G, "beta": G} | changes
    on_meta = {
        name: x.to("meta") if isinstance(x, torch.Tensor) and not x.is_nested else x for name, x in tensors.items()
    }
    if name == "v-device":
        on_meta, message = on_meta | {"v": V}, "v is on cpu and q on meta"
    with pytest.raises(ArgumentError, match=message):
        chunk_gated_delta_rule(**on_meta)


def test_a_call_on_the_meta_device_has_the_shapes_of_results() -> None:
    row = {name: x.to("meta") for name, x in {**ROW, "cu_seqlens": OFFSETS}.items()}
    out, state = chunk_gated_delta_rule(**row, output_final_state=True)
    assert out.is_meta
    assert state is not None
    assert (out.shape, state.shape) == ((1, 5, 4, 16), (2, 4, 8, 16))
