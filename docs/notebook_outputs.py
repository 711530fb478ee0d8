"""Runs notebooks and stores them with their outputs, without what differs from run to run.

    python docs/notebook_outputs.py notebooks/01_one_round_by_hand.ipynb …

Of a stream of text only what the cell says is kept: no log lines with times, no progress bars, no warnings of libraries
and no paths of this machine. Pictures stay as PNG.
"""

from __future__ import annotations

import base64
import io
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

# lines that tell of the machine or the clock, not of the notebook
_NOT_KEPT = re.compile(
    r"\x1b|\r|site-packages|Warning|warn\(|litlogger|(GPU|TPU|HPU) available|^(INFO|WARNING): "
    r"|━|│|┃|^\s*(\||[┏┡└├])|\d+(\.\d+)? (s|ms|seconds)\b"
)
_PATH = re.compile(r"(?<![\w.:/])/(?:tmp|home|root|work|usr|Users|private|var)/[^\s'\")\]]*/")
_MOST_LINES = 60


def cleaned(output: Any) -> Any | None:
    """Trim one output of a cell; None if nothing of it is kept."""
    if output.output_type == "stream":
        if output.name == "stderr":
            return None
        output.text = _trimmed(output.text)
        return output if output.text.strip() else None
    if output.output_type in ("display_data", "execute_result"):
        data = output.data
        kept = {
            kind: data[kind] for kind in ("image/png", "text/html", "text/plain") if kind in data
        }
        if "image/png" in kept:
            kept = {"image/png": smaller(kept["image/png"]), "text/plain": "a figure"}
        for kind in kept.keys() - {"image/png"}:
            kept[kind] = _PATH.sub("", re.sub(r" at 0x[0-9a-f]+", "", kept[kind]))
        output.data, output.metadata = kept, {}
        return output if kept else None
    return output


def smaller(png: str) -> str:
    """Reduce a picture in base64 to 128 colours, which charts do not show."""
    written = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(128)
    picture.save(written, format="PNG", optimize=True)
    return base64.b64encode(written.getvalue()).decode()


def _trimmed(text: str) -> str:
    lines = [_PATH.sub("", line) for line in text.splitlines() if not _NOT_KEPT.search(line)]
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES // 2], "…", *lines[-_MOST_LINES // 2 :]]
    return "\n".join([*lines, ""]) if lines else ""


def store(path: Path) -> None:
    """Run a notebook in an empty folder and write it back with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    os.environ["COLUMNS"] = "100"
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=1800, kernel_name="python3", resources=resources).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, 1):
        cell.outputs = [kept for output in cell.outputs if (kept := cleaned(output)) is not None]
        cell.execution_count, cell.metadata = number, {}
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number
    notebook.metadata.pop("widgets", None)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        store(Path(name))
        print(name, flush=True)
