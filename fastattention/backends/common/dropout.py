"""Which weights dropout keeps: a pure function of the seed and of the weight's position, the same on every backend.

A weight is kept where its number of 16 bits is at least dropout_p * 2^16, rounded. A counter decides over the weights
of four keys and two queries, 8 apart each:

    counter = (key // 32 * 8 + key % 8, query // 16 * 8 + query % 8, head, sequence)
    word    = philox4x32(counter, seed)[key % 32 // 8]
    number  = its lower half where query % 16 < 8, otherwise its upper half

with queries and keys counted within their sequence. A lane of a matrix instruction holds weights of two queries and
several keys that are 8 apart, or of two keys and several queries, so it uses all that a counter gives. Philox is that
of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), with seven rounds, the fewest that pass their
tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85  # added to the key from round to round
_LOW = 0xFFFFFFFF
_KEYS, _QUERIES, _APART = 32, 16, 8


def kept(seed: Tensor, dropout_p: float, sequences: slice, nheads: int, rows: slice, keys: slice) -> Tensor:
    """True where a weight is kept: bool (sequences, nheads, rows, keys), on the device of seed.

    seed: int64 scalar
    rows, keys: slices with a start and a stop, as sequences
    """
    row_groups, key_groups = _groups(rows, _QUERIES), _groups(keys, _KEYS)
    counters = (
        torch.arange(_APART * key_groups.start, _APART * key_groups.stop, device=seed.device),
        torch.arange(_APART * row_groups.start, _APART * row_groups.stop, device=seed.device)[:, None],
        torch.arange(nheads, device=seed.device)[:, None, None],
        torch.arange(sequences.start, sequences.stop, device=seed.device)[:, None, None, None],
    )
    words = philox((seed & _LOW, seed >> 32 & _LOW), counters)
    # Rows are ordered by group, half and counter, keys by group, word and counter.
    halves = torch.stack([word >> shift & 0xFFFF for shift in (0, 16) for word in words])
    grouped = halves.view(2, 4, *halves.shape[1:3], len(row_groups), _APART, len(key_groups), _APART)
    numbers = grouped.permute(2, 3, 4, 0, 5, 6, 1, 7).flatten(5).flatten(2, 4)
    row, key = rows.start % _QUERIES, keys.start % _KEYS
    numbers = numbers[:, :, row : row + rows.stop - rows.start, key : key + keys.stop - keys.start]
    return numbers >= threshold(dropout_p)


def _groups(tokens: slice, size: int) -> range:
    """The groups of `size` tokens that hold some of these."""
    return range(tokens.start // size, -(-tokens.stop // size))


def threshold(dropout_p: float) -> int:
    """The lowest number of 16 bits whose weights are kept."""
    return min(round(dropout_p * 2**16), 2**16 - 1)


def philox(key: tuple[Tensor, Tensor], counters: tuple[Tensor, ...], rounds: int = 7) -> tuple[Tensor, ...]:
    """Four words of 32 bits, in int64, for every counter: four tensors of such words, which broadcast."""
    key0, key1 = key
    first, second, third, fourth = counters
    for _ in range(rounds):
        high0, low0 = _multiply(first, _MULTIPLIERS[0])
        high1, low1 = _multiply(third, _MULTIPLIERS[1])
        first, second, third, fourth = high1 ^ second ^ key0, low1, high0 ^ fourth ^ key1, low0
        key0, key1 = key0 + _WEYL[0] & _LOW, key1 + _WEYL[1] & _LOW
    return first, second, third, fourth


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The upper and lower 32 bits of products, which int64 holds but for their sign."""
    product = a * b
    return product >> 32 & _LOW, product & _LOW
