"""The time of a decode step, predicted from bandwidths. docs/long_context.md explains the formulas.

In their words: T0 is the step without the layers on the CPU, S the cache of one of these, L_CPU their number, and
`staging_bytes` the buffers in which uploads wait for their layer.
"""

from __future__ import annotations

from fastattention.offload.hardware import Hardware
from fastattention.offload.memory import Workload
from fastattention.offload.policy import Policy


def seconds_per_token(
    policy: Policy, workload: Workload, hardware: Hardware, num_layers_cpu: int, staging_bytes: int
) -> float:
    """One step: one token for every sequence of the batch."""
    base = _base_seconds(workload, hardware, num_layers_cpu)
    cpu_bytes = num_layers_cpu * workload.cpu_layer_bytes
    handovers = num_layers_cpu * hardware.handover_seconds
    hidden = _hidden_seconds(base, hardware, num_layers_cpu, staging_bytes)
    if policy is Policy.CLASSICAL:
        return base + max(0.0, cpu_bytes / hardware.link_bandwidth - hidden)
    if policy is Policy.COOPERATIVE:
        return base + handovers + cpu_bytes / hardware.cpu_bandwidth
    if policy is Policy.HYBRID:
        # What uploads leave that hide under T0 is shared by them and the CPU, as fast as host memory lets both read.
        together = min(hardware.cpu_bandwidth + hardware.link_bandwidth, hardware.dram_bandwidth)
        return base + handovers + max(0.0, cpu_bytes - hardware.link_bandwidth * hidden) / together
    return base


def upload_fraction(
    policy: Policy, workload: Workload, hardware: Hardware, num_layers_cpu: int, staging_bytes: int
) -> float:
    """The share of the caches on the CPU that a step uploads: of a hybrid, as much as the link carries in the step."""
    cpu_bytes = num_layers_cpu * workload.cpu_layer_bytes
    if policy is Policy.CLASSICAL:
        return 1.0
    if policy is not Policy.HYBRID or cpu_bytes == 0:
        return 0.0
    base = _base_seconds(workload, hardware, num_layers_cpu)
    idle = base - _hidden_seconds(base, hardware, num_layers_cpu, staging_bytes)  # the link's, with all buffers full
    busy = seconds_per_token(policy, workload, hardware, num_layers_cpu, staging_bytes) - idle
    return min(1.0, hardware.link_bandwidth * busy / cpu_bytes)


def _base_seconds(workload: Workload, hardware: Hardware, num_layers_cpu: int) -> float:
    """T0: weights, the caches on the GPU, and what layers cost beyond both."""
    model = workload.model
    on_gpu = (len(model.full_layers) - num_layers_cpu) * workload.gpu_layer_bytes + workload.window_kv_bytes
    weights = model.num_layers * model.layer_weight_bytes + model.logits_weight_bytes
    return (weights + on_gpu) / hardware.gpu_bandwidth + model.num_layers * hardware.layer_overhead_seconds


def _hidden_seconds(base: float, hardware: Hardware, num_layers_cpu: int, staging_bytes: int) -> float:
    """How long uploads run under T0: until the buffers are full, once before every layer on the CPU."""
    return min(base, num_layers_cpu * staging_bytes / hardware.link_bandwidth)
