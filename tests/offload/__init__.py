"""The cooperative cache, on a pretended device."""
