"""Attention over the ranks of a tensor-parallel group, its all-reduce hidden under the attention of later rows."""
