"""What can be compiled and launched: the source of a kernel, with what it is compiled with."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol


class Entry(NamedTuple):
    """A function of a compiled kernel, and how it is launched."""

    name: str
    num_threads: int
    shared_bytes: int
    overlaps: bool = False  # may start before the kernel before it has ended: it waits where it must


class Variant(Protocol):
    """Anything that can be compiled and loaded. Equal ones are the same machine code."""

    include_folders: ClassVar[tuple[Path, ...]]  # where headers are looked for; their contents are part of its identity

    @property
    def name(self) -> str:
        """A readable name, unique among variants."""

    @property
    def source(self) -> str:
        """The header that is compiled."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its functions."""

    def macros(self) -> dict[str, str]:
        """What it is compiled with."""

    def __hash__(self) -> int: ...
