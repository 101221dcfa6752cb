"""Builds the benchmark pages of the documentation and README's chart from the files in benchmarks/results."""
