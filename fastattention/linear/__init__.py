"""Linear attention: gated linear attention (GLA) and the gated delta rule, exact, on any device.

chunk_gla, chunk_gated_delta_rule          chunks of tokens, for prompts and training
recurrent_gla, recurrent_gated_delta_rule  token by token, for decoding

interface.py defines the arguments, validation.py checks them, operator.py declares the operator, backend.py lists the
backends, and reference.py defines the results.
"""

from fastattention.linear.interface import (
    chunk_gated_delta_rule,
    chunk_gla,
    recurrent_gated_delta_rule,
    recurrent_gla,
)

__all__ = ["chunk_gated_delta_rule", "chunk_gla", "recurrent_gated_delta_rule", "recurrent_gla"]
