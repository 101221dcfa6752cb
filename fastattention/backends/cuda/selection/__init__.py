"""The cuda backend of the selection."""
