"""The cuda backend of the causal convolution."""
