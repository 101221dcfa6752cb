"""Attention over the ranks of a group: gloo, on a CPU."""
