"""The short causal depthwise convolution in front of linear attention, as in Mamba-2, Qwen3-Next and Kimi-Linear.

causal_conv1d         prompts and training
causal_conv1d_update  decoding: a state with the newest inputs is updated in place

interface.py defines the arguments, validation.py checks them, operators.py declares the operators, backend.py lists the
backends, and reference.py defines the results.
"""

from fastattention.convolution.interface import causal_conv1d, causal_conv1d_update

__all__ = ["causal_conv1d", "causal_conv1d_update"]
