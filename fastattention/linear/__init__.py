"""Linear attention: GLA, the gated delta rule, Kimi delta attention (KDA) and Mamba-2 (SSD), on any device.

chunk_gla, chunk_gated_delta_rule, chunk_kda, chunk_ssd                  chunks of tokens, for prompts and training
recurrent_gla, recurrent_gated_delta_rule, recurrent_kda, recurrent_ssd  token by token, for decoding

interface.py defines the arguments, gates.py functions of gates, ssd.py what Mamba-2's arguments mean, validation.py
checks them, operator.py declares the operator, backend.py lists the backends, and reference.py defines the results.
"""

from fastattention.linear.interface import (
    chunk_gated_delta_rule,
    chunk_gla,
    chunk_kda,
    chunk_ssd,
    recurrent_gated_delta_rule,
    recurrent_gla,
    recurrent_kda,
    recurrent_ssd,
)

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_ssd",
    "recurrent_gated_delta_rule",
    "recurrent_gla",
    "recurrent_kda",
    "recurrent_ssd",
]
