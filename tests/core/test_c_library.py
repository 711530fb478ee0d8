"""Files of C compiled once, and done without where they cannot be."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fl_lightning
from fl_lightning.kernels.c_library import c_library

TWICE = "double twice(double x) { return 2 * x; }"


@pytest.fixture
def new_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def source_of(folder, text):
    path = folder / "source.c"
    path.write_text(text)
    return path


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_what_was_compiled_is_kept(tmp_path, new_cache, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    source = source_of(tmp_path, TWICE)
    twice = c_library(source).twice
    twice.argtypes, twice.restype = [ctypes.c_double], ctypes.c_double
    assert twice(1.5) == 3.0
    [made] = new_cache.rglob("*.so")
    before = made.stat().st_mtime_ns
    c_library.cache_clear()  # as in another process
    assert c_library(source) is not None
    assert made.stat().st_mtime_ns == before
    assert [*new_cache.rglob("*")] == [made.parent, made]


def test_another_source_is_another_file(tmp_path, new_cache):
    for text in (TWICE, TWICE + " "):
        c_library.cache_clear()
        c_library(source_of(tmp_path, text))
    assert len(list(new_cache.rglob("*.so"))) in (0, 2)  # none without a compiler


@pytest.mark.parametrize(
    ("compiler", "text"), [("no-such-compiler", TWICE), ("false", TWICE), ("", "no C at all")]
)
def test_without_a_compiler_or_where_it_fails(compiler, text, tmp_path, new_cache, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    assert c_library(source_of(tmp_path, text)) is None
    assert not list(new_cache.rglob("*.so"))


KERNELS = (
    "tests/client/test_direct_layers.py",
    "tests/client/test_direct_kernels.py",
    "tests/server/test_column_sort.py",
    "tests/sparsity/test_one_pass.py",
)
# A result of one row fewer than the weights have
BEYOND_THE_END = """
import torch
from fl_lightning.kernels.linear import _run
inputs, weights = torch.ones(2, 20, 784), torch.ones(2, 62, 784)
_run("dense", torch.zeros(2, 20, 61), inputs, weights, 2, 20, 784, 62)
"""


# Its own flags come last: with -O3 the sanitizer's checks take minutes to compile, and -O1 alone
# contracts no sums and products
COMPILER = """#!/bin/sh
unset LD_PRELOAD
exec gcc "$@" -g -O1 -fexpensive-optimizations -fsanitize=address,undefined -fno-sanitize-recover
"""


@pytest.fixture
def guarded(tmp_path, new_cache):
    """What a process needs that is to stop where a kernel reads or writes beyond its tensors."""
    if not sys.platform.startswith("linux") or shutil.which("gcc") is None:
        pytest.skip("no sanitizer")
    libraries = [
        subprocess.check_output(["gcc", f"-print-file-name=lib{name}.so"], text=True).strip()
        for name in ("asan", "ubsan")
    ]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip("no sanitizer")
    compiler = tmp_path / "guarded-cc"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    return os.environ | {
        "CC": str(compiler),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.slow
def test_a_kernel_that_leaves_its_memory_is_caught(guarded):
    command = [sys.executable, "-c", BEYOND_THE_END]
    ended = subprocess.run(command, env=guarded, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "heap-buffer-overflow" in ended.stderr
    assert "direct_linear.c" in ended.stderr


@pytest.mark.slow
def test_no_kernel_leaves_its_memory(guarded, new_cache):
    """Nor does anything whose result C leaves open; PyTorch's own compiler is another matter."""
    options = ["-p", "no:cacheprovider", "-n", "0", "-q", "-k", "not graph"]
    command = [sys.executable, "-m", "pytest", *options, *KERNELS]
    ended = subprocess.run(command, env=guarded, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    compiled = {path.stem.rsplit("_", 1)[0] for path in new_cache.rglob("*.so")}
    assert compiled == {path.stem for path in Path(fl_lightning.__file__).parent.rglob("*.c")}
