"""The backward kernels of PyTorch's CUTLASS attention for sm_70, out of the same wheel as the forward (peer.py).

PyTorch tries its kernels in a fixed order and takes the first that allows the call (kernels/cutlassB.h and
attention_backward.cu in its sources). For float16 in rows that start at multiples of 16 bytes, without dropout:

    headdim up to 32     fmha_cutlassB_f16_aligned_64x64_k32_seqaligned_sm70
    headdim up to 64     fmha_cutlassB_f16_aligned_64x64_k64_seqaligned_sm70
    headdim up to 128    fmha_cutlassB_f16_aligned_128x64_k128_seqaligned_sm70
    more                 fmha_cutlassB_f16_aligned_128x64_k65536_sm70

"seqaligned" asks for dense sequences that are whole tiles long; others take the same kernel with bounds checks. The
last two could be refused for more shared memory than a CTA may have: they use some 40 of the 96 KB.

Each kernel computes all three gradients with five products a tile. A CTA has a tile of keys, and queries pass by. dk
and dv stay in registers. dq is a float32 tile in global memory, which a lock guards: every CTA loads it, adds its
product and stores it. P and dS pass through shared memory, because the four or eight warps share out every product in
pieces of 32 x 32. There is a CTA for every tile of keys, and each computes delta of all queries before its loop.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from . import peer
from .flow import Loop, loops, steady_path, tile_loop
from .sass import Function, Instruction

_STEP = 32  # step of the inner dimension of a product, once around its loop


@dataclass(frozen=True)
class BackwardPeer:
    """One of the kernels, with addresses in its machine code."""

    name: str
    file: str  # file of the cubin
    tile_m: int  # queries of a tile
    tile_n: int  # keys of a CTA
    max_headdim: int
    num_warps: int
    registers: int
    shared_bytes: int  # of a CTA, added up from the addresses it uses
    # Loops of products, by the dimension that they go over.
    over_columns: tuple[int, int]  # q k^T, do v^T
    over_queries: tuple[int, int]  # p^T do, ds^T q
    over_keys: int  # ds k
    dq_loop: int | None  # over parts of dq's columns, as wide as a tile of keys, around the loop over keys
    delta_loop: int  # over tiles of queries, before the main loop
    through: frozenset[int]
    around: frozenset[int]
    causal_mask: int  # the block that a tile on the diagonal runs besides

    def trips(self, headdim: int) -> dict[int, int]:
        """How often the loops of products run, by header."""
        trips = dict.fromkeys(self.over_columns, -(-headdim // _STEP))
        trips |= dict.fromkeys(self.over_queries, self.tile_m // _STEP)
        trips[self.over_keys] = self.tile_n // _STEP
        if self.dq_loop is not None:
            trips[self.dq_loop] = -(-headdim // self.tile_n)
        return trips

    def path(self, function: Function, headdim: int) -> list[Instruction]:
        """The instructions of the first warp of a CTA for an unmasked tile of queries, neither the first nor the last.

        It finds the lock open. No CTA before it has finished this tile.
        """
        loop, trips = tile_loop(function), self.trips(headdim)
        path = steady_path(loop, trips, self.through, self.around | {self.causal_mask})
        return without_last_prefetches(loop, trips, path)

    def delta_path(self, function: Function) -> list[Instruction]:
        """The instructions of a warp for delta of a tile of queries, for a headdim that is a multiple of 8."""
        loop = next(loop for loop in loops(function) if loop.header == self.delta_loop)
        return steady_path(loop, {})


def without_last_prefetches(loop: Loop, trips: dict[int, int], path: list[Instruction]) -> list[Instruction]:
    """A path with the loads of the last trip around a product's loop switched off: CUTLASS clears their predicates."""
    owner = {
        instruction.address: trips[inner.header]
        for inner in loop.nested()
        if not inner.inner and inner.hmma
        for block in inner.blocks.values()
        for instruction in block.instructions
        if instruction.name == "LDG"
    }
    seen: Counter[int] = Counter()
    result = []
    for instruction in path:
        of_loop = owner.get(instruction.address)
        if of_loop is not None:
            seen[instruction.address] += 1
            if seen[instruction.address] % of_loop == 0:
                instruction = instruction.switched_off()
        result.append(instruction)
    return result


# `through`, in order: delta of the tile to shared memory, the lock taken, the sum of dq stored, the lock released, and
# twice the choice of the next tile in a call without a mask, whose CTAs begin with different queries.
# `around`, in order: bias, window, gradient of the bias, waiting for the lock, dq in float16 by the last CTA, its
# counter, and for 64 columns how many CTAs a causal call has.
KERNELS = (
    BackwardPeer(
        name="fmha_cutlassB_f16_aligned_64x64_k64_seqaligned_sm70",
        file="attention_backward_k64_sm70.cubin",
        tile_m=64,
        tile_n=64,
        max_headdim=64,
        num_warps=4,
        registers=224,
        shared_bytes=24_832,
        over_columns=(0x41F0, 0xA890),
        over_queries=(0x8E10, 0x11A10),
        over_keys=0xF170,
        dq_loop=None,
        delta_loop=0x2350,
        through=frozenset({0x3910, 0xE840, 0x10860, 0x109F0, 0x12D90, 0x130B0}),
        around=frozenset({0x5100, 0x6160, 0xCD00, 0xE8C0, 0x10A30, 0x10550, 0x10610}),
        causal_mask=0x5B80,
    ),
    BackwardPeer(
        name="fmha_cutlassB_f16_aligned_128x64_k128_seqaligned_sm70",
        file="attention_backward_k128_sm70.cubin",
        tile_m=128,
        tile_n=64,
        max_headdim=128,
        num_warps=8,
        registers=240,
        shared_bytes=41_472,
        over_columns=(0x5D60, 0xC330),
        over_queries=(0xA840, 0x135A0),
        over_keys=0x11090,
        dq_loop=0x10910,
        delta_loop=0x35A0,
        through=frozenset({0x5370, 0x10990, 0x124B0, 0x12650, 0x148C0, 0x14BF0}),
        around=frozenset({0x6BE0, 0x7C40, 0xE7E0, 0x109F0, 0x126A0, 0x12390}),
        causal_mask=0x7660,
    ),
)


def serving(headdim: int) -> BackwardPeer:
    """The kernel that PyTorch takes on a V100 for a head dimension, a multiple of 8 from 40 to 128."""
    return next(kernel for kernel in KERNELS if headdim <= kernel.max_headdim)


def function(kernel: BackwardPeer) -> Function:
    """Its machine code. Raises CompileError like peer.find_kernel; ValueError for a loop without five products."""
    found = peer.find_kernel(kernel.file, kernel.name)
    loop = tile_loop(found)
    products = {inner.header for inner in loop.nested() if not inner.inner and inner.hmma}
    if products != {*kernel.over_columns, *kernel.over_queries, kernel.over_keys}:
        raise ValueError(f"{kernel.name} has its products in loops at {', '.join(map(hex, sorted(products)))}")
    return found
