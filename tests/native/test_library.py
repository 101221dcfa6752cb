"""The native library's interface: its C functions, its symbols, its pool under forks and concurrent callers."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import fastattention
from fastattention import LibraryError, fast_attn_func
from fastattention.backends.cpu import library
from fastattention.backends.cpu.headers import STRUCTS, pointer_packer
from fastattention.backends.cpu.library import Library, find_library, load_library

PACKAGE = Path(fastattention.__file__).parent
FAMILIES = ("attention", "linear", "convolution", "indexer")
INSTRUCTION_SETS = {"generic", "avx2", "avx512", "avx512_bf16", "amx_bf16", "neon", "neon_fp16", "neon_bf16"}


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_compiles_without_the_sources_of_another(family: str, tmp_path: Path) -> None:
    kernels = tmp_path / "cpu" / "kernels"
    others = [name for name in FAMILIES if name != family]
    shutil.copytree(PACKAGE / "backends" / "cpu" / "kernels", kernels, ignore=shutil.ignore_patterns(*others))
    shutil.copytree(PACKAGE / "backends" / "common", tmp_path / "common")
    # The headers of kernels.cpp, which depend on its order.
    includes = (kernels / "kernels.cpp").read_text().split("// Which type")[0]
    includes = includes.replace("kernels.hpp", f"{family}/kernel_table.hpp")
    for other in others:
        includes = re.sub(f'#include "{other}/.*', "", includes)
    (kernels / family / "headers.cpp").write_text(includes + "}\n")
    definitions = ["-DFA_NAMESPACE=generic", '-DFA_SIMD_HEADER="simd/generic.hpp"', "-Wno-psabi"]
    sources = [str(path) for path in sorted((kernels / family).glob("*.cpp"))]
    subprocess.run(["c++", "-std=c++17", "-fsyntax-only", *definitions, f"-I{kernels}", *sources], check=True)


def test_a_struct_of_another_size_is_found_when_the_library_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, params in STRUCTS.items():
        other = next(one for one in STRUCTS.values() if ctypes.sizeof(one) != ctypes.sizeof(params))
        monkeypatch.setattr(library, "STRUCTS", {**STRUCTS, name: other})
        with pytest.raises(LibraryError, match=f"another version.*{name}"):
            Library(find_library())


def test_addresses_are_packed_by_name_in_the_order_of_the_header() -> None:
    params = STRUCTS["FaLinearParams"]
    made = params.from_buffer_copy(pointer_packer(params, "out", "k")(8, 16).ljust(ctypes.sizeof(params), b"\0"))
    assert (made.out, made.final_state, made.q, made.k, made.dtype) == (8, None, None, 16, 0)
    for names in (("k", "out"), ("out", "keys")):
        with pytest.raises(TypeError, match="not in the order"):
            pointer_packer(params, *names)


def test_isas_run_from_the_portable_one_to_the_best() -> None:
    names = load_library().isas
    assert names[0] in ("generic", "neon")
    assert set(names) <= INSTRUCTION_SETS
    assert len(set(names)) == len(names)
    if "avx512_bf16" in names:  # it is slower than plain AVX-512 on Intel's processors
        intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
        assert (names.index("avx512") > names.index("avx512_bf16")) == intel


def test_unknown_isa_is_refused_with_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTENTION_CPU_ISA", "sse9")
    with pytest.raises(LibraryError, match=r"FASTATTENTION_CPU_ISA='sse9' is not available here.*generic"):
        Library(find_library())


def test_chosen_isa_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTENTION_CPU_ISA", "generic")
    assert Library(find_library()).isa == "generic"


def test_missing_and_damaged_libraries_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"not a library")
    with pytest.raises(LibraryError, match=r"damaged\.so"):
        Library(damaged)
    monkeypatch.setattr(library, "_ABI_VERSION", -1)
    with pytest.raises(LibraryError, match="another version"):
        Library(find_library())
    monkeypatch.delenv("FASTATTENTION_CPU_LIBRARY", raising=False)
    monkeypatch.setattr(library, "_FILE_NAME", "libabsent.so")
    with pytest.raises(LibraryError, match=r"libabsent.so is not installed"):
        find_library()


def test_wrong_isa_makes_the_backend_unavailable_with_its_reason() -> None:
    script = (
        "import torch, fastattention\n"
        "q = torch.zeros(1, 1, 1, 8)\n"
        "print(fastattention.explain(q, q, q))\n"
        "print(fastattention.fast_attn_func(q, q, q).shape)"
    )
    environment = dict(os.environ, FASTATTENTION_CPU_ISA="sse9")
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "cpu: FASTATTENTION_CPU_ISA='sse9' is not available here" in done.stdout
    assert "-> sdpa: serves this call" in done.stdout


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_no_code_of_an_isa_can_replace_common_code() -> None:
    # The linker merges weak symbols of one name. A symbol that a TU built for AVX-512 shares with common code would
    # crash on an older processor. So every weak symbol of the kernels must be in its own instruction set's namespace.
    listing = subprocess.run(["nm", "-C", str(find_library())], capture_output=True, text=True, check=True).stdout
    if not listing:
        pytest.skip("the library is stripped, as an installed one is; FASTATTENTION_CPU_LIBRARY may name another")
    weak = [line.split(maxsplit=2)[2] for line in listing.splitlines() if re.match(r"[0-9a-f]+ [VWu] ", line)]
    shared = [name for name in weak if not any(f"{owner}::" in name for owner in INSTRUCTION_SETS)]
    common = ("std::vector<", "std::thread::", "guard variable for std::")  # symbols of code built for any processor
    assert all(any(one in name for one in common) for name in shared), shared


def _answer(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 300, 4, 64, generator=generator) for _ in range(3))
    return fast_attn_func(q, k, v, causal=True, backend="cpu")


def test_concurrent_callers_get_their_own_results() -> None:
    expected = [_answer(seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(_answer, list(range(8)) * 4))
    for index, out in enumerate(found):
        assert torch.equal(out, expected[index % 8])


def _answer_in_child(connection: Connection) -> None:
    torch.set_num_threads(1)  # torch's own pool does not survive a fork; ours is asked for two threads
    fastattention.set_num_threads(2)
    connection.send(_answer(0).numpy().tobytes())


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_a_working_pool() -> None:
    expected = _answer(0)  # the parent's pool runs before the fork
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer_in_child, args=(sender,), daemon=True)
    child.start()
    try:
        assert receiver.poll(60), "the child did not answer"
        assert receiver.recv() == expected.numpy().tobytes()
    finally:
        child.kill()
        child.join()


def test_flop_and_read_loops_report_what_they_did() -> None:
    lib = load_library()
    assert lib.flop_loop(0, 1000, 2) == 2 * lib.flop_loop(0, 1000, 1) > 0
    assert lib.read_loop(torch.zeros(1 << 21, dtype=torch.uint8), 2) == 1 << 21
