"""Cases of linear attention, by name."""

from __future__ import annotations

from dataclasses import replace

from fastattention.testing.linear import LinearCase


def _every_rule() -> dict[str, LinearCase]:
    base = {
        "plain": LinearCase(),
        "one-token": LinearCase(seqlen=1, initial_state=True),
        "no-token": LinearCase(seqlen=0, initial_state=True),
        "odd": LinearCase(seqlen=157, headdim_k=40, headdim_v=24, nheads=3, nheads_k=3, initial_state=True),
        "headdim-128": LinearCase(seqlen=131, headdim_k=128, headdim_v=128, initial_state=True),
        "headdim-256": LinearCase(seqlen=67, headdim_k=256, headdim_v=256, nheads=1, nheads_k=1),
        "narrow-keys": LinearCase(seqlen=65, headdim_k=16, headdim_v=128, nheads=1, nheads_k=1),
        "headdim-1": LinearCase(seqlen=50, headdim_k=1, headdim_v=1),
        "grouped": LinearCase(batch_size=2, seqlen=70, nheads=6, nheads_k=2, initial_state=True),
        "varlen": LinearCase(seqlens=(5, 0, 64, 1, 97), initial_state=True),
        "strong-gates": LinearCase(seqlen=120, gates=100.0, initial_state=True),
        "weak-gates": LinearCase(seqlen=200, gates=1e-4),
        "no-state": LinearCase(returns_state=False),
        "scale": LinearCase(scale=0.7),
        "strides": LinearCase(batch_size=2, seqlen=75, layout="heads"),
        "gates-in-dtype": LinearCase(seqlen=80, gate_dtype=None),
    }
    return {
        f"{rule}-{name}": replace(case, rule=rule)
        for rule in ("delta", "head", "key", "kda", "ssd")
        for name, case in base.items()
    }


CASES = _every_rule() | {
    "delta-no-l2norm": LinearCase(l2norm=False, initial_state=True),
    "kda-no-l2norm": LinearCase("kda", l2norm=False, initial_state=True),
}
