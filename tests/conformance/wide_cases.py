"""Cases of head dimensions above 256, for the list in cases.py."""

from __future__ import annotations

from conformance.case import Bias, Case, DenseCase, KvCacheCase, VarlenCase

_PAIRS = ((257, 257), (320, 320), (512, 512), (512, 300), (300, 512), (576, 512), (513, 1), (1, 511))

WIDE: list[Case] = [
    *(
        DenseCase(name=f"wide-{d}-{dv}", seqlen_q=19, seqlen_k=77, headdim=d, headdim_v=dv, nheads_k=1)
        for d, dv in _PAIRS
    ),
    *(
        KvCacheCase(name=f"wide-{d}-{dv}-decode", cache_seqlens=(300, 45), headdim=d, headdim_v=dv, nheads=4)
        for d, dv in _PAIRS
    ),
    # Several tiles of keys and rows.
    DenseCase(name="wide-causal", seqlen_q=130, seqlen_k=613, headdim=512, nheads=1, nheads_k=1, batch_size=1,
              causal=True),
    DenseCase(name="wide-scores", seqlen_q=70, seqlen_k=90, headdim=384, headdim_v=450, softcap=3.0, alibi="per_head",
              sinks=True, bias=Bias("bhqk", hides="entries"), window=(40, 12)),
    VarlenCase(name="wide-varlen", seqlens_q=(1, 40, 0, 17), seqlens_k=(9, 33, 5, 64), headdim=512, causal=True),
    VarlenCase(name="wide-varlen-pages", seqlens_q=(50, 3), seqlens_k=(83, 70), headdim=576, headdim_v=512, nheads=4,
               nheads_k=1, page_block_size=16, causal=True),
    # Rows that share keys, in as many as kernels take together, and heads that lie side by side.
    *(
        KvCacheCase(name=f"wide-heads-{h}-of-{hk}", cache_seqlens=(300, 0, 45), nheads=h, nheads_k=hk, headdim=512)
        for h, hk in ((1, 1), (3, 3), (8, 1), (16, 1), (40, 1), (16, 8))
    ),
    KvCacheCase(name="wide-neighbours", cache_seqlens=(100, 45), nheads=16, nheads_k=16, headdim=576, headdim_v=2),
    KvCacheCase(name="wide-pages-append-rotary", seqlen_q=3, seqlen_new=3, cache_seqlens=(0, 63, 177), headdim=320,
                rotary_dim=300, page_block_size=16, nheads=4, causal=True),
    KvCacheCase(name="wide-append-rotary-all", seqlen_new=1, cache_seqlens=(30, 177), headdim=576, headdim_v=512,
                rotary_dim=576, rotary_interleaved=False, nheads=4, memory_k="heads_major", causal=True),
    KvCacheCase(name="wide-prefill-append", seqlen_q=40, seqlen_new=40, cache_seqlens=(0, 63), headdim=512, causal=True,
                memory_k="sliced_headdim"),
    KvCacheCase(name="wide-splits", cache_seqlens=(1500, 3), num_splits=3, headdim=512, nheads=4, page_block_size=64),
    *(
        KvCacheCase(name=f"wide-{stored}-{d}-{dv}-seqlen-q-{q}", seqlen_q=q, seqlen_new=q, cache_seqlens=(100, 45),
                    nheads=h, headdim=d, headdim_v=dv, causal=True, stored=stored)
        for stored in ("int8", "float8")
        for d, dv, q, h in ((512, 512, 1, 8), (576, 512, 2, 12), (300, 512, 1, 4), (576, 257, 30, 2))
    ),
]  # fmt: skip
