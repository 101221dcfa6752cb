"""Cases for the vendor's operators, besides those of the list that they serve."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from conformance.cases import CASES
from tiers import covering, tier_of

from fastattention.backends.ascend import vendor
from fastattention.testing.calls import problem_of
from fastattention.testing.case import Case, DenseCase, KvCacheCase, VarlenCase

# Few cases of the list have the pages and head dimensions that these operators take.
MORE: list[Case] = [
    *(
        KvCacheCase(name=f"vendor-pages-{size}-{q}-{window[0]}-{memory}", seqlen_q=q, cache_seqlens=(0, 300, 77),
                    page_block_size=size, nheads=4, window=window, memory_k=memory)
        for size, q in ((16, 1), (512, 1), (128, 2), (128, 33), (256, 80))
        for window in ((-1, 0), (20, 3))
        for memory in ("contiguous", "heads_major", "sliced_heads")
    ),
    *(
        KvCacheCase(name=f"vendor-cache-{q}-{left}-{right}-{memory}", seqlen_q=q, cache_seqlens=(0, 1, 90, 33),
                    nheads=6, headdim=64, window=(left, right), memory_k=memory)
        for q in (1, 40)
        for left, right in ((-1, 0), (-1, 5), (0, 0), (7, -1), (12, 4))
        for memory in ("contiguous", "heads_major", "sliced_headdim")
    ),
    KvCacheCase(name="vendor-leftpad-pages", cache_seqlens=(30, 200, 77), leftpad=(30, 7, 70), page_block_size=128,
                seqlen_q=3, window=(5, 0)),
    KvCacheCase(name="vendor-leftpad-decode", cache_seqlens=(30, 200, 77), leftpad=(30, 7, 70), window=(50, 0)),
    *(
        VarlenCase(name=f"vendor-varlen-{left}-{right}-sinks-{sinks}", seqlens_q=(9, 40, 0, 3, 7, 64, 5, 17),
                   seqlens_k=(3, 33, 5, 0, 7, 64, 0, 90), nheads=6, window=(left, right), sinks=sinks)
        for left, right in ((-1, 0), (-1, 4), (6, 0), (6, 4), (2, 60), (100, 100))
        for sinks in (False, True)
    ),
    *(
        DenseCase(name=f"vendor-{memory_q}-{memory_k}-headdim-{d}", seqlen_q=45, seqlen_k=38, headdim=d, nheads=4,
                  window=(9, 2), memory_q=memory_q, memory_k=memory_k)
        for memory_q, memory_k in (("heads_major", "heads_major"), ("contiguous", "heads_major"))
        for d in (20, 48)
    ),
    *(
        KvCacheCase(name=f"vendor-int8-{size or 'rows'}-{left}-{memory}", cache_seqlens=(0, 77, 130), nheads=8,
                    nheads_k=2, headdim=64, page_block_size=size, memory_k=memory, window=(left, 0), stored="int8")
        for size in (None, 32, 512)
        for left in (-1, 20)
        for memory in ("contiguous", "heads_major", "sliced_heads")
    ),
    KvCacheCase(name="vendor-int8-append", cache_seqlens=(0, 77, 30), seqlen_new=3, rotary_dim=16, page_block_size=32,
                stored="int8", causal=True),
    KvCacheCase(name="vendor-int8-leftpad", cache_seqlens=(30, 200, 77), leftpad=(30, 7, 70), stored="int8"),
    KvCacheCase(name="vendor-int8-leftpad-pages", cache_seqlens=(30, 200, 77), leftpad=(30, 7, 70), page_block_size=64,
                stored="int8"),
    *(  # only bfloat16
        KvCacheCase(name=f"vendor-int8-queries-{q}-{left}-{right}", seqlen_q=q, seqlen_new=q, cache_seqlens=(0, 9, 77),
                    nheads=4, nheads_k=1, window=(left, right), stored="int8")
        for q, left, right in ((13, -1, 0), (16, 5, 3), (2, -1, -1))
    ),
    DenseCase(name="vendor-one-query-has-keys", seqlen_q=5, seqlen_k=1, causal=True, headdim=64),
    DenseCase(name="vendor-past-the-mask-tile", seqlen_q=2100, seqlen_k=2300, nheads=1, nheads_k=1, batch_size=1,
              headdim=16, window=(2200, 0)),
]  # fmt: skip
assert len({case.name for case in MORE}) == len(MORE), "the names of cases are their ids and must differ"


def runs(*dtypes: torch.dtype) -> list[tuple[Case, torch.dtype]]:
    """Every case that is served, in each dtype in which it is."""
    return [
        (case, dtype) for case in (*CASES, *MORE) for dtype in dtypes if vendor.why_not(problem_of(case, dtype)) is None
    ]


def parametrize(metafunc: pytest.Metafunc, runs: Sequence[tuple[Case, torch.dtype]]) -> None:
    """Gives a test its `case` and `dtype`."""
    chosen = covering(tier_of(metafunc.config), runs)
    ids = [f"{case.name}-{str(dtype).removeprefix('torch.')}" for case, dtype in chosen]
    metafunc.parametrize(("case", "dtype"), chosen, ids=ids)
