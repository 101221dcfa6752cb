"""Run code that was written for flash-attn, unchanged and without a GPU.

    python examples/flash_attn_unchanged.py

`varlen_attention` below is such code: it removes padding, attends, and puts the padding back.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import fastattention.integrations.flash_attn

fastattention.integrations.flash_attn.install()  # before anything imports flash_attn


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    """Causal attention of padded sequences, in the words of flash-attn."""
    from flash_attn import flash_attn_varlen_func
    from flash_attn.bert_padding import pad_input, unpad_input

    batch_size, seqlen = attention_mask.shape
    q, indices, cu_seqlens, max_seqlen, _ = unpad_input(q, attention_mask)
    k, v = (unpad_input(each, attention_mask)[0] for each in (k, v))
    out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)
    padded: Tensor = pad_input(out, indices, batch_size, seqlen)
    return padded


def main() -> None:
    torch.manual_seed(0)
    lengths = (60, 100)
    q, k, v = (torch.randn(2, 100, 4, 64) for _ in range(3))
    attention_mask = torch.arange(100) < torch.tensor(lengths).unsqueeze(1)
    out = varlen_attention(q, k, v, attention_mask)
    for sequence, length in enumerate(lengths):
        sq, sk, sv = (each[sequence : sequence + 1, :length].transpose(1, 2) for each in (q, k, v))
        expected = F.scaled_dot_product_attention(sq, sk, sv, is_causal=True).transpose(1, 2)
        torch.testing.assert_close(out[sequence, :length], expected[0], rtol=1e-4, atol=1e-5)
        assert not out[sequence, length:].any()
        print(f"sequence {sequence}: {length} tokens as torch computes them, {100 - length} rows of padding are 0")


if __name__ == "__main__":
    main()
