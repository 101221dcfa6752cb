"""Stored new tokens: without rotary embedding, engines store the same bits as `quantize`, for any values."""

from __future__ import annotations

import math

import pytest
import torch

from conformance.engines import Engine, every_engine
from fastattention import fast_attn_with_kvcache
from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.attention.validation import KvCacheArguments, Options, prepare_kvcache
from fastattention.quantized import quantize

TOKENS = {
    "normal": 1.0,
    "zeros": 0.0,
    "tiny": 1e-37,
    "subnormal": 1e-42,
    "huge": 1e38,
    "infinite": math.inf,
    "nan": math.nan,
}


@every_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])
def test_new_tokens_are_stored_as_the_formula_says(engine: Engine, stored: torch.dtype, dtype: torch.dtype) -> None:
    """Tokens of every magnitude, and one with a single element that is not finite; nothing else is written."""
    generator = torch.Generator().manual_seed(0)
    new = [torch.randn(1, len(TOKENS), 3, width, generator=generator) for width in (59, 24)]
    for x in new:
        for index, magnitude in enumerate(TOKENS.values()):
            if math.isfinite(magnitude):
                x[0, index] *= magnitude
            else:
                x[0, index, 1, 7] = magnitude
    k, v = (x.to(dtype) for x in new)
    k_cache, v_cache = (torch.zeros(1, 12, 3, width).to(stored) for width in (59, 24))
    k_scale, v_scale = torch.full((1, 12, 3), 7.0), torch.full((1, 12, 3), 7.0)
    arguments = KvCacheArguments(
        torch.zeros(1, 1, 3, 59, dtype=dtype), k_cache, v_cache, k, v, cache_seqlens=2, k_scale=k_scale, v_scale=v_scale
    )
    reason = ATTENTION_BACKENDS.verdict(prepare_kvcache(arguments, Options())[0], engine.backend).reason
    if reason is not None:
        pytest.skip(f"{engine.name}: {reason}")
    with engine.active():
        fast_attn_with_kvcache(**arguments._asdict(), backend=engine.backend)
    for cache, scale, x in ((k_cache, k_scale, k), (v_cache, v_scale, v)):
        wanted, wanted_scale = quantize(x, stored)
        written = slice(2, 2 + len(TOKENS))
        assert torch.equal(cache[:, written].float(), wanted.float())
        torch.testing.assert_close(scale[:, written], wanted_scale, rtol=0.0, atol=0.0, equal_nan=True)
        assert not cache[:, :2].float().any()
        assert not cache[:, written.stop :].float().any()
        assert (scale[:, :2] == 7.0).all()
        assert (scale[:, written.stop :] == 7.0).all()
