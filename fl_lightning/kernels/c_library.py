"""Compiles and loads the C files of this package, on the machine that runs them.

They contain the few loops that PyTorch and NumPy lack and that are several times slower without C. The
system's C compiler needs a fraction of a second, once; libraries are stored in the user's cache folder.
Callers have a fallback for systems without a compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch


@cache
def c_library(source: Path, extra_flags: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """Compile and load a C file; returns None if it cannot be compiled.

    The environment variable ``CC`` selects the compiler, ``cc`` by default. Processors need fused
    multiply-add and vectors of 256 bits.

    Args:
        source: the file, in C11; sums and products are contracted only where it says so. It may include
            headers of its folder.
        extra_flags: flags for the compiler.
    """
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    flags = _flags()
    if shutil.which(compiler[0]) is None or flags is None:
        return None
    flags += extra_flags
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    made_of = repr((texts, platform.system(), flags))
    digest = hashlib.sha256(made_of.encode()).hexdigest()[:16]
    try:
        path = cache_folder() / f"{source.stem}_{digest}.so"
        if not path.exists():
            _compile([*compiler, *flags, str(source)], path)
        return ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError):  # the second: no home folder
        return None


def c_libraries(sources: Iterable[tuple[Path, tuple[str, ...]]]) -> list[ctypes.CDLL | None]:
    """Compile and load several C files in parallel, each with its flags."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(c_library, *zip(*sources, strict=True)))


@cache
def c_function(source: Path, extra_flags: tuple[str, ...], name: str, *types: Any) -> Any:
    """Return a function of a compiled C file, callable from Python with declared argument types.

    With declared types a call accepts plain numbers and takes a third of the time.

    Args:
        source: see `c_library`.
        extra_flags: see `c_library`.
        name: name of the function.
        types: types of its arguments, from `ctypes`.
    """
    library = c_library(source, extra_flags)
    assert library is not None
    function = library[name]
    function.argtypes = types
    return function


@cache
def vector_flags(count: int) -> tuple[str, ...]:
    """Return compiler flags that set ``LANES``, the float32 numbers per vector register, for loops over ``count``.

    ``LANES`` is 16 if the processor has vectors of 512 bits and ``count`` is above 8, else 8.
    """
    has_wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return ("-DLANES=16", "-mavx512f") if has_wide and count > 8 else ("-DLANES=8",)


def _flags() -> list[str] | None:
    """Return compiler options for this processor; None if the C files do not support it."""
    flags = ["-O3", "-std=c11", "-ffp-contract=off", "-shared", "-fPIC"]
    if platform.machine() in ("x86_64", "AMD64"):
        has_vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        return [*flags, "-mavx2", "-mfma"] if has_vectors else None
    return flags if platform.machine() in ("aarch64", "arm64") else None


def _compile(command: list[str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # other processes compile too
        made = Path(folder) / path.name
        subprocess.run([*command, "-o", str(made), "-lm"], check=True, capture_output=True)
        made.replace(path)


def cache_folder() -> Path:
    """Return the folder of this package in the user's cache folder; it may not exist yet.

    Example:
        >>> cache_folder().name
        'fl_lightning'
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fl_lightning"
