"""The order in which c10d computes and sums blocks, recorded by a fake communicator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fastattention.distributed.transports.c10d import C10d


class Notes(C10d):
    """A transport that records operations, doubles rows when they are waited for, and fails where told to."""

    def __init__(self, fails: dict[str, BaseException] | None = None) -> None:
        self.log: list[str] = []
        self.fails = fails or {}

    def note(self, what: str) -> None:
        self.log.append(what)
        if what in self.fails:
            raise self.fails[what]

    def _all_reduce(self, rows: Tensor, asynchronous: bool) -> SimpleNamespace:
        what = f"{int(rows[0, 0])}-{int(rows[-1, 0])}"
        self.note(f"sum {what}" if asynchronous else f"sum {what} now")

        def wait() -> None:
            self.note(f"wait {what}")
            rows.mul_(2.0)

        return SimpleNamespace(wait=wait)

    def compute(self, start: int, stop: int, partial: Tensor, *, adds: bool = False) -> None:
        assert not adds
        self.note(f"compute {start}-{stop - 1}")
        partial.copy_(torch.arange(start, stop)[:, None].expand_as(partial))


def run(notes: Notes, rows: tuple[int, ...] = (2, 3, 1)) -> Tensor:
    out = torch.full((sum(rows), 4), torch.nan)
    notes.run(notes.compute, out, rows)
    return out


@pytest.mark.parametrize(
    ("rows", "log"),
    [
        ((2, 3, 1), "compute 0-1, sum 0-1, compute 2-4, sum 2-4, compute 5-5, sum 5-5, wait 0-1, wait 2-4, wait 5-5"),
        ((6,), "compute 0-5, sum 0-5 now, wait 0-5"),  # on the current stream
    ],
    ids=["blocks", "one-block"],
)
def test_a_block_is_summed_while_the_next_is_computed(rows: tuple[int, ...], log: str) -> None:
    notes = Notes()
    assert torch.equal(run(notes, rows), 2.0 * torch.arange(6.0)[:, None].expand(6, 4))
    assert ", ".join(notes.log) == log


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize(
    "fails",
    [("compute 2-4",), ("sum 2-4",), ("compute 5-5",), ("wait 0-1", "wait 5-5"), ("compute 5-5", "wait 0-1")],
    ids=", ".join,
)
def test_every_sum_is_waited_for_and_the_first_error_raised(fails: tuple[str, ...], error: BaseException) -> None:
    notes = Notes({fails[-1]: RuntimeError("second"), fails[0]: error})
    with pytest.raises(type(error)) as raised:
        run(notes)
    assert raised.value is error
    begun = [entry.removeprefix("sum ") for entry in notes.log if entry.startswith("sum ") and entry not in fails]
    assert begun
    assert notes.log[-len(begun) :] == [f"wait {rows}" for rows in begun]


def test_rows_with_gaps_are_never_summed() -> None:
    """gloo would accept them, and change the memory between."""
    with pytest.raises(AssertionError):
        C10d._all_reduce(Notes(), torch.zeros(4, 8)[:, :4], asynchronous=False)
