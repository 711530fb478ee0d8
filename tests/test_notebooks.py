"""The notebooks run from top to bottom; their outputs are small and tell nothing of a machine.

By default every cell runs with a few rounds, and one kernel runs all notebooks, with nothing defined when
each begins. ``pytest -m slow`` runs the notebooks as they are, each in a kernel of its own.
"""

import os
import re
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))

# by the notebook's number: what its code says, and what a short run says instead
SHORTER = {
    "01": {"LOCAL_EPOCHS = 5": "LOCAL_EPOCHS = 2", "NUM_ROUNDS = 10": "NUM_ROUNDS = 2"},
    "02": {
        "[:256]": "[:64]",
        '"depth": 3': '"depth": 1',
        "max_epochs=10": "max_epochs=1",
        "num_steps=100": "num_steps=10",
        "max_epochs=15": "max_epochs=1",
    },
    "03": {
        "max_epochs=20": "max_epochs=2",
        "local_steps=10": "local_steps=2",
        "range(40)": "range(4)",
    },
    "04": dict.fromkeys(["max_epochs=30", "max_epochs=80", "max_epochs=160"], "max_epochs=2"),
    "05": {
        "rounds=10": "rounds=1",
        "local_epochs=2": "local_epochs=1",
        "left.plot(range(1, 11)": "left.plot(range(1, 2)",
    },
    "06": {
        "max_epochs=10": "max_epochs=1",
        "local_epochs=2": "local_epochs=1",
        "range(1, 11)": "range(1, 2)",
    },
    "07": {
        "NUM_ROUNDS = 1000, 25": "NUM_ROUNDS = 20, 5",
        "(0.1, 0.3, 1.0)": "(0.1, 1.0)",
        "(1.0, 10.0, 30.0)": "(1.0, 30.0)",
    },
    "08": {
        "800, seed=100": "80, seed=100",
        "max_epochs=8": "max_epochs=2",
        "range(1, 9)": "range(1, 3)",
    },
    "09": {"max_epochs: 5": "max_epochs: 2"},
    "10": {"NUM_ROUNDS = 10": "NUM_ROUNDS = 2"},
    "11": {"NUM_ROUNDS = 20": "NUM_ROUNDS = 1", "max_epochs=60": "max_epochs=1"},
    "12": {"rounds=40": "rounds=1", "rounds=30": "rounds=2"},
}


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


def read(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shorten(notebook, shorter):
    """Replace words of its code, each of which has to be there."""
    for words, fewer in shorter.items():
        cells = [cell for cell in code_cells(notebook) if words in cell.source]
        assert cells, f"{words} is in no cell"
        for cell in cells:
            cell.source = cell.source.replace(words, fewer)


MOST_BYTES = 300_000


def test_outputs_tell_nothing_of_a_machine_and_are_small(path):
    notebook = read(path)
    assert notebook.metadata.kernelspec.name == "python3"
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert outputs
    assert path.stat().st_size <= MOST_BYTES
    for output in outputs:
        assert output.output_type != "error"
        shown = {kind: text for kind, text in output.get("data", {}).items() if kind != "image/png"}
        text = "\n".join([output.get("text", ""), *shown.values()])
        assert not re.search(r"(^|[\s'\"(])/(tmp|home|root|work|usr|Users)/", text), text
        assert "\x1b" not in text


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """A kernel for several notebooks: each that starts takes longer than most short runs."""
    manager = AsyncKernelManager(kernel_name="python3")
    own = {**os.environ, "IPYTHONDIR": str(tmp_path_factory.mktemp("ipython"))}
    run_sync(manager.start_kernel)(env=own)
    yield manager
    run_sync(manager.shutdown_kernel)(now=True)


def test_runs_in_short(path, kernel, tmp_path):
    notebook = read(path)
    shorten(notebook, SHORTER[path.stem[:2]])
    anew = f"%reset -f\n%cd -q {tmp_path}\nimport logging\nlogging.disable(logging.NOTSET)"
    notebook.cells.insert(0, new_code_cell(anew))
    client = NotebookClient(notebook, timeout=600, km=kernel)
    client.execute()
    client.kc.stop_channels()
    assert all(cell.execution_count for cell in code_cells(notebook))


@pytest.mark.slow
def test_runs_as_it_is(path, tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))  # nobody's own start-up files
    resources = {"metadata": {"path": str(tmp_path)}}
    notebook = read(path)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    assert all(cell.execution_count for cell in code_cells(notebook))
