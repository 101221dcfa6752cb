"""Decode from a paged cache: each call appends a token in place, then attends.

    python examples/paged_cache.py

Two sequences of different lengths share one pool of pages. A block table lists the pages of each sequence, in order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastattention import fast_attn_with_kvcache

PAGE_BLOCK_SIZE, NHEADS, NHEADS_K, HEADDIM = 16, 8, 2, 64
PROMPTS, NEW_TOKENS = (37, 5), 20


def main() -> None:
    torch.manual_seed(0)
    pages_k, pages_v = (torch.zeros(12, PAGE_BLOCK_SIZE, NHEADS_K, HEADDIM) for _ in range(2))
    block_table = torch.tensor([[7, 2, 9, 4], [0, 11, 3, 5]], dtype=torch.int32)  # (batch_size, max_blocks_per_seq)
    longest = max(PROMPTS) + NEW_TOKENS
    all_q = torch.randn(2, longest, NHEADS, HEADDIM)
    all_k, all_v = (torch.randn(2, longest, NHEADS_K, HEADDIM) for _ in range(2))

    for sequence, length in enumerate(PROMPTS):
        rows = slice(sequence, sequence + 1)
        fast_attn_with_kvcache(
            all_q[rows, :length], pages_k, pages_v, all_k[rows, :length], all_v[rows, :length],
            cache_seqlens=0, block_table=block_table[rows], causal=True,
        )  # fmt: skip

    cache_seqlens = torch.tensor(PROMPTS, dtype=torch.int32)
    both = torch.arange(2)
    for _ in range(NEW_TOKENS):
        q, k, v = (each[both, cache_seqlens].unsqueeze(1) for each in (all_q, all_k, all_v))  # (2, 1, heads, headdim)
        out = fast_attn_with_kvcache(
            q, pages_k, pages_v, k, v, cache_seqlens=cache_seqlens, block_table=block_table, causal=True
        )
        cache_seqlens += 1

    for sequence, length in enumerate(cache_seqlens.tolist()):
        # torch's attention over the tokens without pages: (heads, tokens, headdim)
        q, k, v = all_q[sequence, length - 1 : length], all_k[sequence, :length], all_v[sequence, :length]
        q, k, v = (each.transpose(0, 1) for each in (q, k, v))
        expected = F.scaled_dot_product_attention(q[None], k[None], v[None], enable_gqa=True)
        torch.testing.assert_close(out[sequence].transpose(0, 1), expected[0], rtol=1e-4, atol=1e-5)
        print(f"sequence {sequence}: {length} tokens, last token as torch computes it")


if __name__ == "__main__":
    main()
