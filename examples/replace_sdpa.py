"""Replace torch's scaled_dot_product_attention in a model of your own.

    python examples/replace_sdpa.py

Three things change: heads come after tokens, grouped heads need no option, and `is_causal` is `causal`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattention import explain, fast_attn_func


class Attention(nn.Module):
    """Causal self-attention of 8 query heads, which share 2 key/value heads."""

    def __init__(self, hidden: int, headdim: int = 64) -> None:
        super().__init__()
        self.headdim = headdim
        self.q_proj = nn.Linear(hidden, 8 * headdim)
        self.k_proj = nn.Linear(hidden, 2 * headdim)
        self.v_proj = nn.Linear(hidden, 2 * headdim)
        self.o_proj = nn.Linear(8 * headdim, hidden)

    def forward(self, x: Tensor, use_sdpa: bool = False) -> Tensor:
        # (batch_size, seqlen, heads, headdim)
        q, k, v = (layer(x).unflatten(-1, (-1, self.headdim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if use_sdpa:  # before
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        else:  # after
            out = fast_attn_func(q, k, v, causal=True)
        projected: Tensor = self.o_proj(out.flatten(2))
        return projected


def main() -> None:
    torch.manual_seed(0)
    layer = Attention(hidden=256)
    x = torch.randn(2, 300, 256)
    with torch.inference_mode():
        before, after = layer(x, use_sdpa=True), layer(x)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    print(f"largest difference: {(after - before).abs().max():.1e}")
    print(explain(torch.randn(2, 300, 8, 64), *(torch.randn(2, 300, 2, 64) for _ in range(2)), causal=True))


if __name__ == "__main__":
    main()
