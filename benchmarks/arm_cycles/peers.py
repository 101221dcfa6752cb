"""Matrix products of the libraries in torch's wheel for 64-bit Arm, and the loops in them, found by their symbols."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fastattention.errors import CompileError

from .assembly import disassemble, symbols
from .loops import Code, busiest_loop

ARM_COMPUTE, OPENBLAS = "Arm Compute Library", "OpenBLAS"
_FILES = {ARM_COMPUTE: "torch.libs/libarm_compute-", OPENBLAS: "torch.libs/libopenblas"}
_EVERY = ("tsv110", "neoverse-n1", "neoverse-v1", "neoverse-v2")
_NEW = ("neoverse-v1", "neoverse-v2")


@dataclass(frozen=True)
class Peer:
    """A kernel, and the processors that can run it."""

    library: str
    symbol: str
    dtype: str
    processors: tuple[str, ...]


PEERS = (
    Peer(ARM_COMPUTE, "arm_gemm::a64_hybrid_fp32_mla_6x16", "float32", _EVERY),
    Peer(ARM_COMPUTE, "arm_gemm::a64_sgemm_asimd_8x12", "float32", _EVERY),
    Peer(OPENBLAS, "sgemm_kernel_TSV110", "float32", ("tsv110",)),
    Peer(OPENBLAS, "sgemm_kernel_NEOVERSEN1", "float32", ("neoverse-n1",)),
    Peer(OPENBLAS, "sgemm_kernel_NEOVERSEV1", "float32", _NEW),
    Peer(OPENBLAS, "sgemm_kernel_NEOVERSEN2", "float32", ("neoverse-v2",)),
    Peer(ARM_COMPUTE, "arm_gemm::a64_interleaved_bf16fp32_mmla_8x12", "bfloat16", _NEW),
    Peer(ARM_COMPUTE, "arm_gemm::a64_hybrid_bf16fp32_mmla_6x16", "bfloat16", _NEW),
    Peer(ARM_COMPUTE, "arm_gemm::a64_hybrid_s8s32_dot_6x16", "int8", _EVERY),
    Peer(ARM_COMPUTE, "arm_gemm::a64_interleaved_s8s32_mmla_8x12", "int8", _NEW),
)


def loops(wheel: Path) -> Iterator[tuple[Peer, Code]]:
    """Each peer with its loop of most multiply-adds, as far as the wheel has them. Raises CompileError."""
    with _libraries(wheel) as paths:
        known = {library: symbols(path) for library, path in paths.items()}
        for peer in PEERS:
            span = known.get(peer.library, {}).get(peer.symbol)
            loop = busiest_loop(disassemble(paths[peer.library], *span)) if span else ()
            if any(one.products for one in loop):
                yield peer, loop


@contextmanager
def _libraries(wheel: Path) -> Iterator[dict[str, Path]]:
    try:
        archive = zipfile.ZipFile(wheel)
    except (OSError, zipfile.BadZipFile) as error:
        raise CompileError(f"{wheel} is not a wheel: {error}") from error
    with archive, tempfile.TemporaryDirectory() as folder:
        found = {}
        for library, start in _FILES.items():
            for name in archive.namelist():
                if name.startswith(start):
                    found[library] = Path(archive.extract(name, folder))
        yield found
