"""A file of C beside the module that uses it, compiled where it runs.

For the few loops that neither torch nor NumPy has and that take several times as long without. The
system's C compiler needs a fraction of a second, once: what it makes is kept in the user's cache
folder. Nothing depends on it: a caller has another way for systems without a compiler.
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
    """Return a file's functions, or None where it cannot be compiled.

    The compiler is that of the variable ``CC``, or ``cc``. Processors without fused multiply-add and
    vectors of 256 bits count as none.

    Args:
        source: the file, in C11; sums and products are not contracted but where it says so. It may
            include headers of its folder.
        extra_flags: for the compiler.
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
    except (OSError, RuntimeError, subprocess.SubprocessError):  # the second: nobody's home
        return None


def c_libraries(sources: Iterable[tuple[Path, tuple[str, ...]]]) -> list[ctypes.CDLL | None]:
    """Return `c_library` of several files and flags; what needs to be compiled is so side by side."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(c_library, *zip(*sources, strict=True)))


@cache
def c_function(source: Path, extra_flags: tuple[str, ...], name: str, *types: Any) -> Any:
    """Return one function of a file that can be compiled.

    Declared once: its arguments are then plain numbers, which takes a third of the time of a call.

    Args:
        source: see `c_library`.
        extra_flags: see `c_library`.
        name: the function's.
        types: of its arguments, from `ctypes`.
    """
    library = c_library(source, extra_flags)
    assert library is not None
    function = library[name]
    function.argtypes = types
    return function


@cache
def vector_flags(count: int) -> tuple[str, ...]:
    """Return flags for loops over so many numbers of float32, which go by vectors of ``LANES``, 8 or 16.

    16 where the processor has such vectors and one of 8 would not hold the numbers.
    """
    has_wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return ("-DLANES=16", "-mavx512f") if has_wide and count > 8 else ("-DLANES=8",)


def _flags() -> list[str] | None:
    """Return the compiler's options, None for a processor that is not supported."""
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
    """Return the package's folder in the user's cache; it may not exist yet.

    Example:
        >>> cache_folder().name
        'fl_lightning'
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fl_lightning"
