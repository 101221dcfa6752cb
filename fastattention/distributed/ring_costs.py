"""What blocks of a call take where sums go round the ranks while each adds its own (transports/ring_product.py).

Plain Python. docs/internals/tensor-parallel-plan.md has the model.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, pairwise

from fastattention.distributed.costs import ComputeCost, RingCost, Workload
from fastattention.distributed.divisions import Blocks, in_a_ring
from fastattention.distributed.ring_order import steps
from fastattention.distributed.timeline import Event, Timeline


class RingCosts:
    """Of one rank; all have the same. Compute waits for sums, and so do fetches for each other."""

    def __init__(self, workload: Workload, compute: ComputeCost, transport: RingCost) -> None:
        self._workload, self._compute, self._transport = workload, compute, transport

    @property
    def serial_seconds(self) -> float:
        """Of all rows in one block."""
        return self.timeline(Blocks((self._workload.rows,))).seconds

    @property
    def all_reduce_seconds(self) -> float:
        """Of all rows in one block, without compute."""
        nothing = ComputeCost(0.0, 0.0, 0.0)
        return RingCosts(self._workload, nothing, self._transport).serial_seconds

    def best(self) -> tuple[float, Blocks]:
        """Seconds and blocks of the best of the divisions that are tried where calls run; infinity if there is none."""
        whole = Blocks((self._workload.rows,))
        found = ((self.timeline(blocks).seconds, blocks) for blocks in in_a_ring(self._workload).values())
        return min(found, default=(math.inf, whole))

    def timeline(self, blocks: Blocks) -> Timeline:
        """Of every block a product and a fetch for each step; the last fetch is from all others."""
        clock = link = 0.0
        computed, fetched = [], []
        here: dict[tuple[int, int], float] = {}
        attention = list(self._attention_seconds(blocks))
        ranks, slowdown = self._workload.tp, self._transport.slowdown
        for block, step in steps(len(blocks.rows), ranks):
            work = self._product_seconds(blocks.rows[block] / ranks) + (0.0 if step else attention[block])
            start = max(clock, here.get((block, step), 0.0))
            beside = min(work * (1 + slowdown), max(link - start, 0.0))
            clock = start + work + beside * (1 - 1 / (1 + slowdown))
            computed.append(Event(start, clock, block))
            begin = max(link, clock + self._transport.notice_seconds)
            fetches = ranks - 1 if step == ranks - 1 else 1
            link = begin + fetches * self._fetch_seconds(blocks.rows[block] / ranks)
            fetched.append(Event(begin, link, block))
            here[block, step + 1] = link
        met = fetched[-1]._replace(end=link + self._transport.notice_seconds)  # in the end all have to know
        return Timeline(tuple(computed), (*fetched[:-1], met))

    def _attention_seconds(self, blocks: Blocks) -> Iterator[float]:
        """By block: of the parts that begin with it."""
        workload, parts = self._workload, [0, *accumulate(blocks.attended or blocks.rows)]
        pairs = workload.visible_pairs(0, workload.rows)
        for first, past in pairwise(accumulate(blocks.rows, initial=0)):
            begin = parts[bisect_left(parts, first)]
            end = parts[bisect_left(parts, past)]
            share = workload.visible_pairs(begin, end) / pairs if pairs else (end - begin) / workload.rows
            added = sum(begin <= part < end and part > 0 for part in parts)
            yield self._compute.attention_seconds * share + self._compute.block_seconds * added

    def _product_seconds(self, rows: float) -> float:
        return self._compute.linear_seconds * rows / self._workload.rows + self._transport.product_seconds

    def _fetch_seconds(self, rows: float) -> float:
        return rows * self._workload.row_bytes / self._transport.bandwidth + self._transport.fetch_seconds
