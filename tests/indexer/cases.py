"""Cases of the indexer, by name."""

from __future__ import annotations

import torch

from fastattention.testing.indexer import IndexerCase

CASES = {
    "plain": IndexerCase(),
    "all-keys": IndexerCase(causal=False, nheads=17, headdim=17, batch_size=2, seqlen_q=3),
    "prompt": IndexerCase(seqlen_q=70, seqlen_k=70, topk=9, nheads=1),
    "decode": IndexerCase(batch_size=3, seqlen_q=1, seqlen_k=150, nheads=64, headdim=128, topk=64),
    "several-queries": IndexerCase(batch_size=2, seqlen_q=3, seqlen_k=200, nheads=30, topk=1),
    "long": IndexerCase(batch_size=2, seqlen_q=2, seqlen_k=4500, nheads=2, headdim=16, topk=300),
    "one-token": IndexerCase(seqlen_q=1, seqlen_k=1, nheads=1, headdim=1, topk=1),
    "no-query": IndexerCase(batch_size=2, seqlen_q=0),
    "no-key": IndexerCase(seqlen_k=0, batch_size=2),
    "no-sequence": IndexerCase(batch_size=0),
    "rows-without-keys": IndexerCase(batch_size=2, seqlen_q=9, seqlen_k=5, topk=2),
    "topk-of-all-keys": IndexerCase(seqlen_k=64, topk=64, causal=False),
    "topk-above-the-keys": IndexerCase(topk=100, headdim=72),
    "no-head": IndexerCase(nheads=0),
    "no-column": IndexerCase(headdim=0),
    "more-heads-than-a-warp-has": IndexerCase(nheads=70, headdim=72),
    "used": IndexerCase(batch_size=3, seqlen_q=2, seqlens_k=(150, 0, 7), used=True, topk=5),
    "varlen": IndexerCase(seqlens_q=(5, 0, 1, 12), seqlens_k=(33, 20, 0, 150), keys="varlen"),
    "varlen-all-keys": IndexerCase(seqlens_q=(1, 3, 2, 1, 20), seqlens_k=(40, 3, 17, 90, 25), keys="varlen",
                                   causal=False, nheads=16, topk=5),
    "varlen-used": IndexerCase(seqlens_q=(2, 2, 7), seqlens_k=(33, 5, 70), keys="varlen", used=True, topk=7),
    "varlen-queries": IndexerCase(seqlens_q=(4, 9, 0), seqlens_k=(70, 90, 20), used=True, nheads=33),
    "varlen-keys": IndexerCase(batch_size=3, seqlen_q=2, seqlens_k=(33, 2, 70), keys="varlen"),
    "varlen-all-empty": IndexerCase(seqlens_q=(0, 0), seqlens_k=(0, 0), keys="varlen"),
    "varlen-nothing": IndexerCase(seqlens_q=(), seqlens_k=(), keys="varlen"),
    "pages": IndexerCase(batch_size=3, seqlen_q=1, seqlens_k=(100, 0, 33), keys="pages", nheads=32, headdim=128),
    "pages-of-64": IndexerCase(batch_size=2, seqlen_q=3, seqlens_k=(64, 259), keys="pages", page_block_size=64),
    "varlen-pages": IndexerCase(seqlens_q=(6, 1, 11), seqlens_k=(50, 90, 11), keys="pages", page_block_size=7),
    "pages-of-one": IndexerCase(seqlen_q=2, seqlen_k=40, keys="pages", page_block_size=1, nheads=1, headdim=1),
    "heads-first": IndexerCase(layout="heads", weight_dtype=torch.bfloat16),
    "varlen-heads-first": IndexerCase(layout="heads", seqlens_q=(5, 12), seqlens_k=(33, 70), keys="varlen"),
    "gaps": IndexerCase(layout="gaps", seqlens_q=(5, 12), seqlens_k=(33, 70), used=True, weight_dtype=torch.float16),
    "odd-gaps": IndexerCase(layout="odd-gaps", seqlens_q=(3, 1), seqlens_k=(33, 70), keys="pages"),
}  # fmt: skip
