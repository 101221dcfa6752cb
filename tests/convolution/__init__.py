"""The causal convolution: every backend against the formula in float64."""
