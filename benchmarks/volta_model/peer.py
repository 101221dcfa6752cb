"""The kernels that V100 owners run today: PyTorch's CUTLASS attention for sm_70, out of its public wheel.

torch.nn.functional.scaled_dot_product_attention calls them for float16 on a V100; xformers builds the same source.
PyTorch tries them in the order below and takes the first that allows the head dimensions of keys and values:

    headdim up to 64     fmha_cutlassF_f16_aligned_64x64_rf_sm70      results in registers, up to 64 columns
    headdim up to 128    fmha_cutlassF_f16_aligned_32x128_rf_sm70     results in registers, up to 128 columns
    more                 fmha_cutlassF_f16_aligned_32x128_gmem_sm70   128 columns at a time, results in global memory

("aligned" asks for rows that start at multiples of 16 bytes.) Causal or not, with a bias, with dropout: it is always
the same kernel, which branches around code that a call does not need. The blocks of a plain call were found by reading
the machine code, so the addresses below hold for one wheel. Other wheels are refused.
"""

from __future__ import annotations

import functools
import hashlib
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from harness import run_tool

from fastattention.errors import CompileError

from . import tools
from .flow import main_loop, steady_path
from .sass import Function, Instruction

TORCH = "torch==2.7.1"
_LIBRARY = "torch/lib/libtorch_cuda.so"


@dataclass(frozen=True)
class _Cubin:
    """One of the few hundred cubins of PyTorch's library."""

    kernel: str  # a kernel that only this cubin holds
    sha256: str  # of the cubin whose machine code was read


# Cubins by the names of their files.
_CUBINS = {
    "attention_sm70.cubin": _Cubin(
        "fmha_cutlassF_f16_aligned_64x64_rf_sm70", "91048dd98e990a1fbde438df9ba49257bcaed2bf97dab2a1c8e6a0518a0d2660"
    ),
    "attention_backward_k64_sm70.cubin": _Cubin(
        "fmha_cutlassB_f16_aligned_64x64_k64_sm70", "e530bf7df719fcd4bdeaeb83ae2ca5a7f8e39105fd30596001e39696fd6d47fd"
    ),
    "attention_backward_k128_sm70.cubin": _Cubin(
        "fmha_cutlassB_f16_aligned_128x64_k128_sm70", "eec4027b0389e646f962709a45e2b6963e1691b46bfbbe0e341016f28ea672fb"
    ),
}


