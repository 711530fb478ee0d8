"""The notebooks run from top to bottom, and are stored without outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_is_stored_without_outputs(path):
    notebook = read(path)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in code_cells(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None


def test_runs_without_an_error(path, tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))  # nobody's own start-up files
    working_directory = tmp_path / "work"
    working_directory.mkdir()
    notebook = read(path)
    resources = {"metadata": {"path": str(working_directory)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    assert all(cell.execution_count for cell in code_cells(notebook))
