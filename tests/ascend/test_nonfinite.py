"""NaN is never swallowed by our kernels: its row says so, in lse too, and no other row does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend.engine import BACKENDS
from fastattention.attention.validation import Options, prepare_dense

NAN = float("nan")
MODIFIED: dict[str, tuple[Options, dict[str, Any]]] = {
    "plain": (Options(return_lse=True), {}),
    "softcap": (Options(return_lse=True, softcap=30.0), {}),
    "alibi": (Options(return_lse=True), {"alibi_slopes": torch.tensor([0.5, 0.25])}),
}


def attend(*qkv: torch.Tensor, options: Options, **more: Any) -> tuple[torch.Tensor, Any]:
    out, lse, _ = BACKENDS[qkv[0].dtype]().forward(*prepare_dense(*qkv, options, **more))
    return out, lse


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 700), (40, 70)], ids=["splits", "many-queries"])
@pytest.mark.parametrize("modified", MODIFIED.values(), ids=MODIFIED)
def test_a_nan_query_or_key_spoils_its_rows_only(
    seqlen_q: int, seqlen_k: int, modified: tuple[Options, dict[str, Any]]
) -> None:
    generator, (options, more) = torch.Generator().manual_seed(seqlen_q), modified
    q, k, v = (torch.randn(1, count, 2, 64, generator=generator).half() for count in (seqlen_q, seqlen_k, seqlen_k))
    clean, _ = attend(q, k, v, options=options, **more)
    bad_q, bad_k, row = q.clone(), k.clone(), seqlen_q // 2
    bad_q[0, row, 0, 5] = NAN  # in one head
    bad_k[0, 33, 1] = NAN
    out, lse = attend(bad_q, k, v, options=options, **more)
    assert out[0, row, 0].isnan().all()
    assert lse[0, 0, row].isnan()
    out[0, row, 0] = clean[0, row, 0]
    assert torch.equal(out, clean)
    out, lse = attend(q, bad_k, v, options=options, **more)
    assert out[:, :, 1].isnan().all()
    assert lse[:, 1].isnan().all()
    assert torch.equal(out[:, :, 0], clean[:, :, 0])
