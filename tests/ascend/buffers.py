"""The least that a kernel holds in the buffers of an AI Core, counted in its MLIR, independently of tiling.py.

It is a lower bound: a result replaces an operand that is not used again, constants take no room, and a double buffer
counts twice only where the vendor's compiler must have both at once. The compiler may keep more. The rows of a tile of
scores are halved between the Vector units and cut into slices; tiles of keys and values are cut into parts for the
Cube. The options give the number of parts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ascend.lowering import Lowered

_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i32": 4, "i8": 1, "i1": 1}
_TILE = re.compile(r"(?:tensor|memref)<((?:\d+x)+(?:f32|f16|bf16|i32|i8|i1))>")
_DEFINITION = re.compile(r" *(%[\w-]+) = ([\w.]+) ")
_PRODUCT = re.compile(r"linalg\.matmul .*?ins\(.*? : tensor<(.*?)>, tensor<(.*?)>\) outs\(.*? : tensor<(.*?)>\)")
# Operations without memory of their own: constants, names for parts of memory, and what the Cube does with its tiles.
_FREE = ("tensor.empty", "linalg.fill", "memref.subview", "memref.reinterpret_cast", "bufferization.to_tensor")


class _Product(NamedTuple):
    """Bytes of the tiles of a matrix product."""

    left: int
    right: int
    result: int


def held(lowered: Lowered, options: Mapping[str, Any]) -> dict[str, int]:
    """Bytes by buffer that the loop over keys holds: L0C, L1, and UB of each Vector unit."""
    scores, output = (_Product(*map(_bytes, tiles)) for tiles in _PRODUCT.findall(lowered.text))
    parts, copies = options["tile_mix_cube_loop"], 2 if options["multibuffer"] else 1
    keys_or_values = max(scores.right, output.right)
    head, body = _main_loop(lowered.text)
    carried = sum(map(_bytes, _TILE.findall(head.partition("->")[2])))
    rows = re.match(r"\d+x", _PRODUCT.findall(lowered.text)[0][0])
    assert rows is not None
    slices = _most_alive(body, rows[0]) // options["tile_mix_vector_loop"]
    return {
        "L0C": max(scores.result // parts, output.result),
        "L1": scores.left + output.left + copies * keys_or_values // parts,
        "UB": (carried + slices) // 2,
    }


def _bytes(tile: str) -> int:
    *sizes, element = tile.split("x")
    count = _BYTES[element]
    for size in sizes:
        count *= int(size)
    return count


def _main_loop(text: str) -> tuple[str, list[str]]:
    """The line that begins the loop over keys, and its lines."""
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if "scf.for" in line and "tensor<" in line)
    indent = " " * (len(lines[begin]) - len(lines[begin].lstrip()))
    end = next(number for number in range(begin + 1, len(lines)) if lines[number].startswith(indent + "}"))
    return lines[begin], lines[begin + 1 : end]


def _most_alive(body: list[str], rows: str) -> int:
    """The most bytes that are alive between two lines, of tiles with as many rows as scores have."""
    alive = [0] * len(body)
    for number, line in enumerate(body):
        definition = _DEFINITION.match(line)
        tiles = _TILE.findall(line)
        if definition is None or not tiles or definition[2] in _FREE or not tiles[-1].startswith(rows):
            continue
        for place in range(number, _last_use(definition[1], body, number)):
            alive[place] += _bytes(tiles[-1])
    return max(alive)


def _last_use(name: str, body: list[str], defined: int) -> int:
    """The last line that names a value, before another value of the same name is defined in a neighbouring region."""
    last = defined
    for number in range(defined + 1, len(body)):
        if re.search(rf"{re.escape(name)}\b", body[number]):
            if body[number].lstrip().startswith(f"{name} = "):
                break
            last = number
    return last
