"""The cuda backend of linear attention."""
