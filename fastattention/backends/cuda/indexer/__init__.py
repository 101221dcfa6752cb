"""The cuda backend of the indexer."""
