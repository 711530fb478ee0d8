"""What docs/sweeps.md shows is what there is."""

import re
import sys
from pathlib import Path

import pytest
import yaml
from readme import ROOT

from fl_lightning.cli.commands import parser_of, resolve
from fl_lightning.experiments.space import Search
from fl_lightning.experiments.sweep_plan import place_of, value_at

DOC = (ROOT / "docs" / "sweeps.md").read_text()
QUICKSTART = ROOT / "configs" / "sweeps" / "quickstart.yaml"


def test_the_search_of_the_page_is_the_one_in_the_box():
    [block] = re.findall(r"```yaml\n(.*?)```", DOC, re.DOTALL)
    assert yaml.safe_load(block) == yaml.safe_load(QUICKSTART.read_text())


def test_that_search_includes_what_the_quickstart_says(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    given = parser_of("sweep").parse_args(["--search", str(QUICKSTART)])
    search = Search(**{key: getattr(given, key) for key in Search.__dataclass_fields__})
    [file] = search.configs
    assert Path(file.absolute).resolve() == ROOT / "configs" / "quickstart.yaml"
    configuration = yaml.safe_load(resolve(["--config", file.absolute]))
    for path, parameter in search.parameters.items():
        if not path.startswith("federation.server_optimizer"):  # base gives it
            assert parameter.key_of(value_at(configuration, place_of(configuration, path)))


def test_every_key_of_a_search_is_an_option_and_on_the_page():
    options = parser_of("sweep")._option_string_actions
    for key in Search.__dataclass_fields__:
        assert f"--{key}" in options
        assert re.search(rf"\b{key}\b", DOC), f"docs/sweeps.md does not tell of {key}"


@pytest.mark.slow
def test_python_on_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [block] = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
    found = {}
    exec(compile(block, "sweeps.md", "exec"), found)  # noqa: S102 - our own words
    trials = found["study"].trials
    assert [trial.state.name for trial in trials] == ["COMPLETE", "COMPLETE"]
    assert all(len(trial.intermediate_values) == 3 for trial in trials)


def test_the_launcher_is_short():
    launcher = ROOT / "docs" / "how_to" / "sweep_on_slurm.py"
    assert "docs/how_to/sweep_on_slurm.py" in DOC
    assert len(launcher.read_text().splitlines()) <= 35
    compile(launcher.read_text(), str(launcher), "exec")
