"""ggml's C functions by ctypes, from an installed package that contains ggml as shared libraries."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from ctypes import CDLL, RTLD_GLOBAL, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import NamedTuple

# Module -> folder of its libraries in site-packages. llama-cpp-python, installed from source, is compiled for this
# processor and comes first; the wheels of pywhispercpp are compiled for AVX2.
PROVIDERS = {"llama_cpp": "llama_cpp/lib", "pywhispercpp": "pywhispercpp.libs"}
INSTRUCTION_SETS = ("avx512_bf16", "avx512", "avx2", "sve", "neon")


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class Ggml(NamedTuple):
    """The two libraries with the functions used here declared."""

    base: CDLL
    cpu: CDLL
    provider: str

    @property
    def version(self) -> str:
        """Version of ggml, the package that contains it, and the best instruction set it was compiled for."""
        compiled_for = [name for name in INSTRUCTION_SETS if getattr(self.cpu, f"ggml_cpu_has_{name}")()]
        return f"{self.base.ggml_version().decode()} from {self.provider}, {(compiled_for or ['no SIMD'])[0]}"


@functools.cache
def load() -> Ggml | str:
    """The libraries, or the reason why there are none."""
    for module, folder in PROVIDERS.items():
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            continue
        libraries = Path(spec.origin).parent.parent / folder
        try:
            return _open(libraries, module)
        except (OSError, AttributeError) as error:
            return f"the ggml of {module} cannot be used: {error}"
    return "not installed: pip install pywhispercpp, or llama-cpp-python (compiled here, for this processor)"


def _open(folder: Path, provider: str) -> Ggml:
    # The libraries depend on one another, so they are loaded in the order of their dependencies.
    for name in ("libgomp", "libggml-base", "libggml-cpu"):
        for path in _shared_objects(folder, name)[:1]:
            CDLL(str(path), mode=RTLD_GLOBAL)
    found = [_shared_objects(folder, name) for name in ("libggml-base", "libggml-cpu")]
    if not all(found):
        raise OSError(f"{folder} holds no libggml-base and libggml-cpu")
    ggml = Ggml(CDLL(str(found[0][0])), CDLL(str(found[1][0])), provider)
    _declare(ggml)
    return ggml


def _shared_objects(folder: Path, name: str) -> list[Path]:
    # Wheels put a hash after the name: libggml-cpu-67036419.so.0.13.1.
    return sorted(folder.glob(f"{name}*.so*"))


def _declare(ggml: Ggml) -> None:
    base, cpu = ggml.base, ggml.cpu
    base.ggml_version.restype = c_char_p
    base.ggml_init.argtypes, base.ggml_init.restype = [InitParams], c_void_p
    base.ggml_free.argtypes = [c_void_p]
    base.ggml_tensor_overhead.restype = c_size_t
    base.ggml_graph_overhead.restype = c_size_t
    base.ggml_new_tensor_4d.argtypes, base.ggml_new_tensor_4d.restype = [c_void_p, c_int, *[c_int64] * 4], c_void_p
    base.ggml_get_data.argtypes, base.ggml_get_data.restype = [c_void_p], c_void_p
    base.ggml_new_graph.argtypes, base.ggml_new_graph.restype = [c_void_p], c_void_p
    base.ggml_build_forward_expand.argtypes = [c_void_p, c_void_p]
    base.ggml_flash_attn_ext.argtypes = [c_void_p] * 5 + [c_float] * 3
    base.ggml_flash_attn_ext.restype = c_void_p
    base.ggml_backend_graph_compute.argtypes, base.ggml_backend_graph_compute.restype = [c_void_p, c_void_p], c_int
    base.ggml_backend_free.argtypes = [c_void_p]
    cpu.ggml_backend_cpu_init.restype = c_void_p
    cpu.ggml_backend_cpu_set_n_threads.argtypes = [c_void_p, c_int]
