"""The cooperative cache, on a fake device."""
