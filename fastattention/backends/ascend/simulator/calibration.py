"""The constants of the model, and the published cycle counts that two of them come from.

Published for a 910B2, float16, headdim 128, a tile of 128 queries and 256 keys: how long each of the four stages of a
tile takes, what a hand-over between Cube and Vector costs, and the launch and dispatch of a kernel. Nothing else was
fitted: latencies of whole kernels (published.py) are for validation. They were known, though, when the structure was
settled: shared ports, a shared L2 cache, and first writes to memory (docs/decisions/0068). So the validation is weaker
evidence than a blind one.

A stage's cycles follow from the rates of chips.py by the pipeline of core.py, with two constants:

- WRITE_SHARE, from Q K^T, most of whose time the scores leave L0C at the rate of writes to the L2 cache;
- SLICE_CYCLES, from the softmax, whose rates account for all but some 50 cycles a slice.

The product with values and the update of O have no constant of their own, so what is predicted for them is a check.
"""

from __future__ import annotations

from dataclasses import dataclass

LAUNCH_CYCLES = 10_900  # published: from the host's launch to the first block
DISPATCH_CYCLES = 2_000  # published, for a block; the model adds it for every row block, on a persistent grid too
HANDOVER_CYCLES = 220  # published: a synchronization, by the vendor's simulator; its fit to hardware has up to 1000
WRITE_SHARE = 0.958  # fitted to Q K^T: share of the nominal rate of writes to the L2 cache
SLICE_CYCLES = 52.0  # fitted to the softmax: a slice's seven Vector instructions filling their pipeline, row statistics
SOFTMAX_PASSES = 5  # passes over a slice at the Vector's rate: scale, row maximum, difference, row sum, conversion
MASK_PASSES = 2  # further passes where a mask is applied: its conversion and the selection


@dataclass(frozen=True)
class Costs:
    """The constants in cycles, which counterfactual runs change."""

    launch: float = LAUNCH_CYCLES
    dispatch: float = DISPATCH_CYCLES
    handover: float = HANDOVER_CYCLES  # half on the side that sets the flag, half on the side that waits for it
    slice: float = SLICE_CYCLES
    write_share: float = WRITE_SHARE
    product_share: float = 1.0  # share of the cost of writing, reading and adding the products with values
    first_writes: int = 0  # tiles of every row block whose workspace the cache does not hold yet


DEFAULT_COSTS = Costs()

# Stage -> cycles, as published for 128 queries, 256 keys and headdim 128.
PUBLISHED_STAGES = {"QK": 2487, "softmax": 2489, "PV": 1617, "O update": 834}
PUBLISHED_TILE = (128, 256, 128)  # queries, keys, headdim
