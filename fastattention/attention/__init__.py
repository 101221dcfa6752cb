"""Attention: its public functions, problem, validation and reference."""
