"""Calls of Mamba-2: served as torch computes them, or left to the model."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from fastattention.integrations.transformers.versions import CACHE_ARGUMENT
from integrations.models import prompts

from .calls import Calls, by_torch, modeling_of, names_of_models
from .models import model_of


def arguments_of_mamba(seqlen: int = 70) -> dict[str, Any]:
    """Arguments of a prompt of Mamba-2, as models give them: 4 heads of 8 in 2 groups, states of 6."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "hidden_states": normal(2, seqlen, 4, 8), "dt": normal(2, seqlen, 4), "A": -normal(4).exp(),
        "B": normal(2, seqlen, 2, 6), "C": normal(2, seqlen, 2, 6), "chunk_size": 32, "D": normal(4), "z": None,
        "return_final_states": True, "dt_bias": normal(4), "dt_softplus": True, "initial_states": normal(2, 4, 8, 6),
        "dt_limit": (0.1, 2.0),
    }  # fmt: skip


def token_of_mamba(**changed: Any) -> dict[str, Any]:
    """The arguments of a token, and a copy of the state. Everything of a head is repeated, as models do."""
    given = arguments_of_mamba(1)
    return {
        "state": given["initial_states"].clone(), "hidden_states": given["hidden_states"][:, 0],
        "dt": given["dt"].transpose(1, 2).expand(-1, -1, 8), "A": given["A"][:, None, None].expand(-1, 8, 6),
        "B": given["B"][:, 0], "C": given["C"][:, 0], "D": given["D"][:, None].expand(-1, 8), "z": None,
        "dt_bias": given["dt_bias"][:, None].expand(-1, 8), "dt_softplus": True,
    } | changed  # fmt: skip


@pytest.mark.parametrize("name", names_of_models("mamba2_chunk_scan"))
def test_every_model_with_mamba_2_is_served(name: str, calls: Calls, warned: Mock) -> None:
    modeling, given = modeling_of(name), arguments_of_mamba()
    token, of_torch = (token_of_mamba(z=torch.linspace(-2, 2, 64).reshape(2, 4, 8)) for _ in range(2))
    ours = *modeling.mamba2_chunk_scan(**given), modeling.mamba2_selective_state_update(**token), token["state"]
    assert calls.counts == (1, 1)
    assert not warned.called
    prompt = by_torch(lambda: modeling.mamba2_chunk_scan(**given))
    wanted = *prompt, by_torch(lambda: modeling.mamba2_selective_state_update(**of_torch)), of_torch["state"]
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dt": torch.rand(2, 4, 8)}, "leaves Mamba-2 to the model itself: dt differs within a head"),
        ({"A": -torch.rand(4, 8, 6)}, "A differs within a head"),
        ({"hidden_states": torch.rand(2, 4, 8).half()}, "hidden_states, B and C are torch.float16, torch.float32"),
    ],
    ids=["dt", "A", "mixed"],
)
def test_a_token_of_mamba_2_that_is_refused_is_computed_by_the_model(
    changed: dict[str, Any], reason: str, calls: Calls, warned: Mock
) -> None:
    given, of_torch = token_of_mamba(**changed), token_of_mamba(**changed)
    out = modeling_of("bamba").mamba2_selective_state_update(**given)
    assert calls.counts == (0, 0)
    assert any(reason in call.args[0] for call in warned.call_args_list)
    assert torch.equal(out, by_torch(lambda: modeling_of("bamba").mamba2_selective_state_update(**of_torch)))
    assert torch.equal(given["state"], of_torch["state"])


def test_states_of_mamba_2_stay_as_kernels_read_them() -> None:
    """A cache copies a state of the same memory layout, so kernels read and write it without another copy."""
    model, ids = model_of("bamba"), prompts(length=9)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        model(ids[:, :1], **{CACHE_ARGUMENT: cache})
    assert cache.get_recurrent_state(0).mT.is_contiguous()
