"""Cases of quantized caches, for the list in cases.py."""

from __future__ import annotations

from typing import Literal

from fastattention.testing.case import CACHE_MEMORIES, Bias, KvCacheCase

STORED: tuple[Literal["int8", "float8"], ...] = ("int8", "float8")

QUANTIZED = [
    case
    for stored in STORED
    for case in (
        *(
            KvCacheCase(name=f"{stored}-heads-{h}-of-{hk}", cache_seqlens=(300, 45), nheads=h, nheads_k=hk, headdim=64,
                        stored=stored)
            for h, hk in ((1, 1), (3, 3), (4, 2), (8, 2), (7, 1), (8, 1), (40, 1))
        ),
        *(
            KvCacheCase(name=f"{stored}-headdim-{d}-{dv}", cache_seqlens=(100, 45), nheads=4, headdim=d, headdim_v=dv,
                        stored=stored)
            for d, dv in ((1, 1), (3, 3), (59, 111), (111, 59), (128, 128), (192, 128), (256, 256))
        ),
        *(
            KvCacheCase(name=f"{stored}-seqlen-q-{q}", seqlen_q=q, cache_seqlens=(1, 70, 633), causal=True, nheads=4,
                        stored=stored)
            for q in (2, 5, 17, 64)
        ),
        *(
            KvCacheCase(name=f"{stored}-prefill-headdim-{d}-{dv}", seqlen_q=20, cache_seqlens=(100, 45), headdim=d,
                        headdim_v=dv, stored=stored)
            for d, dv in ((1, 1), (59, 111), (256, 256))
        ),
        *(
            KvCacheCase(name=f"{stored}-memory-{memory}", seqlen_q=q, seqlen_new=q, cache_seqlens=(100, 45),
                        memory_k=memory, causal=True, nheads_k=10, nheads=10, stored=stored)
            for memory, q in zip(CACHE_MEMORIES, (1, 2, 1, 20), strict=True)
        ),
        *(
            KvCacheCase(name=f"{stored}-pages-{size}-append-{q}-rotary", seqlen_q=q, seqlen_new=q,
                        cache_seqlens=(0, 63, 177), rotary_dim=16, page_block_size=size, nheads=4, causal=True,
                        rotary_interleaved=size % 2 == 0, stored=stored)
            for size, q in ((1, 1), (3, 5), (16, 17), (64, 2))
        ),
        KvCacheCase(name=f"{stored}-append-rotary", seqlen_q=3, seqlen_new=3, cache_seqlens=(0, 40, 77), nheads=4,
                    headdim=59, rotary_dim=40, causal=True, stored=stored),
        KvCacheCase(name=f"{stored}-append-many", seqlen_q=19, seqlen_new=19, cache_seqlens=(0, 1, 77), causal=True,
                    headdim_v=40, stored=stored),
        KvCacheCase(name=f"{stored}-append-batch-idx-leftpad", seqlen_q=2, seqlen_new=2, cache_seqlens=(30, 40),
                    leftpad=(3, 17), batch_idx=True, causal=True, stored=stored),
        KvCacheCase(name=f"{stored}-leftpad-pages", seqlen_q=3, cache_seqlens=(30, 40, 77), leftpad=(0, 17, 33),
                    page_block_size=16, causal=True, stored=stored),
        KvCacheCase(name=f"{stored}-empty", cache_seqlens=(0, 0), stored=stored),
        KvCacheCase(name=f"{stored}-full", cache_seqlens=(40, 40), spare=0, lengths="full", stored=stored),
        KvCacheCase(name=f"{stored}-window", seqlen_q=2, cache_seqlens=(700, 45, 3), window=(130, 0), stored=stored),
        KvCacheCase(name=f"{stored}-prefill-window", seqlen_q=40, cache_seqlens=(700, 45), window=(130, 20),
                    stored=stored),
        KvCacheCase(name=f"{stored}-large-scores", cache_seqlens=(100, 45), magnitude=20.0, stored=stored),
        KvCacheCase(name=f"{stored}-softmax-scale-negative", seqlen_q=2, cache_seqlens=(100, 45), softmax_scale=-0.3,
                    stored=stored),
        *(
            KvCacheCase(name=f"{stored}-scores-{q}", seqlen_q=q, cache_seqlens=(100, 345), softcap=3.0, nheads=4,
                        alibi="per_sequence", sinks=True, bias=Bias("bhqk", hides="entries"), causal=True,
                        stored=stored)
            for q in (2, 30)
        ),
        *(
            KvCacheCase(name=f"{stored}-splits-{n}-{'pages' if size else 'dense'}", cache_seqlens=(1500, 3),
                        num_splits=n, page_block_size=size, nheads=4, headdim=16, causal=True, stored=stored)
            for n, size in ((0, 64), (3, None), (7, 64))
        ),
        KvCacheCase(name=f"{stored}-splits-5000-keys", cache_seqlens=(5000,), nheads=16, headdim=128, stored=stored),
    )
]  # fmt: skip
