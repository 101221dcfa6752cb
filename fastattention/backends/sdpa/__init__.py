"""The sdpa backend: torch's own attention."""
