"""Linear attention: gated linear attention (GLA), the gated delta rule and Kimi delta attention (KDA), on any device.

chunk_gla, chunk_gated_delta_rule, chunk_kda              chunks of tokens, for prompts and training
recurrent_gla, recurrent_gated_delta_rule, recurrent_kda  token by token, for decoding

interface.py defines the arguments, gates.py functions of gates, validation.py checks them, operator.py declares the
operator, backend.py lists the backends, and reference.py defines the results.
"""

from fastattention.linear.interface import (
    chunk_gated_delta_rule,
    chunk_gla,
    chunk_kda,
    recurrent_gated_delta_rule,
    recurrent_gla,
    recurrent_kda,
)

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "recurrent_gated_delta_rule",
    "recurrent_gla",
    "recurrent_kda",
]
