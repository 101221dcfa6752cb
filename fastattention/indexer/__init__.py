"""The indexer of sparse attention: which keys each query attends to, as DeepSeek V3.2, GLM-5 and their kin choose them.

fast_indexer_func  the keys of the greatest index scores, for fast_attn_selected_func and fast_attn_latent_func

interface.py defines the arguments, validation.py checks them, operators.py declares the operator, backend.py lists the
backends, and reference.py defines the results.
"""

from fastattention.indexer.interface import fast_indexer_func

__all__ = ["fast_indexer_func"]
