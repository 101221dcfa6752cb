"""`fastattention compile` and `warmup`."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
from build_cubins import Built, cubins_to_build

from fastattention.backends.cuda.attention.config import AppendConfig, KernelConfig, MergeConfig
from fastattention.distributed.transports.all_reduce import choose_config, usual_configs
from fastattention.errors import CompileError
from fastattention.gpu_runtime import cache, compiler, module
from fastattention.gpu_runtime.chips import CHIPS
from fastattention.gpu_runtime.compiler import Cubin
from fastattention.gpu_runtime.variant import Variant

from .conftest import RunCommand

REASON = compiler.why_unavailable()
needs_nvrtc = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def log_of(kernel: Variant) -> str:
    """The log of ptxas: 77 registers for the first entry, 78 for the second."""
    return "\n".join(
        f"ptxas info : Compiling entry function '{entry.name}' for 'sm_80'\n"
        f"ptxas info : Used {77 + i} registers\n8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads"
        for i, entry in enumerate(kernel.entries)
    )


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, int]]:
    """(kernel, target) of everything that a stand-in for NVRTC compiles, with an empty cache and package."""
    calls: list[tuple[str, int]] = []
    lock = threading.Lock()

    def compile_kernel(kernel: Variant, target: int) -> Cubin:
        with lock:
            calls.append((kernel.name, target))
        return Cubin(kernel.name.encode(), log_of(kernel))

    monkeypatch.setattr(compiler, "version", lambda: (12, 9))
    monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)
    monkeypatch.setattr(cache, "BUILT_AHEAD", tmp_path / "package")
    monkeypatch.setenv("FASTATTENTION_CACHE", str(tmp_path / "kernel cache [a]"))
    return calls


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Variant, int]]:
    """The kernels that are loaded on a machine with a T4 and an A100."""
    calls: list[tuple[Variant, int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(module, "device_limits", [CHIPS["T4"], CHIPS["A100"]].__getitem__)
    monkeypatch.delenv("FASTATTENTION_CUDA_ARCH", raising=False)
    monkeypatch.setattr(module, "load_kernel", lambda kernel, index: calls.append((kernel, index)))
    return calls


def kernels_of(loaded: list[tuple[Variant, int]]) -> list[KernelConfig]:
    """The loaded kernels that attend."""
    return [kernel for kernel, _ in loaded if isinstance(kernel, KernelConfig)]


@needs_nvrtc
def test_compile_writes_machine_code(run_command: RunCommand, tmp_path: Path) -> None:
    exit_code, output = run_command("compile", "--arch", 75, "--headdim", 32, "-o", "kernel.cubin")
    assert exit_code == 0
    assert "forward_sm75_float16_h32_hv32_" in output
    assert (tmp_path / "kernel.cubin").read_bytes().startswith(b"\x7fELF")


@needs_nvrtc
@pytest.mark.parametrize("target", [100, 103, 110, 120, 121])
def test_the_code_path_of_ampere_compiles_for_blackwell(target: int, run_command: RunCommand, tmp_path: Path) -> None:
    command = ("compile", "--arch", 80, "--target", target, "--headdim", 64, "-o", "kernel.cubin")
    exit_code, output = run_command(*command)
    if (reason := compiler.why_not_target(target)) is not None:  # 110 needs NVRTC 13, the others 12.9
        assert (exit_code, output) == (1, f"error: {reason}")
        return
    assert exit_code == 0
    assert f"compute capability {target / 10:.1f}" in output
    assert (tmp_path / "kernel.cubin").read_bytes().startswith(b"\x7fELF")


def test_compile_prints_what_the_kernel_takes(
    run_command: RunCommand, compiled: list[tuple[str, int]], tmp_path: Path
) -> None:
    arguments = (
        "--arch 80 --headdim 100 --headdim-v 40 --target 90 --dtype bfloat16 --softcap --paged -o [k].cubin".split()
    )
    exit_code, output = run_command("compile", *arguments)
    assert exit_code == 0
    ((name, target),) = compiled
    assert name.startswith("forward_sm80_bfloat16_h128_hv64_")
    assert name.endswith("_softcaps_paged")
    assert target == 90
    takes = "128 threads, 77 registers each, 16 bytes spilled"
    for said in (name, "9.0", "fastattention_forward", takes, "NVRTC 12.9", f"[k].cubin, {len(name)} bytes"):
        assert said in output
    assert (tmp_path / "[k].cubin").read_text() == name


@pytest.mark.parametrize(
    ("arguments", "dtype", "end"),
    [
        ("--decode", "float16", "_decodes_skaw"),
        ("--decode --paged --alibi --bias --dtype bfloat16", "bfloat16", "_ha_hb_qir_paged_decodes_skaw"),
        ("--decode --cache int8", "float16", "_decodes_int8_skaw"),
        ("--decode --cache float8 --headdim-v 40", "float16", "_decodes_float8_skaw"),
    ],
)
def test_compile_makes_a_decode_kernel_and_prints_what_each_entry_takes(
    arguments: str, dtype: str, end: str, run_command: RunCommand, compiled: list[tuple[str, int]]
) -> None:
    command = ("compile", "--arch", 75, "--headdim", 64, "-o", "kernel.cubin", *arguments.split())
    exit_code, output = run_command(*command)
    assert exit_code == 0
    ((name, _),) = compiled
    assert name.startswith(f"decode_sm75_{dtype}_h64_hv64_tm16_")
    assert name.endswith(end)
    for said in ("fastattention_decode", "77 registers", "fastattention_combine", "78 registers"):
        assert said in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--arch 71 --headdim 64", "arch=71 has no code path; choose from 60, 70, 75, 80"),
        (
            "--arch 75 --headdim 64 --target 70",
            "target=70 cannot be chosen with arch=75; choose from 75, 80, 86, 89, 90, 100, 103, 110, 120, 121",
        ),
        ("--arch 75 --headdim 64 --target 0", "target=0 cannot be chosen"),
        ("--arch 75 --headdim 0", "headdim=0 is not served by the cuda backend; use 1 to 576"),
        ("--arch 75 --headdim 64 --headdim-v 513", "headdim_v=513 is not served"),
        ("--arch 75 --headdim 64 --dtype bfloat16", "dtype=bfloat16 has no kernel of its own at arch=75"),
        ("--arch 75 --headdim 64 --cache int8", "cache=int8 is read by decode kernels only; add --decode"),
        (
            "--arch 75 --headdim 64 -o nowhere/file",
            "output='nowhere/file' cannot be written: No such file or directory",
        ),
    ],
)
def test_compile_refuses_what_it_cannot_do(
    arguments: str, message: str, run_command: RunCommand, compiled: list[tuple[str, int]], tmp_path: Path
) -> None:
    exit_code, output = run_command("compile", "-o", "kernel.cubin", *arguments.split())
    assert exit_code == 1
    assert f"error: {message}" in output
    assert list(tmp_path.glob("*.cubin")) == []
    assert compiled == []


def test_compile_says_why_no_kernel_fits(
    run_command: RunCommand, compiled: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CHIPS, "T4", CHIPS["T4"]._replace(shared_per_cta=1000))
    exit_code, output = run_command("compile", "--arch", 75, "--headdim", 64, "-o", "kernel.cubin")
    assert exit_code == 1
    assert "error: no kernel fits compute capability 7.5: forward_sm75_" in output
    assert compiled == []


def test_compile_gives_the_reason_of_the_compiler(run_command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise CompileError("NVRTC is [not] here")

    monkeypatch.setattr(compiler, "_nvrtc", missing)
    finished = run_command("compile", "--arch", 75, "--headdim", 64, "-o", "kernel.cubin")
    assert finished == (1, "error: NVRTC is [not] here")


def test_warmup_compiles_what_is_neither_in_the_package_nor_cached(
    run_command: RunCommand, compiled: list[tuple[str, int]], loaded: list[tuple[Variant, int]]
) -> None:
    arguments = ("warmup", "--device", "cuda:0", "--headdim", 64)
    exit_code, output = run_command(*arguments)
    assert exit_code == 0
    count = len(loaded)
    assert f"{count} kernels: 0 from the package, 0 from the cache, {count} from the compiler" in output
    assert "kernel cache [a]" in output
    assert {index for _, index in loaded} == {0}
    assert {(kernel.name, 75) for kernel, _ in loaded} == set(compiled)
    assert all(kernel.name in output for kernel, _ in loaded)

    cache.write_atomically(cache.built_ahead_path(loaded[0][0], 75), b"ahead")
    again = run_command(*arguments).output
    assert f"{count} kernels: 1 from the package, {count - 1} from the cache, 0 from the compiler" in again
    assert len(compiled) == count


@pytest.mark.parametrize("more", [0, 1])
def test_warmup_compiles_with_the_threads_that_it_can_have(
    more: int,
    run_command: RunCommand,
    compiled: list[tuple[str, int]],
    loaded: list[tuple[Variant, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def start_few(thread: threading.Thread) -> None:
        if len(started) == more:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr("fastattention.cli.warmup.os.sched_getaffinity", lambda process: range(8))
    monkeypatch.setattr(threading.Thread, "start", start_few)
    exit_code, output = run_command("warmup", "--device", "cuda:0", "--headdim", 64)
    assert exit_code == 0, output
    assert {(kernel.name, 75) for kernel, _ in loaded} == set(compiled)
    assert all(kernel.name in output for kernel, _ in loaded)


RULES = [(False, False, False), (True, False, False), (False, True, False), (False, False, True)]


def test_warmup_takes_what_every_kind_of_call_needs(
    run_command: RunCommand, compiled: list[tuple[str, int]], loaded: list[tuple[Variant, int]]
) -> None:
    assert run_command("warmup", "--device", "cuda:0", "--headdim", 64, "--dtype", "float16").exit_code == 0
    features = {
        source: {
            (*kernel.rules, kernel.paged, kernel.cache_format)
            for kernel in kernels_of(loaded)
            if kernel.source == source
        }
        for source in ("forward.cuh", "decode.cuh")
    }
    plain = {(*rules, False, "") for rules in RULES} | {(*RULES[0], True, "")}
    formats = ("int8", "float8")
    assert features["forward.cuh"] == plain | {(*RULES[0], True, cache_format) for cache_format in formats}
    assert features["decode.cuh"] == plain | {(*RULES[0], False, cache_format) for cache_format in formats}
    # One for few queries of a group, one for more.
    assert {kernel.tile_m for kernel in kernels_of(loaded) if kernel.decodes} == {16, 64, 128}
    appends = [kernel for kernel, _ in loaded if isinstance(kernel, AppendConfig)]
    assert appends == [AppendConfig(torch.float16, cache_format) for cache_format in ("", "int8", "float8")]
    assert MergeConfig(torch.float16, torch.float16) in [kernel for kernel, _ in loaded]
    all_reduces = [kernel for kernel, _ in loaded if kernel.source == "all_reduce.cuh"]
    assert all_reduces == list(usual_configs(CHIPS["T4"], [torch.float16]))


def test_warmup_does_without_torch_distributed(
    run_command: RunCommand,
    compiled: list[tuple[str, int]],
    loaded: list[tuple[Variant, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "fastattention.distributed", None)  # importing it raises
    assert run_command("warmup", "--headdim", 64).exit_code == 0
    assert {"forward.cuh", "merge.cuh"} <= {kernel.source for kernel, _ in loaded}


def test_all_reduces_are_built_ahead_for_every_generation() -> None:
    built = [one for one in cubins_to_build() if one.kernel.source == "all_reduce.cuh"]
    assert len(built) == 9 * len({one.target for one in built})
    for chip, target in (("T4", 75), ("A100", 80), ("H100", 90)):
        assert Built(choose_config(torch.bfloat16, 4, CHIPS[chip]), target) in built


def test_warmup_takes_the_common_head_dimensions_in_both_dtypes(
    run_command: RunCommand, compiled: list[tuple[str, int]], loaded: list[tuple[Variant, int]]
) -> None:
    assert run_command("warmup", "--device", "cuda").exit_code == 0
    assert {index for _, index in loaded} == {1}  # the current device
    forwards = [kernel for kernel in kernels_of(loaded) if not kernel.decodes]
    assert {(kernel.headdim, kernel.dtype, *kernel.rules, kernel.paged) for kernel in forwards} == {
        (headdim, dtype, *features)
        for headdim in (64, 96, 128, 256)
        for dtype in (torch.float16, torch.bfloat16)
        for features in [*((*rules, False) for rules in RULES), (*RULES[0], True)]
    }
    # Both are for short sequences and for long ones.
    of_64 = [kernel for kernel in forwards if kernel.headdim == 64 and not kernel.quantized]
    assert {kernel.tile_m for kernel in of_64} == {128, 192}


def test_warmup_follows_the_chosen_code_path(
    run_command: RunCommand,
    compiled: list[tuple[str, int]],
    loaded: list[tuple[Variant, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FASTATTENTION_CUDA_ARCH", "60")
    assert run_command("warmup", "--headdim", 64).exit_code == 0
    assert {kernel.arch for kernel in kernels_of(loaded)} == {60}
    assert {target for _, target in compiled} == {75}


def test_warmup_shows_why_a_kernel_cannot_be_had(
    run_command: RunCommand,
    compiled: list[tuple[str, int]],
    loaded: list[tuple[Variant, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(kernel: Variant, target: int) -> Cubin:
        raise CompileError(f"no [compiler] for {target}")

    monkeypatch.setattr(compiler, "compile_kernel", refuse)
    assert run_command("warmup") == (1, "error: no [compiler] for 75")
    assert loaded == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--device cuda:2", "device='cuda:2' does not exist; torch sees cuda:0 to cuda:1"),
        ("--device cpu", "device='cpu' needs no kernels; use cuda or cuda:0"),
        ("--device [gpu]", "device='[gpu]' is no device of torch; use cuda or cuda:0"),
        ("--headdim 64 --headdim 600", "headdim=600 is not served by the cuda backend; use 1 to 576"),
    ],
)
def test_warmup_refuses_what_it_cannot_do(
    arguments: str, message: str, run_command: RunCommand, loaded: list[tuple[Variant, int]]
) -> None:
    assert run_command("warmup", *arguments.split()) == (1, f"error: {message}")
    assert loaded == []


def test_warmup_refuses_a_gpu_that_is_too_old(
    run_command: RunCommand, loaded: list[tuple[Variant, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "device_limits", lambda index: CHIPS["P100"]._replace(target=52))
    message = "error: cuda:0 has compute capability 5.2; Pascal (6.0) is the oldest that is served"
    assert run_command("warmup") == (1, message)


def test_warmup_says_that_there_is_no_gpu(run_command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = "error: there is no GPU to warm up: torch sees no CUDA device. `fastattention compile` needs none"
    assert run_command("warmup") == (1, message)
