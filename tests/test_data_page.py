"""docs/data.md: its YAML is understood, its Python runs."""

import re
import sys

import numpy as np
import pytest
import torch
from readme import ROOT

from fl_lightning import FederatedDataModule
from fl_lightning.cli import main
from fl_lightning.data import Digits

PAGE = (ROOT / "docs" / "data.md").read_text()
YAML = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
PYTHON = [
    block
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    if "trainer.fit" not in block  # these are scripts: test_how_to.py
]


def understood(block, tmp_path, monkeypatch, capsys):
    """Return the whole configuration that a block becomes on top of the quick start's model."""
    (tmp_path / "own.yaml").write_text(block)
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    quickstart = str(ROOT / "configs" / "quickstart.yaml")
    layers = ["--config", quickstart, "--config", str(tmp_path / "own.yaml"), "--print_config"]
    with pytest.raises(SystemExit) as end:
        main(["fit", *layers])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("number", range(len(YAML)))
def test_yaml_is_understood(number, tmp_path, monkeypatch, capsys):
    shown = understood(YAML[number], tmp_path, monkeypatch, capsys)
    for name in re.findall(r"class_path: ([\w.]+)", YAML[number]):
        assert f"class_path: {name}\n" in shown or name.rpartition(".")[2] in shown


def test_python_runs_and_does_what_is_said():
    arrays, sensor = PYTHON
    names: dict = {}
    exec(compile(arrays, "data.md", "exec"), names)  # noqa: S102 - our own words
    names["data"].setup("fit")
    assert len(names["data"].clients) == 2
    exec(compile(sensor, "data.md", "exec"), names)  # noqa: S102 - our own words
    inputs, label = names["Sensor"]().apply((torch.ones(1000), 3), 50, seed=1)
    assert label == 3
    np.testing.assert_allclose(inputs.mean(), 1.5, atol=2e-3)
    again = names["Sensor"]().apply((torch.ones(1000), 3), 50, seed=1)[0]
    assert torch.equal(inputs, again)
    data = FederatedDataModule(
        Digits(seed=0), num_clients=3, example_transforms=[names["Sensor"]()]
    )
    data.setup("fit")
    assert data.train_batch(data.clients[1][:4])[0].shape == (4, 1, 8, 8)
