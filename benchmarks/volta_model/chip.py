"""The model's figures of a V100, each with its source; guesses are marked.

Sources, by the letter in the comment of a figure:

    W  NVIDIA, "Tesla V100 GPU architecture", white paper, 2017
    T  NVIDIA, "Volta tuning guide": instructions take two cycles in their unit; a scheduler issues one a cycle
    G  NVIDIA, "CUDA C++ programming guide", throughput and limits of compute capability 7.0
    N  NVIDIA, "Nsight Compute", its list of pipelines and stall reasons: which unit executes what
    J  Jia, Maggioni, Staiger, Scarpazza, "Dissecting the NVIDIA Volta GPU architecture via microbenchmarking", 2018
    S  Zhang, Wahib, Zhang, Matsuoka, "A study of single and multi-device synchronization methods in NVIDIA GPUs", 2020
    H  Huerta, Abaie Shoushtary, Cruz, González, "Dissecting and modeling the architecture of modern GPU cores", 2025:
       measured on Turing, Ampere and Blackwell; taken for Volta where nothing older is known
    M  measured on a V100 by others, collected in docs/internals/volta.md
    ?  a guess; the comment says what depends on it

None of them was fitted to a published speed of a kernel. Not all sources were read:

- The text of H was read.
- All others are quoted from memory, without the papers at hand, and are still to be checked. Five figures of J were
  found again in works that cite it: the L1 cache after 28 cycles and the second-level one with 2155 GB/s (the Cornell
  Virtual Workshop, "Understanding GPU architecture", which names J's tables 3.1, 3.2 and 3.4), shared memory after 19
  cycles and 83% of the DRAM's peak (notes of a reader of J). J has the L2 cache after 193 cycles where M has 211.
- The table of throughputs in G (exponentials, conversions) was looked for and not found in a version with 7.0.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One GPU. Times are in cycles of its clock, widths in bytes."""

    num_sms: int = 80  # W
    # Boost clock of the SXM2 module (W). The clock of the published figures is unknown. A PCIe card boosts to 1380 (W),
    # which lowers all speeds, but not equally: memory keeps its own clock (assumptions.py has the ratios).
    clock_mhz: int = 1530
    num_schedulers: int = 4  # W: each with its own units, one instruction a cycle
    warp_threads: int = 32

    # Resident CTAs (G).
    registers: int = 65536
    register_unit: int = 256  # registers are allocated to warps in this unit
    max_warps: int = 64
    max_ctas: int = 32
    shared_bytes: int = 96 * 1024
    shared_unit: int = 256

    # Units of a scheduler: cycles that an instruction of a warp keeps its unit busy.
    fma_interval: float = 2  # W, T: 16 lanes; FADD, FMUL, FFMA, IMAD (N)
    alu_interval: float = 2  # W, T: 16 lanes; integers, comparisons, minima, selections (N)
    half_interval: float = 2  # G: 128 results a cycle and SM, two a lane
    double_interval: float = 4  # W: 8 lanes
    # W, G: 4 lanes, 16 results a cycle and SM. Exponentials, and all conversions of types, F2F.F16.F32 too (N).
    special_interval: float = 8
    # M: an m8n8k4, four steps, every 8.38 cycles; its peak rate (W) is one every 8.
    tensor_interval: float = 8.38 / 4
    special_latency: int = 18  # ? until a scoreboard is released: dependent exponentials 14 (J), queue and release 4

    # The queue to the units that a multiprocessor's schedulers share, shared memory above all. Exponentials wait in it
    # too (N, stall reason "MIO throttle").
    queue_length: int = 5  # H
    queue_delay: int = 2  # H: stages between issue and queue
    access_interval: float = 4  # W: 32 load/store units a SM, 8 of a scheduler; H measured 4
    transfer_width: int = 64  # H: bytes a cycle between a scheduler's registers and memory
    shared_width: int = 128  # G: bytes a cycle of shared memory, for all schedulers together
    shared_latency: int = 26  # M: from the issue of a load of 4 bytes a lane to that of an instruction that needs it
    shuffle_latency: int = 22  # S
    read_latency: int = 9  # H: from leaving the queue to the release of the scoreboard of operands read

    # Global memory. Loads are assumed to hit the L2 cache; DRAM bounds the whole kernel from below.
    l2_latency: int = 211  # M
    l2_gbps: float = 2155.0  # J, of all SMs
    dram_gbps: float = 900.0 * 0.83  # W; J reads 83% of it
    l1_share: float = 0.0  # ? share of loads that hit the L1 cache, which CTAs of an SM could share
    l1_latency: int = 28  # J: the L1 cache, which the stack always hits
    constant_latency: int = 29  # H: loads of constants

    barrier_latency: int = 22  # S: BAR.SYNC, from the last arrival
    special_register_latency: int = 20  # ? S2R; in prologues only
    branch_latency: int = 8  # ? refilling after a taken branch; some ten a tile

    # Instructions (J): 16 bytes each; 12 KB of a scheduler, in front of 128 KB of the SM.
    l0_bytes: int = 12 * 1024
    line_bytes: int = 128
    fetch_latency: int = 30  # ? from the 128 KB to a scheduler
    fetch_width: int = 64  # ? bytes a cycle that the 128 KB give to all schedulers together
    prefetch_lines: int = 8  # H: the best fit to Turing and Ampere

    launch_cycles: int = 4500  # ? 3 us from the start of a kernel to the start of its first CTA, as timed on a stream

    @property
    def l2_bytes_a_cycle(self) -> float:
        """Bytes a cycle that one SM gets from the L2 cache when all read."""
        return self.l2_gbps * 1e3 / (self.clock_mhz * self.num_sms)


V100 = Chip()
