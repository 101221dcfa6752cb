"""Few queries of any number: kernels take them in groups, and store the results of all groups alike."""

from __future__ import annotations

import pytest
import torch

from conformance.engines import ENGINES, Engine
from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.attention.reference import reference_attention
from fastattention.attention.validation import KvCacheArguments, Options, prepare_kvcache


@pytest.mark.parametrize("headdim_v", [8, 24, 40])  # an odd number of vectors of 8, and less than one of 16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("engine", [one for one in ENGINES if one.isa], ids=lambda engine: engine.name)
def test_every_number_of_rows_is_right(engine: Engine, dtype: torch.dtype, headdim_v: int) -> None:
    generator = torch.Generator().manual_seed(0)
    with engine.active():
        backend = ATTENTION_BACKENDS.get(engine.backend)
        for rows in range(1, 17):
            shapes = ((1, 1, rows, 24), (1, 600, 1, 24), (1, 600, 1, headdim_v))
            q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
            problem, inputs = prepare_kvcache(KvCacheArguments(q, k, v, cache_seqlens=600), Options())
            out = backend.forward(problem, inputs).out.double()
            exact = reference_attention(problem, inputs).out
            tolerance = 1e-5 if dtype is torch.float32 else 0.01
            torch.testing.assert_close(
                out, exact, rtol=0, atol=tolerance, msg=lambda text, rows=rows: f"{rows}: {text}"
            )
