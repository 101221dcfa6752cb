"""Tensor-parallel attention."""
