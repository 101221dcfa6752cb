"""The implementations of attention that `fastattention bench` compares, in the order of its tables; ours is first."""

from __future__ import annotations

from fastattention.cli.bench.peers.base import Peer, PreparedPeer
from fastattention.cli.bench.peers.fast import FASTATTENTION, PACKED_CACHE, TOKENS_FIRST
from fastattention.cli.bench.peers.ggml import GGML
from fastattention.cli.bench.peers.openvino import OPENVINO
from fastattention.cli.bench.peers.torch_peers import EAGER, FOLDED_SDPA, MATMUL, PADDED_SDPA, SDPA, SDPA_LOOP

ALL_PEERS = (
    FASTATTENTION, PACKED_CACHE, TOKENS_FIRST, SDPA, FOLDED_SDPA, MATMUL, EAGER, SDPA_LOOP, PADDED_SDPA, OPENVINO, GGML
)  # fmt: skip

__all__ = ["ALL_PEERS", "EAGER", "FASTATTENTION", "SDPA", "Peer", "PreparedPeer"]
