"""OpenVINO as a peer: its scaled dot product attention operator, compiled for the CPU."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

import fastattention
from fastattention.cli.bench.peers.base import Peer, PreparedPeer, is_decode, is_dense
from fastattention.cli.bench.workload import BenchWorkload, Tensors
from fastattention.cli.machine import installed_version

ELEMENT_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def prepare(workload: BenchWorkload, tensors: Tensors) -> PreparedPeer:
    """A model of one operator. float16 is computed in float32, as the CPU device does where it lacks float16."""
    openvino = importlib.import_module("openvino")
    inputs = [tensor.transpose(1, 2).contiguous() for tensor in tensors]
    request = _compiled(openvino, workload, inputs).create_infer_request()
    for index, tensor in enumerate(inputs):
        request.set_input_tensor(index, _shared(openvino, tensor))

    def call(kept: object = inputs) -> None:  # the request reads the memory of its inputs without owning it
        request.infer()

    return PreparedPeer(call, lambda _: _output(request, workload))


def _compiled(openvino: Any, workload: BenchWorkload, inputs: list[Tensor]) -> Any:
    opset = importlib.import_module("openvino.opset13")
    element_type = getattr(openvino.Type, ELEMENT_TYPES[workload.dtype])
    parameters = [opset.parameter(list(tensor.shape), element_type) for tensor in inputs]
    causal = workload.causal and not is_decode(workload)
    attention = opset.scaled_dot_product_attention(*parameters, causal=causal)
    options = {
        "INFERENCE_PRECISION_HINT": "bf16" if workload.dtype == "bfloat16" else "f32",
        "INFERENCE_NUM_THREADS": fastattention.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    return openvino.Core().compile_model(openvino.Model([attention], parameters), "CPU", options)


def _shared(openvino: Any, tensor: Tensor) -> Any:
    """An OpenVINO tensor over the memory of a torch one."""
    if tensor.dtype is torch.bfloat16:  # numpy has no bfloat16: pass the bits
        return openvino.Tensor(tensor.view(torch.int16).numpy(), list(tensor.shape), openvino.Type.bf16)
    return openvino.Tensor(tensor.numpy(), shared_memory=True)


def _output(request: Any, workload: BenchWorkload) -> Tensor:
    """(batch_size, heads, seqlen, headdim) -> (batch_size, seqlen, heads, headdim)."""
    data = request.get_output_tensor(0).data
    if workload.dtype == "bfloat16":
        out = torch.from_numpy(data.view("int16").copy()).view(torch.bfloat16)
    else:
        out = torch.from_numpy(data.copy())
    return out.transpose(1, 2)


def _why_not(workload: BenchWorkload) -> str | None:
    if workload.nheads != workload.nheads_k:
        return f"its operator wants as many key heads as query heads, got {workload.nheads}:{workload.nheads_k}"
    return None


def _why_unavailable() -> str | None:
    return None if importlib.util.find_spec("openvino") else "not installed: pip install openvino"


def _version() -> str:
    return installed_version("openvino") or "of unknown version"


OPENVINO = Peer("OpenVINO", is_dense, prepare, _version, _why_unavailable, _why_not)
