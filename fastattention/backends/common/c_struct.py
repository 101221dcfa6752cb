"""Parameters of kernels as ctypes structures, read from the C header that declares them: its only declaration."""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

AnyParams = TypeVar("AnyParams", bound="Params")
Value = float | bytes | tuple[float, ...] | list[float]

_TYPES: dict[str, type[Any]] = {
    "int": ctypes.c_int32, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64,
    "float": ctypes.c_float, "double": ctypes.c_double,
}  # fmt: skip
_CODES = {ctypes.c_int32: "i", ctypes.c_int64: "q", ctypes.c_float: "f", ctypes.c_double: "d", ctypes.c_void_p: "Q"}


class Params(ctypes.Structure):
    """A structure of a header, see `params_of`. What calls of the same shapes have in common is kept as a template."""

    pointer_names: ClassVar[tuple[str, ...]]
    value_names: ClassVar[tuple[str, ...]]  # all other fields
    _value_set: ClassVar[frozenset[str]]
    _values: ClassVar[struct.Struct]
    _has_arrays: ClassVar[bool]

    @classmethod
    def template(cls, **values: Value) -> bytes:
        """The structure with null pointers. values: all other fields; arrays and structs by their items or bytes.

        Raises TypeError for a field that is missing or unknown, struct.error for a value that does not fit.
        """
        if values.keys() != cls._value_set:
            missing, unknown = cls._value_set - values.keys(), values.keys() - cls._value_set
            raise TypeError(f"{cls.__name__}: missing {sorted(missing)}, unknown {sorted(unknown)}")
        ordered = map(values.__getitem__, cls.value_names)
        if not cls._has_arrays:
            return cls._values.pack(*ordered)
        items = [value if isinstance(value, (tuple, list)) else (value,) for value in ordered]
        return cls._values.pack(*itertools.chain.from_iterable(items))

    @classmethod
    def make(cls: type[AnyParams], template: bytes, **addresses: int | tuple[int, ...]) -> AnyParams:
        """The structure of a template with these pointers; others are null. Raises TypeError for an unknown one."""
        params = cls.from_buffer_copy(template)
        for name, address in addresses.items():
            if name not in cls.pointer_names:
                raise TypeError(f"{cls.__name__} has no pointer {name}; it has {', '.join(cls.pointer_names)}")
            setattr(params, name, address)
        return params

    @classmethod
    def maker(cls: type[AnyParams], *names: str) -> Callable[..., AnyParams]:
        """`make` for calls that repeat: takes a template and the addresses of these pointers in order, 0 for null.

        It is ten times as fast as the constructor. Raises TypeError for names that are unknown or not in the header's
        order.
        """
        if names != tuple(name for name in cls.pointer_names if name in names):
            raise TypeError(f"{cls.__name__}: {names} are not in the order of its pointers, {cls.pointer_names}")
        begin = getattr(cls, names[0]).offset
        code = _code(cls, begin, names)
        between = [name for name in cls.value_names if begin <= getattr(cls, name).offset < begin + code.size]
        if between:
            raise TypeError(f"{cls.__name__}: {between} lie between pointers that are written together")
        pack_into, copy = code.pack_into, cls.from_buffer_copy

        def make(template: bytes, *addresses: int) -> AnyParams:
            params = copy(template)
            pack_into(params, begin, *addresses)
            return params

        return make


def _code(cls: type[Params], begin: int, names: Sequence[str], end: int | None = None) -> struct.Struct:
    """The format of some fields from byte `begin` on, with zeros between them. end: where the structure ends."""
    kinds: dict[str, Any] = dict(field[:2] for field in cls._fields_)
    at, codes = begin, "="
    for name in names:
        field, kind = getattr(cls, name), kinds[name]
        item, count = (kind._type_, kind._length_) if issubclass(kind, ctypes.Array) else (kind, 1)
        codes += f"{field.offset - at}x"
        codes += f"{field.size}s" if issubclass(item, Params) else f"{count}{_CODES[item]}"
        at = field.offset + field.size
    return struct.Struct(codes + (f"{end - at}x" if end is not None else ""))


