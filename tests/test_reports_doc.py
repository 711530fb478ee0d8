"""What docs/reports.md says: its Python runs, its names exist."""

import re
from pathlib import Path

import pytest
import yaml

from fl_lightning import ClientEvaluation
from fl_lightning.cli import main

PAGE = (Path(__file__).parents[1] / "docs" / "reports.md").read_text()


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_its_python_makes_the_files_that_it_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (trained,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(trained, "reports.md", "exec"), {})  # noqa: S102 - our own words
    folder = tmp_path / "runs" / "mine" / "version_0"
    files = {path.name for path in folder.iterdir()}
    assert {"report.html", "figures", "rounds.jsonl", "partition.csv"} <= files
    (folder / "report.html").unlink()
    command = re.search(r"uv run fl-lightning (report .*)", PAGE).group(1)
    main(command.replace("quickstart", "mine").split())
    assert (folder / "report.html").exists()


def test_its_yaml_is_of_a_callback():
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (callback,) = yaml.safe_load(block)["trainer"]["callbacks"]
    assert callback["class_path"] == "fl_lightning.ClientEvaluation"
    assert ClientEvaluation(**callback["init_args"])._local is not None
