"""Every code of a quantized cache, and values that are not finite, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from conformance.engines import ENGINES, Engine

from fastattention import fast_attn_with_kvcache

CPU = [engine for engine in ENGINES if engine.backend == "cpu"]
every_isa = pytest.mark.parametrize("engine", CPU, ids=[engine.name for engine in CPU])
EVERY_CODE = torch.arange(256).to(torch.uint8)


def attend(engine: Engine, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **scales: torch.Tensor) -> torch.Tensor:
    with engine.active():
        out: torch.Tensor = fast_attn_with_kvcache(q, k, v, **scales, backend="cpu")
    return out


@every_isa
@pytest.mark.parametrize("seqlen_q", [1, 20], ids=["decode", "prefill"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])
def test_every_code_is_the_number_it_stands_for(
    engine: Engine, stored: torch.dtype, dtype: torch.dtype, seqlen_q: int
) -> None:
    """There is one key, so out is its value: 256 columns of all codes, those of NaN separately."""
    codes = EVERY_CODE.view(stored)
    finite = codes.float().isfinite()
    usable = torch.where(finite, EVERY_CODE, torch.zeros_like(EVERY_CODE)).view(stored)
    q, k, ones = torch.zeros(1, seqlen_q, 1, 8, dtype=dtype), torch.zeros(1, 1, 1, 8).to(stored), torch.ones(1, 1, 1)
    out = attend(engine, q, k, usable.view(1, 1, 1, 256), k_scale=ones, v_scale=ones)
    expected = usable.float().expand(1, seqlen_q, 1, 256)
    torch.testing.assert_close(out.float(), expected, rtol=1e-4 if dtype is torch.bfloat16 else 1e-6, atol=0.0)
    if not finite.all():
        out = attend(engine, q, k, codes.view(1, 1, 1, 256), k_scale=ones, v_scale=ones)
        assert torch.equal(out.isnan(), ~finite.expand(1, seqlen_q, 1, 256))


@every_isa
@pytest.mark.parametrize("name", ["k_scale", "v_scale", "q"])
@pytest.mark.parametrize("group_size", [1, 4, 8])
@pytest.mark.parametrize("seqlen_q", [1, 20], ids=["decode", "prefill"])
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])
def test_a_nan_reaches_the_rows_that_see_it_and_no_other(
    engine: Engine, stored: torch.dtype, seqlen_q: int, group_size: int, name: str
) -> None:
    """The NaN is in the scale of one token of head 1 of two, or in one query."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-60, 60, (2, 150, 2, 64), generator=generator)
    k = v = codes.to(torch.int8) if stored is torch.int8 else codes.float().to(stored)
    q = torch.randn(2, seqlen_q, 2 * group_size, 64, generator=generator).bfloat16()
    scales = {which: torch.full((2, 150, 2), 0.02) for which in ("k_scale", "v_scale")}
    spoiled = torch.zeros(2, seqlen_q, 2 * group_size, dtype=torch.bool)
    if name == "q":
        q[1, 0, group_size, 7] = torch.nan
        spoiled[1, 0, group_size] = True
    else:
        scales[name][1, 70, 1] = torch.nan
        spoiled[1, :, group_size:] = True
    out = attend(engine, q, k, v, **scales)
    assert torch.equal(out.isnan().all(dim=-1), spoiled)
    assert torch.equal(out.isnan().any(dim=-1), spoiled)


@every_isa
@pytest.mark.parametrize("code", [127, -128])
@pytest.mark.parametrize("nheads", [1, 8])
@pytest.mark.parametrize("headdim", [511, 512, 513, 576])
def test_the_largest_products_of_int8_fit_their_sums(engine: Engine, headdim: int, nheads: int, code: int) -> None:
    """Every element of a query and of a key is the largest possible."""
    q = torch.full((1, 1, nheads, headdim), 1.0 if code > 0 else -1.0, dtype=torch.bfloat16)
    k, v = torch.zeros(1, 2, 1, headdim, dtype=torch.int8), torch.tensor([100, 0]).to(torch.int8).view(1, 2, 1, 1)
    k[:, 0] = code
    scales = {which: torch.ones(1, 2, 1) for which in ("k_scale", "v_scale")}
    scale = 2.0 / (headdim * abs(code))
    with engine.active():
        out, lse = fast_attn_with_kvcache(q, k, v, **scales, softmax_scale=scale, return_lse=True, backend="cpu")
    scores = torch.tensor([2.0, 0.0])
    torch.testing.assert_close(lse, scores.logsumexp(0).expand(1, nheads, 1), rtol=1e-3, atol=0.0)
    torch.testing.assert_close(out.float(), (100 * scores.softmax(0)[0]).expand(1, 1, nheads, 1), rtol=1e-2, atol=0.0)
