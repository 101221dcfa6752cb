"""llama.cpp's engine as a peer, through its operator ggml_flash_attn_ext."""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

import fastattention
from fastattention.cli.bench.peers.base import Peer, PreparedPeer, is_decode, is_dense
from fastattention.cli.bench.peers.ggml_library import Ggml, InitParams, load
from fastattention.cli.bench.workload import BenchWorkload, Tensors

# enum ggml_type
GGML_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
NUM_TENSORS, ALIGNMENT = 5, 64  # q, k, v, mask and the result; padding of each, at most


class GgmlGraph:
    """One flash attention, its tensors (batch_size, heads, seqlen, headdim), and a CPU backend to run it."""

    def __init__(self, ggml: Ggml, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
        data_bytes = sum(tensor.nbytes for tensor in (q, k, v, mask) if tensor is not None) + q.nbytes
        overhead = ggml.base.ggml_graph_overhead() + NUM_TENSORS * (ggml.base.ggml_tensor_overhead() + ALIGNMENT)
        self._ggml = ggml
        self._backend = ggml.cpu.ggml_backend_cpu_init()
        weakref.finalize(self, ggml.base.ggml_backend_free, self._backend)
        ggml.cpu.ggml_backend_cpu_set_n_threads(self._backend, fastattention.get_num_threads())
        self._context = ggml.base.ggml_init(InitParams(data_bytes + overhead, None, False))
        weakref.finalize(self, ggml.base.ggml_free, self._context)
        inputs = [None if tensor is None else self._copied(tensor) for tensor in (q, k, v, mask)]
        self._out = ggml.base.ggml_flash_attn_ext(self._context, *inputs, q.shape[-1] ** -0.5, 0.0, 0.0)
        # The result is (batch_size, seqlen_q, heads, headdim), float32.
        self._out_shape = (q.shape[0], q.shape[2], q.shape[1], v.shape[-1])
        self._graph = ggml.base.ggml_new_graph(self._context)
        ggml.base.ggml_build_forward_expand(self._graph, self._out)

    def compute(self) -> None:
        """Run the graph. Raises RuntimeError with ggml's status when it fails."""
        status = self._ggml.base.ggml_backend_graph_compute(self._backend, self._graph)
        if status:
            raise RuntimeError(f"ggml_backend_graph_compute returned status {status}")

    def out(self) -> Tensor:
        """What the last `compute` left, copied."""
        out = torch.empty(self._out_shape, dtype=torch.float32, device="cpu")
        ctypes.memmove(out.data_ptr(), self._ggml.base.ggml_get_data(self._out), out.nbytes)
        return out

    def _copied(self, tensor: Tensor) -> int:
        # ggml counts dimensions from the fastest.
        made = self._ggml.base.ggml_new_tensor_4d(self._context, GGML_TYPES[tensor.dtype], *reversed(tensor.shape))
        contiguous = tensor.contiguous()
        ctypes.memmove(self._ggml.base.ggml_get_data(made), contiguous.data_ptr(), contiguous.nbytes)
        return int(made)


def prepare(workload: BenchWorkload, tensors: Tensors) -> PreparedPeer:
    """Queries and results are float32, as the operator demands; keys and values have the dtype of the workload."""
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
    mask = _causal_mask(workload) if workload.causal and not is_decode(workload) else None
    graph = GgmlGraph(_loaded(), q.float(), k, v, mask)
    return PreparedPeer(graph.compute, lambda _: graph.out())


def _causal_mask(workload: BenchWorkload) -> Tensor:
    """The mask that is added to the scores: float16 (1, 1, seqlen_q, seqlen_k)."""
    seqlen_q, seqlen_k = workload.seqlens_q[0], workload.seqlens_k[0]
    hidden = torch.full((seqlen_q, seqlen_k), float("-inf"), dtype=torch.float16, device="cpu")
    mask = hidden.triu(1 + seqlen_k - seqlen_q)
    return mask[None, None]


def _loaded() -> Ggml:
    ggml = load()
    assert isinstance(ggml, Ggml)
    return ggml


def _why_unavailable() -> str | None:
    ggml = load()
    return ggml if isinstance(ggml, str) else None


GGML = Peer("ggml", is_dense, prepare, lambda: _loaded().version, _why_unavailable)
