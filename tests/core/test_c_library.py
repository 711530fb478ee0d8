"""Files of C compiled once, and done without where they cannot be."""

import ctypes
import shutil

import pytest

from fl_lightning.core.c_library import c_library

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
