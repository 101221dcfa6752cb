"""Chooses how a convolution is divided among CTAs, for a problem and a GPU. Needs no GPU."""

from __future__ import annotations

from typing import NamedTuple

from fastattention.backends.cuda.convolution.config import WARPS, ConvolutionConfig
from fastattention.convolution.problem import ConvolutionProblem

# Tokens of a range. A thread reads width - 1 tokens before its range: of 16 tokens a fifth more, of 256 a hundredth.
_RANGE_TOKENS = (256, 128, 64, 32, 16)
# Warps for each multiprocessor that keep its memory bandwidth busy.
_BUSY_WARPS = 32


class Division(NamedTuple):
    """How CTAs share out the tokens and channels of a call."""

    num_warps: int  # of a CTA
    range_tokens: int  # of a CTA, at most
    ranges_of_row: int  # ranges of a row of the batch
    num_ranges: int  # of all rows, or of all sequences of a varlen call: at least one for each sequence
    channel_tiles: int  # CTAs that share the channels

    @property
    def num_ctas(self) -> int:
        """CTAs of the launch."""
        return self.num_ranges * self.channel_tiles


def divide(problem: ConvolutionProblem, num_sms: int) -> Division:
    """The longest ranges of tokens, and the widest CTAs, that keep all multiprocessors busy.

    An update has one range: it reads a state before it writes it.
    """
    lengths = (max(problem.seqlen, 1),) if problem.updates else _RANGE_TOKENS
    narrow, wide = WARPS
    divided = [_division(problem, wide, tokens) for tokens in lengths]
    busy = [one for one in divided if one.num_ctas * wide >= _BUSY_WARPS * num_sms]
    return busy[0] if busy else _division(problem, narrow, lengths[-1])


def _division(problem: ConvolutionProblem, num_warps: int, range_tokens: int) -> Division:
    ranges_of_row = max(-(-problem.seqlen // range_tokens), 1)
    num_ranges = problem.batch_size * ranges_of_row
    if problem.varlen:  # kernels/filters.cuh says why as many are enough
        num_ranges = problem.seqlen // range_tokens + problem.num_sequences if problem.num_sequences else 0
    cta_channels = ConvolutionConfig(problem.dtype, problem.width, num_warps).cta_channels
    return Division(num_warps, range_tokens, ranges_of_row, num_ranges, -(-problem.channels // cta_channels))
