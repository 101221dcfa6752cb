"""Compiled kernels on disk: the key covers what the content depends on, and files appear complete or not at all."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from tiers import slow

from fastattention.backends.cuda.attention.config import KERNEL_FOLDERS, KernelConfig
from fastattention.backends.cuda.attention.variants import variants_of
from fastattention.errors import ArgumentError, CompileError
from fastattention.gpu_runtime import cache, compiler
from fastattention.gpu_runtime.cache import Origin
from fastattention.gpu_runtime.chips import CHIPS
from fastattention.gpu_runtime.compiler import Cubin

KERNEL = variants_of(CHIPS["A100"], headdims=(64,))[0]
OTHER = dataclasses.replace(KERNEL, tile_n=2 * KERNEL.tile_n)


@pytest.fixture(autouse=True)
def _a_compiler_of_version_12_9(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "version", lambda: (12, 9))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a package in which nothing was built ahead."""
    monkeypatch.setenv("FASTATTENTION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "BUILT_AHEAD", tmp_path / "package")
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[KernelConfig, int]]:
    """Records compilations by a fake compiler, which writes the target as machine code."""
    calls: list[tuple[KernelConfig, int]] = []

    def compile_kernel(kernel: KernelConfig, target: int) -> Cubin:
        calls.append((kernel, target))
        return Cubin(str(target).encode(), "")

    monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)
    return calls


def test_a_kernel_is_compiled_once(folder: Path, compiled: list[tuple[KernelConfig, int]]) -> None:
    assert cache.obtain(KERNEL, 80) == (b"80", Origin.COMPILER)
    assert cache.obtain(KERNEL, 80) == (b"80", Origin.CACHE)
    assert cache.cubin(KERNEL, 80) == b"80"
    assert compiled == [(KERNEL, 80)]
    assert [path.name for path in folder.iterdir()] == [cache.cached_path(KERNEL, 80).name]


def test_another_kernel_or_target_has_another_file(folder: Path) -> None:
    paths = {cache.cached_path(kernel, target) for kernel in (KERNEL, OTHER) for target in (80, 86)}
    assert len(paths) == 4
    assert {path.parent for path in paths} == {folder}


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(cache, "source_hash", lambda folders: "another"),
        lambda patch: patch.setattr(compiler, "options", lambda target: ["-DANOTHER=1"]),
        lambda patch: patch.setattr(compiler, "version", lambda: (12, 10)),
    ],
    ids=["source", "options", "compiler"],
)
def test_another_key_has_another_file(change: Callable[[pytest.MonkeyPatch], None]) -> None:
    before = cache.cached_path(KERNEL, 80)
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        assert cache.cached_path(KERNEL, 80) != before
    assert cache.cached_path(KERNEL, 80) == before


@pytest.mark.parametrize(
    "field", [field.name for field in dataclasses.fields(KernelConfig) if field.type in ("int", "bool")]
)
def test_every_field_is_in_the_source(field: str) -> None:
    value = getattr(KERNEL, field)
    other = 75 if field == "arch" else not value if isinstance(value, bool) else value * 2
    changed = dataclasses.replace(KERNEL, **{field: other})
    assert compiler.source(changed) != compiler.source(KERNEL)
    assert changed.name != KERNEL.name


def test_config_has_integers_of_properties_and_of_the_class() -> None:
    declaration = KERNEL.declaration
    for member in (f"int shared_bytes = {KERNEL.shared_bytes};", "int combine_warps = 8;", "bool bfloat16 = false;"):
        assert f"    static constexpr {member}\n" in declaration
    assert all(f" {name} =" not in declaration for name in ("dtype", "cache_format", "entries", "_widest_as_floats"))


def test_every_header_is_in_the_hash(tmp_path: Path) -> None:
    folders = tuple(tmp_path / str(number) for number in range(len(KERNEL_FOLDERS)))
    for source, copy in zip(KERNEL_FOLDERS, folders, strict=True):
        shutil.copytree(source, copy)
    before = cache.hash_sources(folders)
    assert before == cache.source_hash(KERNEL_FOLDERS)  # for any location of the package
    headers = [path for folder in folders for path in folder.rglob("*.*h*") if path.suffix in (".h", ".hpp", ".cuh")]
    assert {"forward.cuh", "params.h", "tile_range.hpp", "sm70.cuh"} <= {path.name for path in headers}
    seen = {before}
    for path in headers:
        path.write_text(path.read_text() + "\n")
        seen.add(cache.hash_sources(folders))
    assert len(seen) == len(headers) + 1


def test_names_and_ends_of_headers_are_in_the_hash(tmp_path: Path) -> None:
    hashes = set()
    for number, files in enumerate([{"a.h": "12"}, {"b.h": "12"}, {"a.h": "1", "b.h": "2"}, {"a.h": "1b.h2"}, {}]):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_text(content)
        hashes.add(cache.hash_sources((folder,)))
    assert len(hashes) == 5


def test_every_file_that_kernels_include_is_hashed() -> None:
    for folder in KERNEL_FOLDERS:
        for path in folder.rglob("*"):
            if path.is_file() and "#include" in path.read_text(errors="replace") and path.suffix != ".py":
                assert path.suffix in (".h", ".hpp", ".cuh"), path


def test_what_was_built_ahead_comes_first(folder: Path, compiled: list[tuple[KernelConfig, int]]) -> None:
    cache.obtain(KERNEL, 86)
    cache.write_atomically(cache.built_ahead_path(KERNEL, 86), b"ahead")
    assert cache.obtain(KERNEL, 86) == (b"ahead", Origin.PACKAGE)
    assert compiled == [(KERNEL, 86)]


