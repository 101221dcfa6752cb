"""The order in which c10d computes and sums blocks, seen by a communicator that only takes notes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastattention.distributed.transports.c10d import C10d


class Notes(C10d):
    """Doubles rows when they are waited for, and fails where it is told to."""

    def __init__(self, fails: dict[str, BaseException] | None = None) -> None:
        self.log: list[str] = []
        self.fails = fails or {}

    def note(self, what: str) -> None:
        self.log.append(what)
        if what in self.fails:
            raise self.fails[what]

    def _all_reduce(self, rows: Tensor, asynchronous: bool) -> Work:
        what = f"{int(rows[0, 0])}-{int(rows[-1, 0])}"
        self.note(f"sum {what}" if asynchronous else f"sum {what} now")
        return Work(self, what, rows)

    def compute(self, start: int, stop: int, partial: Tensor, *, adds: bool = False) -> None:
        assert not adds
        self.note(f"compute {start}-{stop - 1}")
        partial.copy_(torch.arange(start, stop)[:, None].expand_as(partial))


class Work:
    """A sum that has begun."""

    def __init__(self, notes: Notes, what: str, rows: Tensor) -> None:
        self.notes, self.what, self.rows = notes, what, rows

    def wait(self) -> None:
        self.notes.note(f"wait {self.what}")
        self.rows.mul_(2.0)


def run(notes: Notes, rows: tuple[int, ...] = (2, 3, 1)) -> Tensor:
    out = torch.full((sum(rows), 4), torch.nan)
    notes.run(notes.compute, out, rows)
    return out


@pytest.mark.parametrize("rows", [(2, 3, 1), (6,)], ids=["blocks", "one-block"])
def test_every_block_is_summed(rows: tuple[int, ...]) -> None:
    assert torch.equal(run(Notes(), rows), 2.0 * torch.arange(6.0)[:, None].expand(6, 4))


def test_a_block_is_being_summed_while_the_next_is_computed() -> None:
    notes = Notes()
    run(notes)
    computed = ["compute 0-1", "sum 0-1", "compute 2-4", "sum 2-4", "compute 5-5", "sum 5-5"]
    assert notes.log == [*computed, "wait 0-1", "wait 2-4", "wait 5-5"]


def test_one_block_is_summed_on_the_current_stream() -> None:
    notes = Notes()
    run(notes, (6,))
    assert notes.log == ["compute 0-5", "sum 0-5 now", "wait 0-5"]


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("where", ["compute 2-4", "sum 2-4", "compute 5-5"])
def test_sums_that_have_begun_are_waited_for_when_a_block_fails(where: str, error: BaseException) -> None:
    notes = Notes({where: error})
    with pytest.raises(type(error)) as raised:
        run(notes)
    assert raised.value is error
    begun = [entry.removeprefix("sum ") for entry in notes.log if entry.startswith("sum ") and entry != where]
    assert begun
    assert notes.log[notes.log.index(where) + 1 :] == [f"wait {rows}" for rows in begun]


@pytest.mark.parametrize("fails", [("wait 0-1", "wait 5-5"), ("compute 5-5", "wait 0-1")], ids=str)
def test_every_sum_is_waited_for_and_the_first_error_raised(fails: tuple[str, str]) -> None:
    first = RuntimeError("first")
    notes = Notes({fails[0]: first, fails[1]: RuntimeError("second")})
    with pytest.raises(RuntimeError) as raised:
        run(notes)
    assert raised.value is first
    assert [entry for entry in notes.log if entry.startswith("wait")][:2] == ["wait 0-1", "wait 2-4"]


def test_rows_with_gaps_are_never_summed() -> None:
    """gloo would take them, and change what lies between."""
    with pytest.raises(AssertionError):
        C10d._all_reduce(Notes(), torch.zeros(4, 8)[:, :4], asynchronous=False)
