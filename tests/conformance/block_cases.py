"""Cases of block masks, for the list in cases.py."""

from __future__ import annotations

from fastattention.testing.case import Bias, Blocks, Case, DenseCase, VarlenCase

BLOCKS: list[Case] = [
    *(
        DenseCase(name=f"blocks-{m}x{n}-{q}x{k}", seqlen_q=q, seqlen_k=k, blocks=Blocks(size=(m, n)))
        for m, n in ((64, 64), (128, 128), (64, 128), (128, 64), (192, 256))
        for q, k in ((300, 500), (129, 65))
    ),
    *(
        DenseCase(name=f"blocks-density-{density}", seqlen_q=400, seqlen_k=700, causal=causal,
                  blocks=Blocks(density=density, size=(128, 64)))
        for density, causal in ((0.0, False), (0.1, False), (0.9, True), (1.0, True))
    ),
    *(
        DenseCase(name=f"blocks-axes-{axes}", seqlen_q=200, seqlen_k=333, nheads=4, nheads_k=2, headdim=40,
                  blocks=Blocks(axes, strided=axes == "1h"))
        for axes in ("bh", "1h", "b1", "11")
    ),
    # Query heads that share keys keep blocks of their own.
    *(
        DenseCase(name=f"blocks-heads-{h}-of-{hk}", seqlen_q=150, seqlen_k=260, nheads=h, nheads_k=hk, causal=True,
                  blocks=Blocks())
        for h, hk in ((3, 1), (8, 2), (7, 1))
    ),
    *(
        DenseCase(name=f"blocks-headdim-{d}-{dv}", seqlen_q=140, seqlen_k=270, headdim=d, headdim_v=dv, nheads=1,
                  nheads_k=1, blocks=Blocks(density=0.4))
        for d, dv in ((16, 16), (59, 111), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (257, 300),
                      (512, 512))
    ),
    # Kept blocks hide single pairs.
    *(
        DenseCase(name=f"pairs-{m}x{n}-{q}x{k}", seqlen_q=q, seqlen_k=k, nheads=4, nheads_k=2, headdim=d, headdim_v=dv,
                  blocks=Blocks(axes, (m, n), density=0.8, pairs=0.5))
        for axes, m, n, q, k, d, dv in (("bh", 64, 64, 300, 500, 32, 32), ("1h", 128, 128, 129, 65, 64, 64),
                                        ("b1", 64, 192, 70, 333, 128, 96), ("11", 256, 64, 257, 130, 59, 111))
    ),
    DenseCase(name="pairs-causal", seqlen_q=330, seqlen_k=400, causal=True, blocks=Blocks(density=1.0, pairs=0.9)),
    DenseCase(name="pairs-few", seqlen_q=140, seqlen_k=300, blocks=Blocks(density=1.0, pairs=0.01), sinks=True),
    DenseCase(name="pairs-window-softcap", seqlen_q=300, seqlen_k=330, window=(150, 20), softcap=3.0,
              blocks=Blocks(density=0.9, pairs=0.5)),
    DenseCase(name="pairs-bias", seqlen_q=150, seqlen_k=200, blocks=Blocks(pairs=0.7), bias=Bias("bhqk")),
    DenseCase(name="pairs-one-query", seqlen_q=1, seqlen_k=300, blocks=Blocks(density=1.0, pairs=0.5)),
    DenseCase(name="pairs-wide", seqlen_q=70, seqlen_k=140, headdim=300, headdim_v=260, nheads=1, nheads_k=1,
              blocks=Blocks(density=1.0, pairs=0.5)),
    DenseCase(name="pairs-no-keys", seqlen_q=70, seqlen_k=0, blocks=Blocks(pairs=0.5)),
    DenseCase(name="blocks-causal-square", seqlen_q=513, seqlen_k=513, causal=True, blocks=Blocks(size=(128, 128))),
    DenseCase(name="blocks-causal-more-queries", seqlen_q=330, seqlen_k=140, causal=True, blocks=Blocks(density=0.7)),
    DenseCase(name="blocks-window", seqlen_q=400, seqlen_k=430, window=(150, 20), blocks=Blocks(density=0.6)),
    DenseCase(name="blocks-long", seqlen_q=1100, seqlen_k=1700, nheads=1, nheads_k=1, batch_size=1,
              blocks=Blocks(size=(128, 128), density=0.2)),
    # There are more blocks of keys than a CTA has threads, and few are kept.
    DenseCase(name="blocks-285-of-keys", seqlen_q=70, seqlen_k=18200, nheads=1, nheads_k=1, batch_size=1,
              blocks=Blocks(density=0.02)),
    # Tiles of 64 keys end where blocks end, the last one too.
    *(
        DenseCase(name=f"blocks-of-a-tile-{d}-{cap}", seqlen_q=130, seqlen_k=130, headdim=d, nheads=1, nheads_k=1,
                  softcap=cap, blocks=Blocks(size=(128, 64), density=1.0))
        for d, cap in ((64, 3.0), (192, 0.0))
    ),
    DenseCase(name="blocks-one-query", seqlen_q=1, seqlen_k=700, nheads=4, nheads_k=2, blocks=Blocks()),
    DenseCase(name="blocks-few-queries", seqlen_q=5, seqlen_k=300, nheads=8, nheads_k=1, blocks=Blocks(), causal=True),
    DenseCase(name="blocks-scores", seqlen_q=200, seqlen_k=300, nheads=4, nheads_k=2, softcap=3.0, sinks=True,
              alibi="per_sequence", causal=True, blocks=Blocks()),
    DenseCase(name="blocks-sinks", seqlen_q=200, seqlen_k=300, sinks=True, blocks=Blocks(density=0.2)),
    DenseCase(name="blocks-bias", seqlen_q=150, seqlen_k=200, blocks=Blocks(), bias=Bias("bhqk", hides="entries")),
    DenseCase(name="blocks-scale-negative", seqlen_q=150, seqlen_k=200, blocks=Blocks(), softmax_scale=-0.3),
    DenseCase(name="blocks-strides", seqlen_q=130, seqlen_k=200, blocks=Blocks(strided=True), memory_q="sliced_heads",
              memory_k="every_second_token"),
    DenseCase(name="blocks-empty-batch", seqlen_q=70, seqlen_k=70, batch_size=0, blocks=Blocks()),
    DenseCase(name="blocks-no-queries", seqlen_q=0, seqlen_k=70, blocks=Blocks()),
    DenseCase(name="blocks-no-keys", seqlen_q=70, seqlen_k=0, blocks=Blocks()),
    VarlenCase(name="blocks-varlen", seqlens_q=(1, 200, 0, 130), seqlens_k=(90, 330, 5, 64), causal=True,
               blocks=Blocks()),
    VarlenCase(name="blocks-varlen-slack", seqlens_q=(70, 200), seqlens_k=(190, 30), slack=100, nheads=4, nheads_k=1,
               blocks=Blocks("1h", (128, 64))),
    VarlenCase(name="blocks-varlen-window-scores", seqlens_q=(70, 200), seqlens_k=(190, 230), window=(100, 0),
               softcap=4.0, blocks=Blocks("b1")),
    VarlenCase(name="blocks-varlen-pages", seqlens_q=(150, 3), seqlens_k=(283, 70), nheads=4, nheads_k=2,
               page_block_size=16, causal=True, blocks=Blocks(size=(64, 128))),
]  # fmt: skip

# Like TILES and MANY_QUERIES of cases.py: every kernel that is compiled ahead for block masks.
BLOCK_TILES: list[Case] = [
    *(
        DenseCase(name=f"blocks-tiles-{d}-{q}", seqlen_q=q, seqlen_k=150, headdim=d, nheads=1, nheads_k=1,
                  batch_size=1, causal=q == 101, blocks=Blocks(size=(128, 128), density=0.8))
        for d in (32, 64, 96, 128, 192, 256, 512)
        for q in ((35, 101, 270) if d < 512 else (35,))
    ),
    *(
        DenseCase(name=f"blocks-many-queries-{d}", seqlen_q=8200, seqlen_k=70, headdim=d, nheads=1, nheads_k=1,
                  batch_size=1, window=(20, 8150), blocks=Blocks(size=(128, 128)))
        for d in (32, 64)
    ),
]  # fmt: skip