@pytest.mark.parametrize(("target", "served"), [(80, True), (86, True), (89, True), (90, False), (100, False)])
def test_code_built_ahead_serves_its_generation(
    target: int, served: bool, folder: Path, compiled: list[tuple[KernelConfig, int]]
) -> None:
    cache.write_atomically(cache.built_ahead_path(KERNEL, 80), b"ahead")
    assert (cache.obtain(KERNEL, target).origin is Origin.PACKAGE) == served
    assert compiled == ([] if served else [(KERNEL, target)])


def test_what_was_built_ahead_needs_no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "version", mock.Mock(side_effect=CompileError("there is no compiler")))
    cache.write_atomically(cache.built_ahead_path(KERNEL, 80), b"ahead")
    assert cache.cubin(KERNEL, 80) == b"ahead"
    with pytest.raises(CompileError, match="there is no compiler"):
        cache.cubin(OTHER, 80)


def test_the_variable_is_read_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for ours, xdg, folder in (("one", "", "one"), ("", "xdg", "xdg/fastattention"), ("", "", ".cache/fastattention")):
        monkeypatch.setenv("FASTATTENTION_CACHE", ours and str(tmp_path / ours))
        monkeypatch.setenv("XDG_CACHE_HOME", xdg and str(tmp_path / xdg))
        assert cache.cached_path(KERNEL, 80).parent == tmp_path / folder


def test_a_folder_that_cannot_be_written_is_named_with_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[tuple[KernelConfig, int]]
) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    monkeypatch.setenv("FASTATTENTION_CACHE", str(file / "cache"))
    with pytest.raises(CompileError, match=f"cannot be written in {file}/cache: .*; set FASTATTENTION_CACHE"):
        cache.obtain(KERNEL, 80)


def test_a_user_without_a_home_is_told_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FASTATTENTION_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987_654_321)  # no user of the system
    with pytest.raises(ArgumentError, match="FASTATTENTION_CACHE is not set, and this user has no home"):
        cache.cached_path(KERNEL, 80)


# Compiles a kernel of a million bytes in a process that may not write it, or only a part.
REFUSED = """
import os, resource, sys
from fastattention.gpu_runtime.chips import CHIPS
from fastattention.gpu_runtime import cache, compiler
from fastattention.backends.cuda.attention.variants import variants_of
from fastattention.errors import CompileError

compiler.version = lambda: (12, 9)
compiler.compile_kernel = lambda kernel, target: compiler.Cubin(bytes(1_000_000), "")
kernel = variants_of(CHIPS["A100"], headdims=(64,))[0]
cache.source_hash(kernel.include_folders)
if sys.argv[1] == "read-only":
    os.chmod(os.environ["FASTATTENTION_CACHE"], 0o555)
    os.geteuid() or os.setuid(987_654)
else:
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, -1))
try:
    cache.obtain(kernel, 80)
except CompileError as error:
    print(error)
"""


@slow
@pytest.mark.parametrize(("limit", "reason"), [("read-only", "Permission denied"), ("full", "File too large")])
def test_a_kernel_that_cannot_be_kept_is_an_error_and_leaves_nothing(limit: str, reason: str) -> None:
    with tempfile.TemporaryDirectory() as name:  # tmp_path is closed to other users
        folder = Path(name)
        environment = dict(os.environ, FASTATTENTION_CACHE=name)
        arguments = [sys.executable, "-c", REFUSED, limit]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert f"a compiled kernel cannot be written in {name}: {reason}; set FASTATTENTION_CACHE" in done.stdout
        assert list(folder.iterdir()) == []


def test_a_file_that_cannot_be_read_is_an_error_of_ours(folder: Path) -> None:
    cache.cached_path(KERNEL, 80).mkdir(parents=True)
    with pytest.raises(CompileError, match=f"cannot be read in {folder}: .*; set FASTATTENTION_CACHE"):
        cache.obtain(KERNEL, 80)


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(28, "No space left on device"), CompileError), (KeyboardInterrupt("stopped"), KeyboardInterrupt)],
    ids=["failed", "interrupted"],
)
def test_a_write_that_does_not_end_leaves_nothing(
    error: BaseException, raised: type[BaseException], tmp_path: Path
) -> None:
    with mock.patch.object(os, "replace", side_effect=error), pytest.raises(raised, match=error.args[-1]):
        cache.write_atomically(tmp_path / "kernel.cubin", b"code")
    assert list(tmp_path.iterdir()) == []


# Four processes write four contents of 4 MiB under one name.
WRITERS = """
import os, pathlib, sys
from fastattention.gpu_runtime import cache
for letter in b"abcd":
    if os.fork() == 0:
        for _ in range(4):
            cache.write_atomically(pathlib.Path(sys.argv[1]), bytes([letter]) * (1 << 22))
        os._exit(0)
assert all(os.wait()[1] == 0 for _ in range(4))
"""


@slow
def test_many_writers_never_show_a_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cubin"
    contents = [bytes([letter]) * (1 << 22) for letter in b"abcd"]
    reads = 0
    with subprocess.Popen([sys.executable, "-c", WRITERS, str(path)]) as writers:
        while writers.poll() is None:
            if path.exists():
                assert path.read_bytes() in contents
                reads += 1
    assert writers.returncode == 0
    assert reads > 0
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


@slow
def test_a_killed_writer_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cubin"
    program = (
        "import os, pathlib, signal, sys\n"
        "from fastattention.gpu_runtime import cache\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "cache.write_atomically(pathlib.Path(sys.argv[1]), b'code')\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not path.exists()
    assert not list(tmp_path.glob("*.cubin"))
    cache.write_atomically(path, b"code")
    assert path.read_bytes() == b"code"
