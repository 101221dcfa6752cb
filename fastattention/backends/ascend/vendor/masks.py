"""Translates a window to the operators' arguments, and finds the queries that see no key.

Both operators take a mask as sparse_mode and, for the modes used here, the one mask tile of 2048 x 2048:

    0  without a mask: every query sees every key
    3  bottom-right aligned causal
    4  a band, bottom-right aligned: query i sees keys from i + seqlen_k - seqlen_q - pre_tokens to
       i + seqlen_k - seqlen_q + next_tokens, so pre_tokens is the left side of a window and next_tokens the right

That the band is counted from the bottom right, and not from the top left as in mode 0 with a full mask, is in the page
"sparse_mode" of CANN's documentation of operators.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

UNLIMITED = 2**31 - 1  # the operators' default for pre_tokens and next_tokens


class SparseMode(enum.IntEnum):
    """The values of sparse_mode in use."""

    NO_MASK = 0
    CAUSAL = 3
    BAND = 4


class SparseMask(NamedTuple):
    """A mask as the operators take it; NO_MASK and CAUSAL ignore the tokens."""

    mode: SparseMode
    pre_tokens: int = UNLIMITED
    next_tokens: int = UNLIMITED


def sparse_mask(window_left: int, window_right: int, seqlen_q: int, seqlen_k: int) -> SparseMask:
    """The mask of a window, for sequences of at most seqlen_q queries and seqlen_k keys.

    A side that hides nothing is as good as unlimited: the last query reaches the first key with window_left =
    seqlen_k - 1, the first query the last key with window_right = seqlen_q - 1. A band that has one unlimited side is
    given the longest side there is and not UNLIMITED, to which the operator might add a length.
    """
    left_hides = 0 <= window_left < seqlen_k - 1
    right_hides = 0 <= window_right < seqlen_q - 1
    if not left_hides and not right_hides:
        return SparseMask(SparseMode.NO_MASK)
    if not left_hides and window_right == 0:
        return SparseMask(SparseMode.CAUSAL)
    pre_tokens = window_left if left_hides else seqlen_k
    return SparseMask(SparseMode.BAND, pre_tokens, window_right if right_hides else seqlen_q)


def rows_without_keys(seqlen_q: int, seqlen_k: int, window_right: int) -> int:
    """How many of a sequence's queries see no key. They are its first ones.

    A bottom-right aligned window loses keys for early queries only: the last query always stands at the last key.
    Without these rows the sequence is the same problem with fewer queries, since the alignment is that of its end.
    """
    if seqlen_k == 0:
        return seqlen_q
    if window_right == -1:
        return 0
    return min(seqlen_q, max(0, seqlen_q - seqlen_k - window_right))
