"""Cases of head dimensions above 256, for the list in cases.py."""

from __future__ import annotations

from fastattention.testing.case import Bias, Case, DenseCase, KvCacheCase, VarlenCase

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
    # Rows that share keys, in the numbers that kernels take together, and neighbouring heads.
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

# Decodes as in multi-head latent attention: values are the first columns of the keys, in the same memory.
LATENT: list[Case] = [
    *(
        KvCacheCase(name=f"latent-{h}-heads-{q}-{size or 'dense'}", seqlen_q=q, cache_seqlens=(300, 0, 1, 64), nheads=h,
                    nheads_k=1, headdim=576, headdim_v=512, values_in_keys=True, page_block_size=size, causal=q > 1)
        for h, q, size in ((1, 1, None), (8, 1, 64), (9, 1, None), (16, 1, None), (16, 2, 64), (16, 1, 16), (40, 1, 1),
                           (128, 1, None), (128, 2, 64), (128, 3, None))
    ),
    *(
        KvCacheCase(name=f"latent-append-{q}-{h}-heads-{size or 'dense'}", seqlen_q=q, seqlen_new=q,
                    cache_seqlens=(0, 63, 177), nheads=h, nheads_k=1, headdim=576, headdim_v=512, values_in_keys=True,
                    page_block_size=size, causal=True)
        for h, q, size in ((16, 1, None), (16, 2, 64), (128, 1, 16), (4, 1, None), (16, 30, 64))
    ),
    # Odd sizes and memory that products cannot use in place, and several heads of keys.
    *(
        KvCacheCase(name=f"latent-{d}-{dv}-of-{hk}-{memory}", cache_seqlens=(130, 45), nheads=12 * hk, nheads_k=hk,
                    headdim=d, headdim_v=dv, values_in_keys=True, memory_k=memory)
        for d, dv, hk, memory in ((1, 1, 1, "contiguous"), (59, 31, 2, "heads_major"), (64, 64, 2, "sliced_heads"),
                                  (66, 65, 1, "every_second_token"), (96, 33, 2, "sliced_headdim"),
                                  (576, 511, 1, "sliced_headdim"), (200, 200, 1, "contiguous"))
    ),
    KvCacheCase(name="latent-splits", cache_seqlens=(1500, 700), nheads=20, nheads_k=1, headdim=72, headdim_v=64,
                values_in_keys=True, num_splits=3),
    KvCacheCase(name="latent-long", cache_seqlens=(5000,), nheads=33, nheads_k=1, headdim=96, headdim_v=64,
                values_in_keys=True, page_block_size=64),
    # The last tile of rows is not full, and splits are merged.
    KvCacheCase(name="latent-80-heads", cache_seqlens=(1500, 700), nheads=80, nheads_k=1, headdim=576, headdim_v=512,
                values_in_keys=True),
    KvCacheCase(name="latent-scores", seqlen_q=2, cache_seqlens=(100, 345), nheads=12, nheads_k=1, headdim=96,
                headdim_v=64, values_in_keys=True, softcap=3.0, alibi="per_sequence", sinks=True,
                bias=Bias("bhqk", hides="entries"), causal=True),
    KvCacheCase(name="latent-window-leftpad", seqlen_q=3, cache_seqlens=(300, 40, 177), leftpad=(30, 7, 76), nheads=10,
                nheads_k=1, headdim=96, headdim_v=64, values_in_keys=True, window=(70, 1)),
    KvCacheCase(name="latent-large-scores", cache_seqlens=(300, 45), nheads=16, nheads_k=1, headdim=96, headdim_v=64,
                values_in_keys=True, magnitude=4.0),
    KvCacheCase(name="latent-softmax-scale-negative", seqlen_q=2, cache_seqlens=(300, 45), nheads=16, nheads_k=1,
                headdim=96, headdim_v=64, values_in_keys=True, softmax_scale=-0.3, batch_idx=True),
    *(
        KvCacheCase(name=f"latent-{stored}-{h}-heads", seqlen_q=q, cache_seqlens=(100, 45), nheads=h, nheads_k=1,
                    headdim=d, headdim_v=dv, values_in_keys=True, page_block_size=size, causal=True, stored=stored)
        for stored in ("int8", "float8")
        for h, q, d, dv, size in ((5, 1, 576, 512, None), (16, 2, 576, 512, 16), (40, 1, 59, 31, None))
    ),
    DenseCase(name="latent-dense", seqlen_q=1, seqlen_k=200, nheads=16, nheads_k=1, headdim=576, headdim_v=512,
              values_in_keys=True),
    DenseCase(name="latent-dense-prefill", seqlen_q=40, seqlen_k=200, nheads=16, nheads_k=1, headdim=576, headdim_v=512,
              values_in_keys=True, causal=True),
    DenseCase(name="latent-more-queries-than-keys", seqlen_q=40, seqlen_k=20, nheads=4, nheads_k=1, headdim=96,
              headdim_v=64, values_in_keys=True, causal=True, sinks=True),
    VarlenCase(name="latent-varlen", seqlens_q=(1, 40, 0, 2, 1), seqlens_k=(99, 50, 5, 64, 0), nheads=16, nheads_k=1,
               headdim=576, headdim_v=512, values_in_keys=True, causal=True),
]  # fmt: skip
