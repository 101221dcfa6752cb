"""Results in half precision are the exact ones, rounded to nearest, ties to even.

Tolerances cannot tell that from truncation: it doubles the largest error, which the accuracy promise allows.
"""

from __future__ import annotations

import pytest
import torch

from conformance.engines import ENGINES, Engine
from fastattention import fast_attn_func

ON_THE_CPU = [engine for engine in ENGINES if engine.backend in ("cpu", "sdpa")]


@pytest.mark.parametrize("engine", ON_THE_CPU, ids=[engine.name for engine in ON_THE_CPU])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 70], ids=["decode", "prefill"])
def test_means_of_two_values_are_rounded_to_nearest(engine: Engine, dtype: torch.dtype, seqlen_q: int) -> None:
    """Queries of zeros weigh both keys by exactly 1/2; half of the means of neighbouring values are ties."""
    generator = torch.Generator("cpu").manual_seed(0)
    first = torch.randn(1, 1, 2, 64, generator=generator, dtype=torch.float32).to(dtype)
    away = 1 + torch.randint(1, 8, first.shape, generator=generator) * torch.finfo(dtype).eps
    v = torch.cat([first, (first.float() * away).to(dtype)], dim=1)
    q = torch.zeros(1, seqlen_q, 2, 64, dtype=dtype)
    with engine.active():
        out = fast_attn_func(q, torch.zeros_like(v), v, backend=engine.backend)
    mean = v.double().mean(dim=1, keepdim=True)
    assert (mean.to(dtype).double() != mean).float().mean() > 0.3, "too few means need rounding"
    assert torch.equal(out, mean.to(dtype).expand_as(out))
