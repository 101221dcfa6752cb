"""The indexer: every backend against scores in float64."""
