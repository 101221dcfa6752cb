"""Cases of queries and keys that are multiplied in int8, for the list in cases.py."""

from __future__ import annotations

import functools

from fastattention.testing.case import Bias, Blocks, Case, DenseCase, VarlenCase

_Dense = functools.partial(DenseCase, qk_dtype="int8")
_Varlen = functools.partial(VarlenCase, qk_dtype="int8")

INT8: list[Case] = [
    *(
        _Dense(name=f"products-{q}x{k}", seqlen_q=q, seqlen_k=k)
        for q, k in ((1, 1), (1, 700), (3, 5), (64, 64), (129, 200), (300, 515))
    ),
    *(
        _Dense(name=f"products-causal-{q}x{k}", seqlen_q=q, seqlen_k=k, causal=True)
        for q, k in ((77, 77), (30, 290), (290, 30), (513, 1030))
    ),
    *(
        _Dense(name=f"products-headdim-{d}-{dv}", seqlen_q=90, seqlen_k=170, headdim=d, headdim_v=dv, causal=True)
        for d, dv in ((1, 1), (15, 33), (16, 16), (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (130, 70),
                      (192, 128), (256, 256), (320, 320), (576, 512))
    ),
    *(
        _Dense(name=f"products-heads-{h}-of-{hk}", seqlen_q=70, seqlen_k=150, nheads=h, nheads_k=hk, causal=True)
        for h, hk in ((3, 1), (8, 2))
    ),
    # Without subtracting the common part of keys, only a few bits would remain for their differences.
    _Dense(name="products-offset", seqlen_q=150, seqlen_k=260, key_offset=20.0),
    _Dense(name="products-offset-sinks", seqlen_q=60, seqlen_k=260, key_offset=1.0, sinks=True),
    _Dense(name="products-offset-softcap", seqlen_q=60, seqlen_k=260, key_offset=3.0, softcap=5.0),
    _Dense(name="products-magnitude", seqlen_q=60, seqlen_k=130, magnitude=6.0),
    _Dense(name="products-window", seqlen_q=200, seqlen_k=230, window=(70, 10)),
    _Dense(name="products-alibi", seqlen_q=130, seqlen_k=130, nheads=4, nheads_k=2, alibi="per_sequence", causal=True),
    _Dense(name="products-bias", seqlen_q=100, seqlen_k=150, bias=Bias("bhqk", hides="entries")),
    _Dense(name="products-bias-rows", seqlen_q=100, seqlen_k=150, bias=Bias("qk", hides="rows", finite=True)),
    _Dense(name="products-scale-negative", seqlen_q=100, seqlen_k=150, softmax_scale=-0.3, key_offset=1.0),
    _Dense(name="products-scale-zero", seqlen_q=30, seqlen_k=90, softmax_scale=0.0),
    _Dense(name="products-blocks", seqlen_q=300, seqlen_k=420, nheads=4, nheads_k=2, causal=True, blocks=Blocks()),
    _Dense(name="products-blocks-tall", seqlen_q=300, seqlen_k=420, blocks=Blocks(size=(128, 128), density=0.3)),
    _Dense(name="products-pairs", seqlen_q=200, seqlen_k=300, nheads=4, nheads_k=2, blocks=Blocks(pairs=0.6)),
    _Dense(name="products-strides", seqlen_q=70, seqlen_k=110, memory_q="sliced_heads", memory_k="every_second_token"),
    _Dense(name="products-odd-strides", seqlen_q=70, seqlen_k=110, headdim=27, memory_q="every_second_element",
           memory_k="sliced_headdim"),
    _Dense(name="products-heads-major", seqlen_q=70, seqlen_k=110, memory_q="heads_major", memory_k="heads_major"),
    _Dense(name="products-expanded", seqlen_q=40, seqlen_k=90, memory_q="one_batch_expanded",
           memory_k="one_batch_expanded"),
    _Dense(name="products-empty-batch", seqlen_q=40, seqlen_k=40, batch_size=0),
    _Dense(name="products-no-queries", seqlen_q=0, seqlen_k=40),
    _Dense(name="products-no-keys", seqlen_q=40, seqlen_k=0, sinks=True),
    # The mean is a sum of several chunks of tokens.
    _Dense(name="products-long", seqlen_q=70, seqlen_k=2600, nheads=1, nheads_k=1, batch_size=1, key_offset=2.0),
    _Varlen(name="products-varlen", seqlens_q=(1, 130, 0, 70), seqlens_k=(90, 230, 5, 64), causal=True, key_offset=3.0),
    _Varlen(name="products-varlen-slack", seqlens_q=(70, 20), seqlens_k=(190, 0), slack=100, nheads=4, nheads_k=1,
            sinks=True),
    _Varlen(name="products-varlen-scores", seqlens_q=(70, 90), seqlens_k=(120, 600), window=(100, 0), softcap=4.0,
            key_offset=1.0),
    _Varlen(name="products-varlen-pages", seqlens_q=(50, 3), seqlens_k=(183, 70), nheads=4, nheads_k=2,
            page_block_size=16, causal=True),
]  # fmt: skip

# Like BLOCK_TILES of block_cases.py: every kernel that is compiled ahead for int8 products.
INT8_TILES: list[Case] = [
    *(
        _Dense(name=f"products-tiles-{d}", seqlen_q=101, seqlen_k=150, headdim=d, nheads=1, nheads_k=1, batch_size=1,
               causal=True)
        for d in (32, 64, 96, 128, 192, 256)
    ),
    *(
        _Dense(name=f"products-many-queries-{d}", seqlen_q=8200, seqlen_k=70, headdim=d, nheads=1, nheads_k=1,
               batch_size=1, window=(20, 8150))
        for d in (32, 64)
    ),
]  # fmt: skip
