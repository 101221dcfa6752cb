"""Cases of caches whose sequences differ much in length, or are many, for the list in cases.py."""

from __future__ import annotations

from fastattention.testing.case import KvCacheCase

# Lengths that end a tile, and those of one less and one more.
LENGTHS = (0, 1, 64, 300, 65, 127, 128, 129, 1, 0, 31, 700, 32, 33, 5, 63, 17, 2)
# There are more sequences than a warp has lanes, and more than twice as many.
FORTY = (*LENGTHS, *LENGTHS, 3, 900, 1, 40)
SEVENTY = (*LENGTHS, *reversed(LENGTHS), *LENGTHS, *LENGTHS[:14], 257, 9)

RAGGED = [
    KvCacheCase(name="ragged", cache_seqlens=LENGTHS, nheads=3, nheads_k=1, headdim=16),
    KvCacheCase(name="ragged-40", cache_seqlens=FORTY, nheads=2, nheads_k=1, headdim=16),
    KvCacheCase(name="ragged-40-splits-3", cache_seqlens=FORTY, nheads=2, nheads_k=1, headdim=16, num_splits=3),
    KvCacheCase(name="ragged-70", cache_seqlens=SEVENTY, nheads=2, nheads_k=2, headdim=16),
    KvCacheCase(name="ragged-70-many-rows", seqlen_q=5, cache_seqlens=SEVENTY, nheads=5, nheads_k=1, headdim=16,
                sinks=True),
    KvCacheCase(name="ragged-40-pages-append-window", seqlen_q=2, seqlen_new=2, cache_seqlens=FORTY, nheads=2,
                nheads_k=1, headdim=16, page_block_size=16, window=(200, 0), rotary_dim=8),
    KvCacheCase(name="ragged-leftpad", seqlen_q=7, cache_seqlens=LENGTHS, nheads=3, nheads_k=1, headdim=16,
                leftpad=tuple(length // 3 for length in LENGTHS), causal=True),
    KvCacheCase(name="splits-20", cache_seqlens=(2700, 9), nheads=4, nheads_k=1, headdim=16, num_splits=20),
    KvCacheCase(name="splits-70-many-rows", seqlen_q=2, cache_seqlens=(4700, 300), nheads=10, nheads_k=1, headdim=16,
                num_splits=70, causal=True),
]  # fmt: skip
