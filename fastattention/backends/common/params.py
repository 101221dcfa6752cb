"""ctypes structures for the arguments of kernels: pointers first, then numbers."""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from fastattention.attention.problem import Inputs
from fastattention.backends.common.layout import null_of

AnyParams = TypeVar("AnyParams", bound="Params")
Fields = list[tuple[str, type[Any]]]

_TYPES: dict[str, type[Any]] = {
    "Q": ctypes.c_void_p, "q": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float, "d": ctypes.c_double,
}  # fmt: skip
_CODES = {type_: code for code, type_ in _TYPES.items()}


class Params(ctypes.Structure):
    """One call's. What calls of the same shapes and strides have in common is kept as a template."""

    _pointers: ClassVar[struct.Struct]
    _rest: ClassVar[struct.Struct]

    @classmethod
    def template(cls, *values: float) -> bytes:
        """The structure without its pointers: every other field in order."""
        params = bytearray(ctypes.sizeof(cls))
        cls._rest.pack_into(params, cls._pointers.size, *values)
        return bytes(params)

    @classmethod
    def make(cls: type[AnyParams], template: bytes, *pointers: int) -> AnyParams:
        """The structure of a template with its pointers in order, 0 for null. Ten times faster than its constructor."""
        params = cls.from_buffer_copy(template)
        cls._pointers.pack_into(params, 0, *pointers)
        return params


class Addresses:
    """The addresses of a call: how they are taken from its tensors, and written into the first fields of its Params."""

    def __init__(self, params: type[ctypes.Structure], inputs: Inputs) -> None:
        """For calls that have the same tensors as `inputs`. Fields that are no tensors of theirs are given apart."""
        names = [field[0] for field in params._fields_ if field[1] is ctypes.c_void_p]
        given = [name for name in names if name in Inputs._fields and getattr(inputs, name) is not None]
        self.given = tuple(given)
        packed = struct.Struct("".join("8x" if name in Inputs._fields and name not in given else "Q" for name in names))
        self._tensors = operator.attrgetter(*given)
        self.pack, self.pack_into = packed.pack, packed.pack_into

    def of(self, inputs: Inputs) -> list[int]:
        """Those of the tensors, in their order. Raises RuntimeError for one without memory."""
        return [tensor.data_ptr() or null_of(tensor) for tensor in self._tensors(inputs)]


def fields(lengths: Mapping[str, int] | None = None, **names: str) -> Fields:
    """The fields of a structure: names by their type, Q a pointer, q and i integers of 64 and 32 bits, d and f floats.

    A name[x] is an array of lengths[x].
    """
    return [_field(name, _TYPES[code], lengths or {}) for code, listed in names.items() for name in listed.split()]


def _field(name: str, type_: type[Any], lengths: Mapping[str, int]) -> tuple[str, type[Any]]:
    single, _, length = name.removesuffix("]").partition("[")
    return single, type_ * lengths[length] if length else type_


def formats(listed: Fields) -> tuple[struct.Struct, struct.Struct]:
    """The struct formats of pointers and of all other fields: Params._pointers and Params._rest."""
    codes = "".join(_code(type_) for _, type_ in listed)
    num_pointers = codes.count("Q")
    return struct.Struct(codes[:num_pointers]), struct.Struct(codes[num_pointers:])


def _code(type_: Any) -> str:
    return _CODES[type_._type_] * type_._length_ if issubclass(type_, ctypes.Array) else _CODES[type_]
