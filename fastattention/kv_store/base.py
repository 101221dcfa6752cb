"""KVStore: the interface of every store, its checks and its lengths. Subclasses decide the layout."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattention.attention.interface import fast_attn_with_kvcache
from fastattention.attention.problem import MAX_HEADDIM, MAX_HEADDIM_V
from fastattention.engine.checks import DTYPES, read_int, require_tensor
from fastattention.engine.eager import runs_eagerly
from fastattention.engine.kinds import check_kinds
from fastattention.engine.operator import Request, request_of, serves_requests
from fastattention.errors import ArgumentError


class KVStore(abc.ABC):
    """Keys and values of a batch of sequences, in memory of their own. The base class of all stores.

    - `batch_size`: sequences
    - `capacity`: tokens that each sequence has room for
    - `nheads_k`: key and value heads
    - `headdim`, `headdim_v`: head dimensions of keys, 1 to 576, and values, 1 to 512; headdim_v=None means headdim
    - `dtype`: that of keys, values and queries: float16, bfloat16 or float32
    - `device`: where the store lives

    On the CPU a call that does not fit the capacity raises ArgumentError, and the store is as it was. On other devices
    reading the lengths would synchronize, so they are trusted. They advance by an operation on the device, so a call
    can be captured in a CUDA graph and replayed. Raises ArgumentError for sizes, dtypes and devices that are not
    allowed, MemoryError where there is not enough memory.
    """

    _k: Tensor  # the memory of keys and values, in the layout of the subclass
    _v: Tensor

    def __init__(
        self,
        batch_size: int,
        capacity: int,
        nheads_k: int,
        headdim: int,
        headdim_v: int | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.batch_size = _size("batch_size", batch_size, 0, _LARGEST)
        self.capacity = _size("capacity", capacity, 0, _LARGEST)
        self.nheads_k = _size("nheads_k", nheads_k, 1, _LARGEST)
        self.headdim = _size("headdim", headdim, 1, MAX_HEADDIM)
        self.headdim_v = _size("headdim_v", self.headdim if headdim_v is None else headdim_v, 1, MAX_HEADDIM_V)
        if dtype not in DTYPES:
            allowed = ", ".join(str(one).removeprefix("torch.") for one in DTYPES)
            raise ArgumentError(f"dtype={dtype} is not supported; allowed are {allowed}")
        self.dtype = dtype
        self._seqlens = _lengths(self.batch_size, device)
        self.device = self._seqlens.device

    @property
    def seqlens(self) -> Tensor:
        """Tokens held, int32 (batch_size,) on `device`. Calls advance it in place; do not write to it."""
        return self._seqlens

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory for keys and values, used or not."""

    @abc.abstractmethod
    def read(self) -> tuple[Tensor, Tensor]:
        """All tokens: k (batch_size, capacity, nheads_k, headdim) and v (batch_size, capacity, nheads_k, headdim_v).

        Elements beyond `seqlens` are arbitrary. The tensors may be the store's own memory: do not write to them.
        """

    def _request(self, q: Tensor, k: Tensor | None, v: Tensor | None, **options: Any) -> Request:
        """The request of `attend`, after its checks."""
        request = request_of(fast_attn_with_kvcache, q, self._k, self._v, k, v, cache_seqlens=self._seqlens, **options)
        if k is None:
            return request
        *call, returned = request
        appended = k.shape[1]

        def advanced(output: Any) -> Any:
            self._seqlens += appended
            return returned(output)

        return (*call, advanced)

    @serves_requests
    def attend(
        self,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] | Tensor = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Tensor | None = None,
        num_splits: int = 0,
        attn_bias: Tensor | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        backend: str = "auto",
    ) -> Any:
        """Appends k and v, attends to what the store then holds, and advances the lengths by the tokens of k.

        - `q`: (batch_size, seqlen_q, nheads, headdim)
        - `k`, `v`: (batch_size, seqlen_new, nheads_k, headdim or headdim_v), tokens to append to every sequence, or
            None

        The other arguments, the mask, the errors and what is returned are those of `fast_attn_with_kvcache`, whose
        cache_seqlens are `seqlens`.
        """
        try:
            self._check_q(q)
            if k is not None:
                self._check_room(q, k, v)
            return self._request(
                q, k, v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, softmax_scale=softmax_scale, causal=causal,
                window_size=window_size, softcap=softcap, rotary_interleaved=rotary_interleaved,
                alibi_slopes=alibi_slopes, num_splits=num_splits, attn_bias=attn_bias, sinks=sinks,
                return_lse=return_lse, backend=backend,
            )  # fmt: skip
        except RuntimeError:
            check_kinds({"q": q, "k": k, "v": v})
            raise

    def append(
        self,
        k: Tensor,
        v: Tensor,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        *,
        rotary_interleaved: bool = True,
        backend: str = "auto",
    ) -> None:
        """Appends k and v, rotated as `attend` would, without attending to anything."""
        require_tensor("k", k)
        no_queries = torch.empty(self.batch_size, 0, self.nheads_k, self.headdim, dtype=self.dtype, device=self.device)
        self.attend(no_queries, k, v, rotary_cos, rotary_sin, rotary_interleaved=rotary_interleaved, backend=backend)

    def truncate(self, seqlens: Tensor | int) -> None:
        """Forgets all but the first `seqlens` tokens of each sequence.

        - `seqlens`: int32 (batch_size,), or one length for all

        On the CPU raises ArgumentError unless every sequence holds that many; on other devices that is trusted.
        """
        if isinstance(seqlens, Tensor):
            self._check_lengths(seqlens)
        else:
            length = read_int("seqlens", seqlens, "an int32 tensor (batch_size,) or an integer")
            seqlens = torch.full_like(self._seqlens, length)
        if self.device.type == "cpu":
            for index, (kept, held) in enumerate(zip(seqlens.tolist(), self._seqlens.tolist(), strict=True)):
                if not 0 <= kept <= held:
                    raise ArgumentError(f"seqlens[{index}]={kept} must be 0 to {held}, the tokens of that sequence")
        self._seqlens.copy_(seqlens)

    def _check_lengths(self, seqlens: Tensor) -> None:
        if seqlens.dtype is not torch.int32 or seqlens.device != self.device or seqlens.shape != (self.batch_size,):
            raise ArgumentError(
                f"seqlens must be int32 (batch_size,) = ({self.batch_size},) on {self.device}, got "
                f"{str(seqlens.dtype).removeprefix('torch.')} {tuple(seqlens.shape)} on {seqlens.device}"
            )

    def _check_q(self, q: Tensor) -> None:
        """Raises unless q fits the store."""
        require_tensor("q", q)
        if q.dtype is not self.dtype or q.device != self.device:
            raise ArgumentError(
                f"q is {q.dtype} on {q.device} and the store {self.dtype} on {self.device}; they must be the same"
            )
        sizes = (self.batch_size, self.headdim)
        if q.dim() != 4 or (q.shape[0], q.shape[3]) != sizes or q.shape[2] < 1 or q.shape[2] % self.nheads_k:
            raise ArgumentError(
                f"q must be (batch_size, seqlen_q, nheads, headdim) with batch_size={self.batch_size}, "
                f"headdim={self.headdim} and nheads a multiple of nheads_k={self.nheads_k}, got shape {tuple(q.shape)}"
            )

    def _check_room(self, q: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Raises when the tokens of k do not fit. Other checks of k follow later."""
        require_tensor("k", k)
        if self.device.type != "cpu" or k.dim() != 4 or not runs_eagerly(q, k, v):
            return
        for index, held in enumerate(self._seqlens.tolist()):
            if held + k.shape[1] > self.capacity:
                raise ArgumentError(
                    f"k has {k.shape[1]} tokens for sequence {index}, which holds {held} of capacity={self.capacity}; "
                    "truncate the store or make a larger one"
                )


_LARGEST = 2**31 - 1  # kernels count in 32 bits


def _lengths(batch_size: int, device: torch.device | str) -> Tensor:
    """Lengths of 0; raises ArgumentError for a device that torch does not have."""
    try:
        return torch.zeros(batch_size, dtype=torch.int32, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(f"device={str(device)!r} cannot be used: {str(error).splitlines()[0]}") from error


def _size(name: str, value: object, low: int, high: int) -> int:
    """`value` as an int within its bounds; raises ArgumentError."""
    size = read_int(name, value)
    if not low <= size <= high:
        raise ArgumentError(f"{name}={size} must be {low} to {high}")
    return size
