"""Describes this machine, for benchmarks and for bug reports."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import fastattention

CPUINFO = Path("/proc/cpuinfo")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
SOURCES = Path(fastattention.__file__).parent.parent
# Environment variables that change what a benchmark measures: those of this package, NCCL and OpenMP.
RECORDED_VARIABLES = ("FASTATTENTION_", "NCCL_", "OMP_")
# The flags of a processor, among a hundred, that decide which attention kernel can run.
INTERESTING_FLAGS = (
    "f16c", "fma", "avx2", "avx512f", "avx512vl", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16",
    "asimd", "asimdhp", "asimddp", "asimdfhm", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
# Cores of Arm processors by implementer and part, as /proc/cpuinfo has them: a name is not there.
ARM_CORES = {
    ("0x41", "0xd03"): "Cortex-A53",
    ("0x41", "0xd05"): "Cortex-A55",
    ("0x41", "0xd07"): "Cortex-A57",
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2",
    ("0x41", "0xd84"): "Neoverse-V3",
    ("0x46", "0x001"): "A64FX",
    ("0x48", "0xd01"): "TaiShan v110 (Kunpeng 920)",
    ("0xc0", "0xac3"): "Ampere-1",
}


def describe_machine() -> dict[str, Any]:
    """Processor, memory, accelerators and versions, as JSON types only."""
    return {
        "cpu": cpu_model(),
        "cpu_flags": cpu_flags(),
        "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: installed_version(name) for name in ("fastattention", "torch", "transformers", "numpy")},
        "cuda": torch.version.cuda,
        "driver": nvidia_driver(),
        "commit": source_commit(),
        "command": command_line(),
        "load_average": os.getloadavg()[0],  # of the last minute, which shows other processes
        "num_threads": fastattention.get_num_threads(),
    }


def cpu_model() -> str:
    """The processor's name, e.g. "AMD EPYC", or that of its Arm cores; its architecture where neither is known."""
    cpuinfo = _cpuinfo()
    if name := cpuinfo.get("model name"):
        return name
    implementer, part = cpuinfo.get("CPU implementer"), cpuinfo.get("CPU part")
    if implementer and part:
        return ARM_CORES.get((implementer, part), f"Arm core of implementer {implementer}, part {part}")
    return platform.processor() or platform.machine()


def cpu_flags() -> list[str]:
    """The instruction sets that matter to attention, by the names the kernel gives them."""
    cpuinfo = _cpuinfo()
    flags = set((cpuinfo.get("flags") or cpuinfo.get("Features") or "").split())
    return [flag for flag in INTERESTING_FLAGS if flag in flags]


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def source_commit() -> str | None:
    """The git commit of the sources in use, with "+changes" for a modified tree; None for an installed package."""
    if not (SOURCES / ".git").exists():
        return None
    git = ["git", "-C", str(SOURCES)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        status = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None  # no git, or a repository without a commit
    return commit + ("+changes" if status.stdout.strip() else "")


def command_line() -> str:
    """The command that runs this process, with the environment variables that matter, e.g. "fastattention bench"."""
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(RECORDED_VARIABLES)]
    program = Path(sys.argv[0])
    if program.resolve().is_relative_to(SOURCES / "benchmarks"):
        run = ["python", str(program.resolve().relative_to(SOURCES))]
    else:
        run = [program.name]
    return shlex.join([*variables, *run, *sys.argv[1:]])


def nvidia_driver() -> str | None:
    """Version of NVIDIA's kernel driver, e.g. "580.95.05"; None without one."""
    if not NVIDIA_DRIVER.exists():
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", NVIDIA_DRIVER.read_text())
    return found and found.group()


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is no such file."""
    if not CPUINFO.exists():
        return {}
    first = CPUINFO.read_text().split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
