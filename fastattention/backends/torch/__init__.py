"""Operators in plain PyTorch, for any device: the fallback of linear attention."""
