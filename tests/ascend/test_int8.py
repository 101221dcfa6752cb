"""Scales of int8 caches in our kernel: tiny ones, ones that are not finite, and one for all tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ascend.engine import BACKENDS
from fastattention.attention.problem import AttentionOutput
from fastattention.attention.reference import reference_attention
from fastattention.attention.validation import KvCacheArguments, Options, prepare_kvcache

TOKENS = 37


def cache_of(seed: int) -> Tensor:
    return torch.randint(-127, 128, (1, TOKENS, 2, 16), generator=torch.Generator().manual_seed(seed)).to(torch.int8)


def attend(k_scale: Tensor, v_scale: Tensor) -> tuple[AttentionOutput, AttentionOutput]:
    """The kernel's result for three queries in float16, and the right one."""
    q = torch.randn(1, 3, 2, 16, generator=torch.Generator().manual_seed(3)).half()
    arguments = KvCacheArguments(q, cache_of(1), cache_of(2), k_scale=k_scale, v_scale=v_scale)
    problem, inputs = prepare_kvcache(arguments, Options(return_lse=True))
    return BACKENDS[torch.float16]().forward(problem, inputs), reference_attention(problem, inputs)


@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 500.0])
def test_scales_of_values_need_not_fit_float16(magnitude: float) -> None:
    """A weight times a scale of 1e-6 has few bits in float16, and of two such weights among 500 none is left."""
    scales = magnitude * (0.5 + torch.rand(1, TOKENS, 2, generator=torch.Generator().manual_seed(4)))
    found, right = attend(torch.full((1, TOKENS, 2), 0.01), scales)
    eps = torch.finfo(torch.float16).eps
    largest = right.out.abs().amax()
    assert (found.out - right.out).abs().amax() <= 2 * eps * largest
    assert found.lse is not None
    torch.testing.assert_close(found.lse.double(), right.lse, rtol=1e-5, atol=1e-5)


def test_one_scale_may_stand_for_all_tokens() -> None:
    """The scale is expanded, with a stride of 0 between tokens, by which Triton-Ascend would divide."""
    one = torch.full((1, 1, 2), 0.02).expand(1, TOKENS, 2)
    found, right = attend(one, one)
    torch.testing.assert_close(found.out.double(), right.out, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("spoilt", ["k", "v"])
def test_a_token_that_was_not_finite_spoils_its_head_only(spoilt: str) -> None:
    scales = {name: torch.full((1, TOKENS, 2), 0.02) for name in "kv"}
    clean, _ = attend(scales["k"], scales["v"])
    scales[spoilt][0, 20, 1] = torch.nan
    found, _ = attend(scales["k"], scales["v"])
    assert found.out[:, :, 1].isnan().all()
    assert torch.equal(found.out[:, :, 0], clean.out[:, :, 0])
