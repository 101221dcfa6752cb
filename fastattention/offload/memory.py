"""The GPU and host memory that a placement of layers needs, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastattention.offload.model_shape import ModelShape
from fastattention.offload.policy import Policy
from fastattention.sizes import format_bytes

PAGE_SIZE = 512  # tokens of a sequence in a layer, stored and moved together
# Tokens of a prompt, of all sequences together, that pass through the model at once with a cache of limited memory.
# There are enough that reading weights and earlier tokens again for every chunk costs little compared with compute.
PREFILL_CHUNK = 8192
STAGING_TOKENS = 16384  # most tokens in a buffer for uploads, of one layer and all sequences together
STAGING_BUFFERS = 2  # one is filled while the other is attended to
STAGING_SHARE = 2  # all buffers take at most 1 / STAGING_SHARE of the cache's GPU memory
# Elements that a decoder holds at once for each token of a chunk, as multiples of two of its sizes: gate, up and their
# product twice; and the residual, norms, queries, results of attention and their parts. A forward pass of Transformers'
# Llama with the shape of LLaMA-3-8B took 1.58 GiB; this gives 1.63.
WORKSPACE_INTERMEDIATE, WORKSPACE_HIDDEN = 4, 12
ENDLESS = 1 << 62  # tokens; a placement that fits these has no limit


def staging_pages(batch_size: int, page_size: int, page_bytes: int, cache_bytes: int) -> int:
    """Pages of each sequence that a buffer for uploads holds, when the cache may take `cache_bytes` on the GPU."""
    fitting = cache_bytes // STAGING_SHARE // (STAGING_BUFFERS * batch_size * page_bytes)
    return max(min(STAGING_TOKENS // (batch_size * page_size), fitting), 1)


def prompt_workspace(model: ModelShape) -> int:
    """Approximate bytes that a chunk of a prompt takes in a model, besides weights, keys and values."""
    elements = WORKSPACE_INTERMEDIATE * model.intermediate_size + WORKSPACE_HIDDEN * model.hidden_size
    return PREFILL_CHUNK * elements * model.dtype_bytes


def least_pages(pages: int, batch_size: int) -> int:
    """Least pages of GPU memory, with buffers, of which `pages` remain for keys and values."""
    return max(pages + STAGING_BUFFERS * batch_size, -(-pages * STAGING_SHARE // (STAGING_SHARE - 1)))


@dataclass(frozen=True)
class OffloadWorkload:
    """Sequences of one length, with all their keys and values in a cache."""

    model: ModelShape
    batch_size: int
    seqlen: int
    quantized: bool = False  # int8 or float8 in CPU memory and in buffers for uploads; never for layers on the GPU
    page_size: int = PAGE_SIZE

    @property
    def cpu_layer_bytes(self) -> int:
        """Bytes of keys and values of a layer on the CPU: S of the model."""
        return self.batch_size * self.seqlen * self._cpu_token_bytes

    @property
    def gpu_layer_bytes(self) -> int:
        """Bytes of keys and values of a layer on the GPU that keeps every token: S_GPU of the model."""
        return self.batch_size * self.seqlen * self._gpu_token_bytes

    @property
    def gathered_bytes(self) -> int:
        """Bytes that a step gathers of a layer on the CPU whose keys queries select."""
        return self.batch_size * min(self.seqlen, self.model.selected_keys) * self._cpu_token_bytes

    @property
    def indexer_bytes(self) -> int:
        """Bytes of the keys of all indexers, which are always on the GPU."""
        of_token = len(self.model.full_layers) * self.model.indexer_headdim * self.model.dtype_bytes
        return self.batch_size * self.seqlen * of_token

    @property
    def window_kv_bytes(self) -> int:
        """Bytes of the caches of all layers with a window, which are always on the GPU."""
        kept = min(self.seqlen, self.model.window or 0)
        return len(self.model.window_layers) * self.batch_size * kept * self._gpu_token_bytes

    @property
    def cpu_page_bytes(self) -> int:
        """Bytes of a page of each sequence in CPU memory."""
        return self.batch_size * self.page_size * self._cpu_token_bytes

    @property
    def gpu_page_bytes(self) -> int:
        """Bytes of a page of each sequence on the GPU."""
        return self.batch_size * self.page_size * self._gpu_token_bytes

    @property
    def chunk_pages(self) -> int:
        """Pages of each sequence that a chunk of a prompt fills."""
        chunk = max(PREFILL_CHUNK // self.batch_size, 1)
        return ceil_div(min(chunk, self.seqlen), self.page_size)

    def staging_bytes(self, cache_bytes: int) -> int:
        """Bytes of all buffers for uploads, which every cache has. cache_bytes: GPU memory that it may take.

        A layer is attended to chunk by chunk, so the buffers do not grow with it.
        """
        page_bytes = self.page_size * self._cpu_token_bytes
        pages = staging_pages(self.batch_size, self.page_size, page_bytes, cache_bytes)
        return STAGING_BUFFERS * pages * self.cpu_page_bytes

    @property
    def _cpu_token_bytes(self) -> int:
        return self.model.kv_bytes_per_token(quantized=self.quantized)

    @property
    def _gpu_token_bytes(self) -> int:
        return self.model.kv_bytes_per_token()


@dataclass(frozen=True)
class Budget:
    """Memory that may be used, in bytes; `num_layers_cpu` if the caller has chosen it."""

    gpu_memory: int
    cpu_memory: int | None = None  # None: unlimited
    workspace: int = 0
    num_layers_cpu: int | None = None


@dataclass(frozen=True)
class MemoryUse:
    """Bytes by purpose. All but `cpu_kv` are on the GPU. Keys and values take whole pages."""

    weights: int
    workspace: int
    resident_kv: int  # layers on the GPU that keep every token
    window_kv: int
    indexer: int  # keys of indexers
    newest_pages: int  # of layers on the CPU: pages not yet full, and those that a chunk of a prompt adds to one layer
    staging: int
    cpu_kv: int

    @property
    def gpu(self) -> int:
        """Bytes on the GPU."""
        kv = self.resident_kv + self.window_kv + self.indexer + self.newest_pages
        return self.weights + self.workspace + kv + self.staging


def memory_of(workload: OffloadWorkload, num_layers_cpu: int, budget: Budget) -> MemoryUse:
    """The memory of `num_layers_cpu` layers on the CPU, and of the others on the GPU."""
    model = workload.model
    on_gpu = len(model.full_layers) - num_layers_cpu
    # One layer on its way to the CPU has all pages of a chunk on the GPU. A chunk may begin within a page.
    newest = num_layers_cpu + workload.chunk_pages + 1 if num_layers_cpu else 0
    return MemoryUse(
        weights=model.weight_bytes,
        workspace=budget.workspace,
        resident_kv=on_gpu * ceil_div(workload.seqlen, workload.page_size) * workload.gpu_page_bytes,
        window_kv=workload.window_kv_bytes,
        indexer=workload.indexer_bytes,
        newest_pages=newest * workload.gpu_page_bytes,
        staging=workload.staging_bytes(budget.gpu_memory - model.weight_bytes - budget.workspace),
        cpu_kv=num_layers_cpu * (workload.seqlen // workload.page_size) * workload.cpu_page_bytes,
    )


def divide(workload: OffloadWorkload, policy: Policy, budget: Budget) -> int:
    """Layers on the CPU: the caller's number, or the fewest with which the rest fits the GPU. Even that may not fit."""
    if policy is Policy.RESIDENT:
        return 0
    if budget.num_layers_cpu is not None:
        return budget.num_layers_cpu
    full_layers = len(workload.model.full_layers)
    if memory_of(workload, 0, budget).gpu <= budget.gpu_memory:
        return 0
    # Each layer that stays on the GPU adds its pages, less the one that it had. Not all can stay: they did not fit.
    added = (ceil_div(workload.seqlen, workload.page_size) - 1) * workload.gpu_page_bytes
    room = budget.gpu_memory - memory_of(workload, full_layers, budget).gpu
    return full_layers - max(room // max(added, 1), 0)


def why_not(workload: OffloadWorkload, policy: Policy, budget: Budget) -> str | None:
    """Why the policy does not fit the budget, None if it does."""
    if policy is Policy.RESIDENT and budget.num_layers_cpu:
        return f"num_layers_cpu={budget.num_layers_cpu} leaves layers on the CPU"
    selects = workload.model.selected_keys > 0
    if policy is Policy.GATHERED and not selects:
        return "queries of this model select no keys"
    if policy not in (Policy.RESIDENT, Policy.GATHERED) and selects:
        return "queries of this model read the keys that they select, and no others"
    num_layers_cpu = divide(workload, policy, budget)
    memory = memory_of(workload, num_layers_cpu, budget)
    if memory.gpu > budget.gpu_memory:
        return _gpu_too_small(workload, policy, num_layers_cpu, budget)
    if budget.cpu_memory is not None and memory.cpu_kv > budget.cpu_memory:
        return (
            f"cpu_memory={budget.cpu_memory} ({format_bytes(budget.cpu_memory)}) is too small for {num_layers_cpu} "
            f"layers of seqlen={workload.seqlen}: they need {memory.cpu_kv} ({format_bytes(memory.cpu_kv)})"
        )
    return None


def longest_seqlen(workload: OffloadWorkload, policy: Policy, budget: Budget) -> int | None:
    """The longest sequence that fits with the policy, or on the GPU alone: 0 if none does, None without limit.

    The length of `workload` does not matter. A longer sequence never needs less memory, so bisection finds it.
    """

    def fits(seqlen: int) -> bool:
        work = replace(workload, seqlen=seqlen)
        return any(why_not(work, one, budget) is None for one in (Policy.RESIDENT, policy))

    if fits(ENDLESS):
        return None
    longest, too_long = 0, ENDLESS
    while too_long - longest > 1:
        middle = (longest + too_long) // 2
        longest, too_long = (middle, too_long) if fits(middle) else (longest, middle)
    return longest


def _gpu_too_small(workload: OffloadWorkload, policy: Policy, num_layers_cpu: int, budget: Budget) -> str:
    memory = memory_of(workload, num_layers_cpu, budget)
    parts = {
        "weights": memory.weights,
        "workspace": memory.workspace,
        "layers with a window": memory.window_kv,
        "keys of indexers": memory.indexer,
        "staging": memory.staging,
        "newest pages": memory.newest_pages,
        f"{len(workload.model.full_layers) - num_layers_cpu} layers on the GPU": memory.resident_kv,
    }
    needs = ", ".join(f"{part} {format_bytes(size)}" for part, size in parts.items() if size)
    said = (
        f"gpu_memory={budget.gpu_memory} ({format_bytes(budget.gpu_memory)}) is too small for policy {policy.value!r}: "
        f"it needs {memory.gpu} ({needs})"
    )
    free = replace(budget, num_layers_cpu=None)
    if budget.num_layers_cpu is None or why_not(workload, policy, free) is not None:
        return said
    return f"{said}; num_layers_cpu={budget.num_layers_cpu}, use at least {divide(workload, policy, free)}"


def ceil_div(tokens: int, size: int) -> int:
    """Pieces of `size` that hold `tokens`."""
    return -(-tokens // size)
