"""Cases of the causal convolution, by name."""

from __future__ import annotations

import torch

from fastattention.testing.convolution import ConvolutionCase

CASES = {
    "plain": ConvolutionCase(),
    "no-silu": ConvolutionCase(silu=False, width=3),
    "no-bias": ConvolutionCase(has_bias=False, width=2),
    "no-state": ConvolutionCase(initial_state=False, returns_state=False, batch_size=2),
    "zero-state": ConvolutionCase(initial_state=False, channels=17, width=3),
    "state-not-returned": ConvolutionCase(returns_state=False, seqlen=5),
    "no-token": ConvolutionCase(seqlen=0, batch_size=2, channels=17),
    "one-token": ConvolutionCase(seqlen=1, channels=3, width=3),
    "two-tokens": ConvolutionCase(seqlen=2, batch_size=3, channels=17),
    "three-tokens": ConvolutionCase(seqlen=3, channels=1, initial_state=False),
    "one-channel": ConvolutionCase(channels=1, width=2),
    "many-channels": ConvolutionCase(channels=1030, seqlen=5, batch_size=2),
    "long": ConvolutionCase(channels=3, seqlen=300, width=3),
    "varlen": ConvolutionCase(seqlens=(5, 0, 67, 1, 2, 30)),
    "varlen-zero-state": ConvolutionCase(seqlens=(1, 1, 0, 270, 3), initial_state=False, channels=3, width=2),
    "varlen-all-empty": ConvolutionCase(seqlens=(0, 0), channels=17),
    "varlen-nothing": ConvolutionCase(seqlens=(), channels=17),
    "channels-first": ConvolutionCase(layout="channels", batch_size=2, width=3),
    "gaps": ConvolutionCase(layout="gaps", batch_size=2, seqlen=5),
    "float-weight": ConvolutionCase(weight_dtype=torch.float32, batch_size=2),
    "bfloat16-weight": ConvolutionCase(weight_dtype=torch.bfloat16, width=3),
    "half-weight": ConvolutionCase(weight_dtype=torch.float16, width=2, seqlen=5),
}

UPDATES = {
    "decode": ConvolutionCase(batch_size=3, seqlen=1, returns_state=False),
    "longer-state": ConvolutionCase(seqlen=1, state_len=6, width=3, channels=17, returns_state=False),
    "several-tokens": ConvolutionCase(batch_size=2, seqlen=3, state_len=4, width=2, returns_state=False),
    "more-than-the-state": ConvolutionCase(seqlen=9, channels=3, silu=False, returns_state=False),
    "no-token": ConvolutionCase(seqlen=0, channels=17, returns_state=False),
    "float-state": ConvolutionCase(
        batch_size=2, seqlen=2, channels=1030, state_len=5, state_dtype=torch.float32, returns_state=False
    ),
}
