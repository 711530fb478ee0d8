"""docs/terminal.md: its Python runs, and its table names what there is."""

import re

from readme import ROOT

from fl_lightning import companions

PAGE = (ROOT / "docs" / "terminal.md").read_text()


def test_its_python_runs_and_leaves_a_log_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [block] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(block, "terminal.md", "exec"), {})  # noqa: S102 - our own words
    assert "| INFO | round 2/2: " in next(tmp_path.rglob("run.log")).read_text()


def test_its_table_has_every_companion():
    named = re.findall(r"^\| `(\w+)(?:\(\w+\))?` \|", PAGE, re.MULTILINE)
    assert set(named) == {type(callback).__name__ for callback in companions()}
