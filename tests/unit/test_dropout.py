"""The weights that dropout keeps: known words of the generator, its rate, and dependence on positions only."""

from __future__ import annotations

import pytest
import torch

from fastattention.backends.common.dropout import kept, philox

SEED = torch.tensor(0x3243F6A8885A308D)
WHOLE = slice(0, 3), 2, slice(0, 40), slice(0, 300)


# Known answers that the authors of Philox publish with Random123: counter and key zeros, ones, and digits of pi.
@pytest.mark.parametrize(
    ("rounds", "counter", "key", "words"),
    [
        (7, "0 0 0 0", "0 0", "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (10, "0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (10, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (10, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_words(rounds: int, counter: str, key: str, words: str) -> None:
    first, second = (torch.tensor(int(word, 16)) for word in key.split())
    counters = tuple(torch.tensor(int(word, 16)) for word in counter.split())
    assert " ".join(f"{int(word):08x}" for word in philox((first, second), counters, rounds)) == words


def test_a_part_of_the_mask_is_the_same_by_itself() -> None:
    mask = kept(SEED, 0.4, *WHOLE)
    for sequences, rows, keys in (
        (slice(1, 3), slice(7, 9), slice(63, 65)),
        (slice(2, 3), slice(0, 40), slice(100, 299)),
    ):
        assert torch.equal(kept(SEED, 0.4, sequences, 2, rows, keys), mask[sequences, :, rows, keys])


@pytest.mark.parametrize("key", [291, 299, 31, 16])
@pytest.mark.parametrize(("row", "shift"), [(33, 0), (26, 16)])
def test_a_number_is_half_a_word_of_its_counter(row: int, shift: int, key: int) -> None:
    """Other implementations of the same mask rely on it."""
    batch, head = 2, 1
    place = (key // 32 * 8 + key % 8, row // 16 * 8 + row % 8, head, batch)
    words = philox((SEED & 0xFFFFFFFF, SEED >> 32), tuple(torch.tensor(x) for x in place))
    number = int(words[key % 32 // 8]) >> shift & 0xFFFF
    for dropout_p, expected in ((number / 2**16, True), ((number + 1) / 2**16, False)):
        assert kept(SEED, dropout_p, *WHOLE)[batch, head, row, key] == expected


def test_a_rate_near_one_keeps_few_weights_and_one_near_zero_all() -> None:
    """Numbers are multiples of 2^-16."""
    assert not kept(SEED, 1.0 - 1e-9, *WHOLE)[0, 0, 0].any()
    assert kept(SEED, 1e-6, *WHOLE).all()


@pytest.mark.parametrize("dropout_p", [0.001, 0.1, 0.5, 0.999])
def test_weights_are_dropped_at_the_rate_asked_for(dropout_p: float) -> None:
    mask = kept(SEED, dropout_p, slice(0, 4), 4, slice(0, 256), slice(0, 1024))
    deviation = (dropout_p * (1.0 - dropout_p) / mask.numel()) ** 0.5
    assert abs(float((~mask).double().mean()) - dropout_p) < 5.0 * deviation


def test_neighbours_and_seeds_are_independent() -> None:
    mask = kept(SEED, 0.5, slice(0, 2), 2, slice(0, 256), slice(0, 512)).double() * 2.0 - 1.0
    other = kept(SEED + 1, 0.5, slice(0, 2), 2, slice(0, 256), slice(0, 512)).double() * 2.0 - 1.0
    by_key = (mask[..., apart:] * mask[..., :-apart] for apart in (1, 8, 16, 32))
    by_row = (mask[..., apart:, :] * mask[..., :-apart, :] for apart in (1, 8, 16))
    for product in (*by_key, *by_row, mask[:, 1] * mask[:, 0], mask[1] * mask[0], mask * other):
        assert abs(float(product.mean())) < 5.0 / product.numel() ** 0.5
