"""The order of the loop, seen by a transport that only takes notes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fastattention.distributed.transports import BlockTransport, Pending, Transfer


class Notes(BlockTransport):
    """Doubles rows in memory of its own, and fails where it is told to."""

    name = "notes"

    def __init__(self, fails: dict[str, BaseException] | None = None) -> None:
        self.log: list[str] = []
        self.fails = fails or {}

    def note(self, what: str) -> None:
        self.log.append(what)
        if what in self.fails:
            raise self.fails[what]

    def why_not(self, transfer: Transfer) -> str | None:
        return None

    def begin(self, out: Tensor, rows: Sequence[int], room: int = 0) -> Tensor:
        assert sum(rows) == len(out)
        self.note(f"begin {list(rows)}")
        return torch.full_like(out, torch.nan)

    def all_reduce(self, partial: Tensor, out: Tensor) -> Pending:
        first, last = int(partial[0, 0]), int(partial[-1, 0])
        self.note(f"sum {first}-{last}")
        return _Note(self, f"{first}-{last}", partial, out)

    def compute(self, start: int, stop: int, partial: Tensor, *, adds: bool = False) -> None:
        assert not adds
        self.note(f"compute {start}-{stop - 1}")
        partial.copy_(torch.arange(start, stop)[:, None].expand_as(partial))


class _Note(Pending):
    def __init__(self, notes: Notes, rows: str, partial: Tensor, out: Tensor) -> None:
        self.notes, self.rows, self.partial, self.out = notes, rows, partial, out

    def advance(self) -> None:
        self.notes.note(f"advance {self.rows}")

    def wait(self) -> None:
        self.notes.note(f"wait {self.rows}")
        torch.mul(self.partial, 2.0, out=self.out)


def run(notes: Notes, rows: tuple[int, ...] = (2, 3, 1)) -> Tensor:
    out = torch.full((sum(rows), 4), torch.nan)
    notes.run(notes.compute, out, rows)
    return out


def test_a_block_is_being_summed_while_the_next_is_computed_and_all_are_waited_for() -> None:
    notes = Notes()
    out = run(notes)
    computed = ["compute 0-1", "sum 0-1", "compute 2-4", "sum 2-4", "compute 5-5", "sum 5-5"]
    log = [entry for entry in notes.log if not entry.startswith("advance")]
    assert log == ["begin [2, 3, 1]", *computed, "wait 0-1", "wait 2-4", "wait 5-5"]
    assert torch.equal(out, 2.0 * torch.arange(6.0)[:, None].expand(6, 4))


def test_a_sum_is_advanced_once_that_of_the_next_block_has_begun() -> None:
    notes = Notes()
    run(notes, (2, 3, 1, 4))
    sums = [entry for entry in notes.log if not entry.startswith(("begin", "compute"))]
    assert sums[:7] == ["sum 0-1", "sum 2-4", "advance 0-1", "sum 5-5", "advance 2-4", "sum 6-9", "advance 5-5"]
    assert sums[7:] == ["wait 0-1", "wait 2-4", "wait 5-5", "wait 6-9"]  # which advances the last


def test_one_block_is_summed_at_once() -> None:
    notes = Notes()
    out = run(notes, (6,))
    assert notes.log == ["begin [6]", "compute 0-5", "sum 0-5", "wait 0-5"]
    assert torch.equal(out, 2.0 * torch.arange(6.0)[:, None].expand(6, 4))


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("where", ["compute 2-4", "sum 2-4", "advance 0-1", "compute 5-5", "advance 2-4"])
def test_sums_that_have_begun_are_waited_for_when_a_later_block_fails(where: str, error: BaseException) -> None:
    notes = Notes({where: error})
    with pytest.raises(type(error)) as raised:
        run(notes)
    assert raised.value is error
    begun = [entry.removeprefix("sum ") for entry in notes.log if entry.startswith("sum ") and entry != where]
    assert begun
    assert notes.log[notes.log.index(where) + 1 :] == [f"wait {rows}" for rows in begun]


def test_every_sum_is_waited_for_when_one_of_them_fails_and_the_first_error_is_raised() -> None:
    first, second = RuntimeError("first"), RuntimeError("second")
    notes = Notes({"wait 0-1": first, "wait 5-5": second})
    with pytest.raises(RuntimeError) as raised:
        run(notes)
    assert raised.value is first
    assert notes.log[-3:] == ["wait 0-1", "wait 2-4", "wait 5-5"]


def test_an_error_of_compute_is_not_hidden_by_those_of_the_sums_it_leaves_behind() -> None:
    first = RuntimeError("first")
    notes = Notes({"compute 2-4": first, "wait 0-1": RuntimeError("second")})
    with pytest.raises(RuntimeError) as raised:
        run(notes)
    assert raised.value is first
