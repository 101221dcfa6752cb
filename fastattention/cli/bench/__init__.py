"""Benchmarks: workloads, peers that compute them, interleaved timing, error against float64, tables, pictures."""
