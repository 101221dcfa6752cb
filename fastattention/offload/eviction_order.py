"""The order in which layers are evicted from the device."""

from __future__ import annotations


def eviction_order(count: int) -> list[int]:
    """0 to count - 1 in an order whose prefixes are all spread over the depth: the last, the middle, the quarters.

    The upload of a layer can take as long as the layers since the last evicted one. An evicted layer does not come
    back, so evicted layers of a shorter sequence are among those of a longer one. This is the van der Corput sequence,
    from the
    end: after 0 come 1/2, 1/4, 3/4, 1/8, 5/8, 3/8, 7/8.
    """
    order = dict.fromkeys(_index(step, count) for step in range(2 * count))  # several steps may give the same index
    assert len(order) == count
    return list(order)


def _index(step: int, count: int) -> int:
    """The layer at a fraction of the depth, counted from the end: the bits of `step` in reverse order."""
    whole = 1 << step.bit_length()
    backwards = int(f"{step:b}"[::-1], 2)
    return -(-count * (whole - backwards) // whole) - 1
