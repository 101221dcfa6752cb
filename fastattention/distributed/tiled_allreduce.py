"""The loop: while the rows of one block are summed over the ranks, the next block is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fastattention.distributed.products import products_leave_free
from fastattention.distributed.transports.base import Pending, Transport

Compute = Callable[[int, int, Tensor], None]


def tiled_allreduce(compute: Compute, out: Tensor, rows: Sequence[int], transport: Transport, room: int = 0) -> None:
    """Fills `out` with the sum over all ranks of what `compute` gives, block by block.

    compute: writes this rank's share of rows [start, stop) to a tensor (stop - start, hidden).
    out: contiguous (rows, hidden).
    rows: of each block; the same on every rank. One block is computed, then summed.
    room: which of the transport's; likewise.

    Every sum that has begun is waited for, also when something fails; then the first error is raised.
    """
    partials = transport.begin(out, rows, room)
    if len(rows) == 1:
        compute(0, rows[0], partials)
        transport.all_reduce_now(partials, out)
        return
    pending: list[Pending] = []
    first_error: BaseException | None = None
    try:
        start = 0
        for count in rows:
            stop = start + count
            with products_leave_free(transport.rooms[room].left_free if pending else 0, out.device):
                compute(start, stop, partials[start:stop])
            pending.append(transport.all_reduce(partials[start:stop], out[start:stop]))
            for before in pending[-2:-1]:
                before.advance()
            start = stop
    except BaseException as error:
        first_error = error
    for each in pending:
        try:
            each.wait()
        except BaseException as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error