@functools.cache
def params_of(header: Path, name: str) -> type[Params]:
    """A struct of a header, as the compiler lays it out. Raises ValueError for what this parser does not know."""
    structs = _declarations(header).structs
    fields: list[tuple[str, type[Any]]] = []
    for statement in filter(None, (part.strip() for part in structs[name].split(";"))):
        fields += _fields(header, structs, _declarations(header).constants, statement)
    pointers = tuple(field for field, kind in fields if getattr(kind, "_type_", kind) in (ctypes.c_void_p, "P"))
    values = tuple(field for field, _ in fields if field not in pointers)
    made: type[Params] = type(name, (Params,), {"_fields_": fields, "pointer_names": pointers, "value_names": values})
    made._has_arrays = any(issubclass(kind, ctypes.Array) for _, kind in fields)
    made._value_set = frozenset(values)
    made._values = _code(made, 0, values, ctypes.sizeof(made))
    return made


def constants_of(header: Path) -> Mapping[str, int]:
    """The integers that a header names, constexpr or in an enum."""
    return _declarations(header).constants


def structs_of(header: Path) -> tuple[str, ...]:
    """The names of the structs that a header declares."""
    return tuple(_declarations(header).structs)


class _Declarations(NamedTuple):
    constants: dict[str, int]
    structs: dict[str, str]  # name -> the text between the braces


_STATEMENTS = re.compile(
    r"""\s*(?:
    namespace\ \w+\ \{ | extern\ "C"\ \{ | \}
    | constexpr\ int(?:32_t|64_t)?\ (?P<constant>\w+)\ =\ (?P<value>-?\d+);
    | enum\ (?:\w+\ )?\{(?P<enum>[^{}]*)\};
    | (?:typedef\ )?struct\ (?P<struct>\w+)\ \{(?P<fields>[^{}]*)\}(?:\ \w+)?;
    )\s*""",
    re.VERBOSE,
)
_FIELDS = re.compile(r"(?:const )?(?P<type>\w+)(?P<pointer>\*?) (?P<names>\w+(?:\[\w+\])?(?:, \w+(?:\[\w+\])?)*)")


@functools.cache
def _declarations(header: Path) -> _Declarations:
    text = re.sub(r"//[^\n]*|/\*.*?\*/|^#[^\n]*", "", header.read_text(), flags=re.DOTALL | re.MULTILINE).strip()
    found, at = _Declarations({}, {}), 0
    while at < len(text):
        statement = _STATEMENTS.match(text, at)
        if statement is None:
            raise ValueError(f"{header}: cannot read {text[at : at + 60]!r}")
        if statement["constant"]:
            found.constants[statement["constant"]] = int(statement["value"])
        for enumerator in (statement["enum"] or "").split(","):
            if enumerator.strip():
                name, _, value = enumerator.partition("=")
                found.constants[name.strip()] = int(value)
        if statement["struct"]:
            found.structs[statement["struct"]] = statement["fields"]
        at = statement.end()
    return found


def _fields(
    header: Path, structs: Mapping[str, str], constants: Mapping[str, int], statement: str
) -> list[tuple[str, type[Any]]]:
    """The fields that one statement within a struct declares."""
    found = _FIELDS.fullmatch(" ".join(statement.split()))
    names = found["names"].split(", ") if found else []
    if found is None or (found["pointer"] and len(names) > 1):
        raise ValueError(f"{header}: cannot read the field {statement!r}")
    kind: type[Any] | None = ctypes.c_void_p if found["pointer"] else _TYPES.get(found["type"])
    if kind is None and found["type"] in structs:
        kind = params_of(header, found["type"])
    if kind is None:
        raise ValueError(f"{header}: fields are pointers, {', '.join(_TYPES)} or structs above, not {statement!r}")
    fields = []
    for declared in names:
        name, _, length = declared.removesuffix("]").partition("[")
        count = constants[length] if length in constants else int(length or 1)
        fields.append((name, kind * count if length else kind))
    return fields
