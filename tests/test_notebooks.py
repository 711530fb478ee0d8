"""The notebooks run from top to bottom, and are stored without outputs.

By default every cell runs with a few rounds; ``pytest -m slow`` runs the notebooks as they are.
"""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))

# by the notebook's number: what its code says, and what a short run says instead
SHORTER = {
    "01": {"LOCAL_EPOCHS = 5": "LOCAL_EPOCHS = 2", "NUM_ROUNDS = 10": "NUM_ROUNDS = 2"},
    "02": {
        "max_epochs=10": "max_epochs=2",
        "num_steps=100": "num_steps=10",
        "max_epochs=15": "max_epochs=2",
    },
    "03": {"max_epochs=12": "max_epochs=2", "range(40)": "range(4)"},
    "04": dict.fromkeys(["max_epochs=30", "max_epochs=80", "max_epochs=160"], "max_epochs=2"),
    "05": {"rounds=10": "rounds=2", "left.plot(range(1, 11)": "left.plot(range(1, 3)"},
    "06": {"max_epochs=10": "max_epochs=2", "range(1, 11)": "range(1, 3)"},
    "07": {"NUM_ROUNDS = 1000": "NUM_ROUNDS = 20"},
    "08": {"max_epochs=8": "max_epochs=2", "range(1, 9)": "range(1, 3)"},
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


def test_is_stored_without_outputs(path):
    notebook = read(path)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in code_cells(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None


@pytest.mark.parametrize("is_short", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_runs_without_an_error(path, is_short, tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))  # nobody's own start-up files
    working_directory = tmp_path / "work"
    working_directory.mkdir()
    notebook = read(path)
    if is_short:
        shorten(notebook, SHORTER[path.stem[:2]])
    resources = {"metadata": {"path": str(working_directory)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    assert all(cell.execution_count for cell in code_cells(notebook))