@dataclass(frozen=True)
class PeerKernel:
    """One of the three kernels, with addresses in its machine code."""

    name: str
    tile_m: int  # query rows of a CTA
    tile_n: int  # keys of a tile
    max_headdim: int
    shared_bytes: int  # per CTA, added up from the addresses it uses
    qk_loop: int  # over 32 columns of queries and keys
    pv_loop: int  # over 32 keys
    prefetches: frozenset[int]  # loads in these two loops for the next trip, which the last trip does without
    value_loop: int | None  # over 128 columns of values
    through: frozenset[int]  # blocks that every tile but the first runs, although a branch may skip them
    around: frozenset[int]  # bias and dropout
    causal_mask: int  # the block that a tile on the diagonal runs besides

    num_warps = 4
    registers = 168  # so that three CTAs fit a multiprocessor

    def trips(self, headdim: int) -> dict[int, int]:
        """How often the inner loops run, by header."""
        trips = {self.qk_loop: -(-headdim // 32), self.pv_loop: self.tile_n // 32}
        if self.value_loop is not None:
            trips[self.value_loop] = -(-headdim // 128)
        return trips

    def path(self, function: Function, headdim: int, *, masked: bool = False) -> list[Instruction]:
        """The instructions of a warp for a tile of keys, full or masked, that does not raise the maximum of a row."""
        through = self.through | ({self.causal_mask} if masked else set())
        path = steady_path(main_loop(function), self.trips(headdim), through, self.around)
        return self.without_last_prefetches(path, headdim)

    def without_last_prefetches(self, path: list[Instruction], headdim: int) -> list[Instruction]:
        """A path with the prefetches of last trips switched off: there, CUTLASS clears their predicates.

        Raises ValueError when a prefetch is not on the path.
        """
        trips = self.trips(headdim)
        seen: Counter[int] = Counter()
        result = []
        for instruction in path:
            if instruction.address in self.prefetches:
                seen[instruction.address] += 1
                of_loop = trips[max(loop for loop in (self.qk_loop, self.pv_loop) if loop < instruction.address)]
                if seen[instruction.address] % of_loop == 0:
                    instruction = instruction.switched_off()
            result.append(instruction)
        if set(seen) != self.prefetches:
            missing = ", ".join(map(hex, sorted(self.prefetches - set(seen))))
            raise ValueError(f"{self.name}: no prefetch at {missing} on the way around the loop over tiles of keys")
        return result


# `through`, in order: the statistics of rows, which some lanes of every warp keep, before and after the exponentials;
# between them the rescaling of results, which runs whether the maximum rose or not. The kernel with results in global
# memory rescales there.
KERNELS = (
    PeerKernel(
        name="fmha_cutlassF_f16_aligned_64x64_rf_sm70",
        tile_m=64,
        tile_n=64,
        max_headdim=64,
        shared_bytes=17_920,
        qk_loop=0x2070,
        pv_loop=0x9F70,
        prefetches=frozenset({0x2200, 0x2250, 0x2330, 0x2360, 0xA230, 0xA270}),
        value_loop=None,
        through=frozenset({0x56A0, 0x5850, 0x7410}),
        around=frozenset({0x3100, 0x81D0}),
        causal_mask=0x3FC0,
    ),
    PeerKernel(
        name="fmha_cutlassF_f16_aligned_32x128_rf_sm70",
        tile_m=32,
        tile_n=128,
        max_headdim=128,
        shared_bytes=25_600,
        qk_loop=0x2260,
        pv_loop=0x9F20,
        prefetches=frozenset({0x2390, 0x24A0, 0x24F0, 0x2570, 0x2590, 0xA1F0, 0xA210, 0xA240, 0xA250}),
        value_loop=None,
        through=frozenset({0x5480, 0x5630, 0x71F0}),
        around=frozenset({0x3290, 0x7FC0}),
        causal_mask=0x4070,
    ),
    PeerKernel(
        name="fmha_cutlassF_f16_aligned_32x128_gmem_sm70",
        tile_m=32,
        tile_n=128,
        max_headdim=65536,
        shared_bytes=33_920,
        qk_loop=0x2200,
        pv_loop=0x9D00,
        prefetches=frozenset({0x2390, 0x24C0, 0x2560, 0x25A0, 0x25E0, 0x9F30, 0x9F80, 0xA050, 0xA090}),
        value_loop=0x9670,
        through=frozenset({0x53E0, 0x6EC0, 0xC6A0, 0xCF80}),
        around=frozenset({0x32D0, 0x7C90}),
        causal_mask=0x40B0,
    ),
)


def serving(headdim: int) -> PeerKernel:
    """The kernel that PyTorch takes on a V100 for a head dimension, a multiple of 8."""
    return next(kernel for kernel in KERNELS if headdim <= kernel.max_headdim)


def cutlass_kernels() -> dict[str, Function]:
    """The three kernels disassembled, by name. Raises CompileError like `find_kernel`."""
    return {kernel.name: find_kernel("attention_sm70.cubin", kernel.name) for kernel in KERNELS}


def find_kernel(file: str, name: str) -> Function:
    """A kernel of PyTorch's, disassembled. The first call on a machine downloads a wheel of 820 MB.

    file: one of the files with cubins of the wheel.
    Raises CompileError when it cannot be had or is not the one that was read.
    """
    return next(function for function in _disassembled(file) if name in function.name)


@functools.cache
def _disassembled(file: str) -> list[Function]:
    path = _folder() / file
    if not path.exists():
        _fetch()
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != _CUBINS[file].sha256:
        raise CompileError(f"{path} has SHA-256 {found}; its kernels were read in {_CUBINS[file].sha256}")
    return tools.disassemble(path)


def _folder() -> Path:
    return tools.cache_folder() / TORCH.replace("==", "-")


def _fetch() -> None:
    """Take all cubins out of the wheel that pip downloads."""
    with tools.downloaded(TORCH) as wheel, tempfile.TemporaryDirectory(dir=tools.cache_folder()) as place:
        if _LIBRARY not in wheel.namelist():
            raise CompileError(f"the wheel of {TORCH} that pip finds is not built for CUDA: it has no {_LIBRARY}")
        library = Path(wheel.extract(_LIBRARY, place))
        run_tool([str(tools.cuobjdump()), "--extract-elf", "sm_70.cubin", str(library)], library.parent)
        codes = [cubin.read_bytes() for cubin in library.parent.glob("*.cubin")]
    for file, wanted in _CUBINS.items():
        code = next((code for code in codes if wanted.kernel.encode() in code), None)
        if code is None:
            raise CompileError(f"{TORCH} has no {wanted.kernel}")
        tools.install(code, _folder() / file)
