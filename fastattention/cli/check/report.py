"""The report file. It is written before and after every entry, so that a crash or a hang loses nothing."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastattention.cli.check.privacy import Anonymiser
from fastattention.cli.console import first_line
from fastattention.errors import UnsupportedError
from fastattention.files import write_atomically

Entry = dict[str, Any]
Note = Callable[[Entry], None]
BAD = ("wrong", "failed")
STATES = ("right", "refused", *BAD)  # states of a call; a speed is "measured" or "skipped"


class CheckReport:
    """Facts about a machine, and one entry for each call or measurement on it. The last may be "running"."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path = path
        self.facts = facts
        self.entries: list[Entry] = []
        self.stopped: str | None = None  # why not everything was tried
        self._anonymise = Anonymiser.of_this_machine()
        self._write()

    def attempt(self, known: Entry, run: Callable[[Note], Entry]) -> Entry:
        """The entry that `run` returns, with its state. An error in it is recorded, and does not end the check.

        known: what the file holds while it runs; run: may add to that by the function that it gets.
        """
        entry = {**known, "state": "running"}
        self.entries.append(entry)
        self._write()

        def note(more: Entry) -> None:
            entry.update(more)
            self._write()

        begin = time.perf_counter()
        try:
            entry.update(run(note))
        except UnsupportedError as error:
            # A backend refused a call that it had said to serve: that is a fault.
            entry.update(state="failed" if "served_by" in entry else "refused", reason=str(error))
        except Exception as error:  # compilers and drivers may raise anything
            reason = f"{type(error).__name__}: {first_line(error)}"
            entry.update(state="failed", reason=reason, traceback=traceback.format_exc())
        entry.setdefault("seconds", time.perf_counter() - begin)
        self._write()
        return entry

    def stop(self, reason: str) -> None:
        """Records why the rest is not tried."""
        self.stopped = reason
        self._write()

    def summary(self) -> str:
        """For example "38 of 40 right, 2 refused, 0 wrong, 0 failed"."""
        counts = Counter(entry["state"] for entry in self.entries)
        tried = sum(counts[state] for state in STATES)
        return ", ".join([f"{counts['right']} of {tried} right", *(f"{counts[one]} {one}" for one in STATES[1:])])

    def bad(self) -> list[Entry]:
        """Entries that are wrong, or failed."""
        return [entry for entry in self.entries if entry["state"] in BAD]

    def finish(self) -> None:
        """Adds the summary, which a report that was cut short does not have."""
        self.facts = {**self.facts, "summary": self.summary()}
        self._write()

    def _write(self) -> None:
        content = {**self.facts, "stopped": self.stopped, "entries": self.entries}
        text = json.dumps(_strict(self._anonymise(content)), indent=1, allow_nan=False)
        write_atomically(self.path, (text + "\n").encode())


def _strict(value: Any) -> Any:
    """`value` with text for infinities and NaN, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _strict(one) for name, one in value.items()}
    return [_strict(one) for one in value] if isinstance(value, (list, tuple)) else value
