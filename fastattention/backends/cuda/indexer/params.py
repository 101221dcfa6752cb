"""The arguments of the kernels of the indexer, as kernels/indexer_params.h declares them."""

from __future__ import annotations

from pathlib import Path

from fastattention.backends.common.c_struct import params_of

IndexerParams = params_of(Path(__file__).parent / "kernels" / "indexer_params.h", "IndexerParams")
