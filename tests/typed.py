"""Commands as they are typed, each in a process of its own that need not import the libraries.

One process imports what nearly every command needs, which takes longer than most of the commands do,
and forks for each of them. What is forked goes on as a fresh process would: in a folder, with
arguments, variables and files for what it says, at the first line of the program.
"""

import multiprocessing
import os
import runpy
import shutil
import sys
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["fl_lightning.cli.commands", "timm", "tensorboard"])


def start(words, folder, variables, said):
    """Start a command in a folder and return its process.

    Args:
        words: ``fl-lightning …``, ``python -m …`` or ``python FILE …``.
        folder: where.
        variables: the whole environment.
        said: two files, for what goes to standard output and to standard error.
    """
    process = _FORKS.Process(target=_become, args=(words, Path(folder), dict(variables), said))
    process.start()
    return process


def run(words, folder, **variables):
    """Run a command in a folder, with more variables; return its exit code, its output and its errors."""
    said = [folder / "out.txt", folder / "err.txt"]
    process = start(words, folder, os.environ | variables, said)
    process.join(300)
    out, err = (path.read_text() for path in said)
    for path in said:
        path.unlink()
    return process.exitcode, out, err


def said_by(code, *arguments, folder, **variables):
    """Run lines of Python in a folder, with more variables; return what they said, output and errors."""
    file = folder / "typed_in.py"
    file.write_text(code)
    exitcode, out, err = run(["python", str(file), *arguments], folder, **variables)
    assert exitcode == 0, err
    return out, err


def _become(words, folder, variables, said):
    for stream, path in enumerate(said, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    for place in map(Path, filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))):
        sys.path.insert(0, str(place))
        if (place / "sitecustomize.py").is_file():  # which Python runs when it starts
            runpy.run_path(str(place / "sitecustomize.py"))
    program, *arguments = words
    if program == "python" and arguments[0] != "-m":
        sys.argv = arguments
        runpy.run_path(sys.argv[0], run_name="__main__")
    elif program == "python":
        sys.path.insert(0, str(folder))
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [shutil.which(program), *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")
