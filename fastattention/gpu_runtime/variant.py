"""Variant: what can be compiled and launched, the source of a kernel with its compile-time parameters."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple


class Entry(NamedTuple):
    """A function of a compiled kernel, and how it is launched."""

    name: str
    num_warps: int
    shared_bytes: int
    overlaps: bool = False  # may start before the previous kernel has ended, and waits for it where it must


@dataclass(frozen=True)
class Variant:
    """A kernel and its compile-time parameters: the fields of a subclass. Equal ones are the same machine code.

    C++ reads every integer and boolean of a subclass as a member of `struct Config`: public fields, properties and
    constants of the class. Of strings and dtypes, properties say what C++ needs.
    """

    include_folders: ClassVar[tuple[Path, ...]]  # where headers are looked for; their contents are part of its identity

    @property
    def source(self) -> str:
        """The header that is compiled."""
        raise NotImplementedError

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its functions."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """A unique name: the kernel, and fields that differ from their defaults, by their initials."""
        parts = [self.source.removesuffix(".cuh")]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(_named(field.name, value))
        return "_".join(filter(None, parts))

    @property
    def declaration(self) -> str:
        """The C++ text that comes before the source."""
        names = (name for name in dir(self) if not name.startswith("_") and name not in vars(Variant))
        values = {name: value for name in names if isinstance(value := getattr(self, name), int)}
        members = (
            f"    static constexpr {type(x).__name__} {name} = {str(x).lower()};\n" for name, x in values.items()
        )
        # The preprocessor chooses the header of an architecture.
        header = f'#define FA_ARCH_HEADER "arch/sm{values["arch"]}.cuh"\n' if "arch" in values else ""
        return f"{header}namespace fastattention {{\nstruct Config {{\n{''.join(members)}}};\n}}\n"


def _named(field: str, value: object) -> str:
    initials = "".join(word[0] for word in field.split("_"))
    if isinstance(value, bool):
        return "" if not value else initials if "_" in field else field
    if isinstance(value, int):
        return f"sm{value}" if field == "arch" else f"{initials}{value}"
    return str(value).removeprefix("torch.")
