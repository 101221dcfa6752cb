"""NaN is never swallowed by the kernels of any architecture, emulated: its row says so, and no other row does."""

from __future__ import annotations

from typing import Any

import emulator
import pytest
import torch
from emulator import EmulatedCudaBackend

from fastattention.attention.validation import Options, prepare_dense

NAN = float("nan")
BACKENDS = pytest.mark.parametrize("backend", emulator.EMULATED, ids=[backend.name for backend in emulator.EMULATED])
SHAPES = pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 200), (40, 70)], ids=["decode", "many-queries"])
SLOPES = torch.tensor([0.5, 0.25])
MODIFIED: dict[str, tuple[Options, dict[str, Any]]] = {
    "plain": (Options(return_lse=True), {}),
    "softcap": (Options(return_lse=True, softcap=30.0), {}),
    "alibi": (Options(return_lse=True), {"alibi_slopes": SLOPES}),
    "bias": (Options(return_lse=True), {"attn_bias": torch.zeros(1)}),
    "all": (Options(return_lse=True, softcap=30.0), {"alibi_slopes": SLOPES, "attn_bias": torch.zeros(1)}),
}


def attend(backend: EmulatedCudaBackend, *qkv: torch.Tensor, options: Options, **more: Any) -> tuple[Any, Any]:
    problem, inputs = prepare_dense(*qkv, options, **more)
    out, lse, _ = backend.forward(problem, inputs)
    return out, lse


@BACKENDS
@SHAPES
@pytest.mark.parametrize("modified", MODIFIED.values(), ids=MODIFIED)
def test_a_nan_query_or_key_spoils_its_rows_only(
    backend: type[EmulatedCudaBackend], seqlen_q: int, seqlen_k: int, modified: tuple[Options, dict[str, Any]]
) -> None:
    generator, (options, more) = torch.Generator().manual_seed(seqlen_q), modified
    q, k, v = (torch.randn(1, count, 2, 64, generator=generator).half() for count in (seqlen_q, seqlen_k, seqlen_k))
    clean, _ = attend(backend(), q, k, v, options=options, **more)
    bad_q, bad_k, row = q.clone(), k.clone(), seqlen_q // 2
    bad_q[0, row, 0, 5] = NAN  # in one head
    bad_k[0, 33, 1] = NAN
    out, lse = attend(backend(), bad_q, k, v, options=options, **more)
    assert out[0, row, 0].isnan().all()
    assert lse[0, 0, row].isnan()
    out[0, row, 0] = clean[0, row, 0]
    assert torch.equal(out, clean)
    out, lse = attend(backend(), q, bad_k, v, options=options, **more)
    assert out[:, :, 1].isnan().all()
    assert lse[:, 1].isnan().all()
    assert torch.equal(out[:, :, 0], clean[:, :, 0])


@BACKENDS
@SHAPES
def test_a_nan_of_the_bias_is_not_swallowed(backend: type[EmulatedCudaBackend], seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = (torch.ones(1, count, 2, 64).half() for count in (seqlen_q, seqlen_k, seqlen_k))
    bias = torch.zeros(1, 2, seqlen_q, seqlen_k)
    bias[0, 1, 0, 33] = NAN
    for dtype in (torch.float16, torch.float32):
        out, _ = attend(backend(), q, k, v, options=Options(), attn_bias=bias.to(dtype))
        assert out[0, 0, 1].isnan().all()
        assert out[0, 1:].isfinite().all()
        assert out[0, :, 0].isfinite().all()
