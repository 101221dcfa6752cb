"""Which weights dropout keeps: a pure function of the seed and of the weight's position, the same on every backend.

A weight is kept where its word is at least dropout_p * 2^32. Sixteen counters decide over 64 neighbouring keys:

    counter = (key // 64 * 16 + key % 16, query, head, sequence)
    word    = philox4x32(counter, seed)[key % 64 // 16]

with queries and keys counted within their sequence. So vectors of sixteen keys and fragments of matrix instructions use
their words in order. Philox is that of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), with
seven rounds, the fewest that pass their tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85  # added to the key from round to round
_LOW = 0xFFFFFFFF
_GROUP, _LANES = 64, 16


def kept(seed: Tensor, dropout_p: float, sequences: slice, nheads: int, rows: slice, keys: slice) -> Tensor:
    """True where a weight is kept: bool (sequences, nheads, rows, keys), on the device of seed.

    seed: int64 scalar. The slices have a start and a stop.
    """
    first, last = keys.start // _GROUP, -(-keys.stop // _GROUP)
    counters = (
        torch.arange(first * _LANES, last * _LANES, device=seed.device),
        torch.arange(rows.start, rows.stop, device=seed.device)[:, None],
        torch.arange(nheads, device=seed.device)[:, None, None],
        torch.arange(sequences.start, sequences.stop, device=seed.device)[:, None, None, None],
    )
    words = philox((seed & _LOW, seed >> 32 & _LOW), counters)
    grouped = [word.reshape(*word.shape[:-1], last - first, _LANES) for word in words]
    inner = torch.stack(grouped, dim=-2).flatten(-3)  # (sequences, nheads, rows, keys of whole groups)
    begin = keys.start - first * _GROUP
    return inner[..., begin : begin + keys.stop - keys.start] >= round(dropout_p * 2**32)


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
