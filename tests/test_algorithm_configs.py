"""Every file in configs/algorithms runs for two rounds, over a small base."""

import math
import re
import sys
from pathlib import Path

import pytest
import yaml
from golden.runs import ROOT, configs
from toys import ACCELERATOR

from fl_lightning.cli import main

FOLDER = ROOT / "configs" / "algorithms"
FILES = sorted(FOLDER.glob("*.yaml"))
SHORT = {
    "trainer.max_epochs": "2",
    "trainer.accelerator": ACCELERATOR,
    "trainer.logger": "lightning.pytorch.loggers.CSVLogger",
    "trainer.logger.save_dir": "runs",
    "data.source.batch_size": "64",
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_runs_over_a_base(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    layers = [f"--config={layer}" for layer in configs(path.stem, tmp_path)]
    main(["fit", *layers, *(f"--{option}={value}" for option, value in SHORT.items())])
    assert list(Path("runs").rglob("last.ckpt"))
    [log] = Path("runs").rglob("metrics.csv")
    names, *rows = (line.split(",") for line in log.read_text().splitlines())
    losses = [row[names.index("val/loss")] for row in rows]
    assert all(math.isfinite(float(loss)) for loss in losses if loss)
    norms, steps = (
        [float(row[names.index(name)]) for row in rows if row[names.index(name)]]
        for name in ("round/client_update_norm", "round/update_norm")
    )
    assert sum(steps) > 0.4 * sum(norms)  # the global model moves as clients do


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_says_how_to_run_it_and_changes_little(path):
    command = re.search(r"fl-lightning fit --config configs/(\S+) --config (\S+)", path.read_text())
    assert command[2] == f"configs/algorithms/{path.name}"
    assert (ROOT / "configs" / command[1]).is_file()
    model = yaml.safe_load(path.read_text()).get("model", {"init_args": {"optimizer": None}})
    assert model.keys() == {"init_args"}
    assert model["init_args"].keys() == {"optimizer"}
