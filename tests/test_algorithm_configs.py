"""Every file in configs/algorithms runs for two rounds, over a small base."""

import math
import re
import sys
from pathlib import Path

import pytest
import yaml
from toys import ACCELERATOR

from fl_lightning.cli import main

FOLDER = Path(__file__).parents[1] / "configs" / "algorithms"
FILES = sorted(FOLDER.glob("*.yaml"))
BASE = """
seed_everything: 0
num_threads: 1
test_after_fit: false
report: false
model:
  class_path: fl_lightning.ImageClassifier
  init_args:
    network: vit_tiny_patch16_224
    network_kwargs: {patch_size: 4, embed_dim: 8, depth: 1, num_heads: 2, global_pool: avg, class_token: false}
    num_classes: 10
    in_chans: 1
    image_size: 8
data:
  class_path: fl_lightning.FederatedDataModule
  init_args:
    source: {class_path: fl_lightning.data.Digits, init_args: {batch_size: 64}}
    num_clients: 8 # of which Bulyan needs seven
    client_val_fraction: 0.1
federation:
  cohort: {class_path: fl_lightning.UniformCohort, init_args: {fraction: 0.5}}
  local_epochs: 1
trainer:
  max_epochs: 2
  accelerator: cpu
  devices: 1
  enable_progress_bar: false
  enable_model_summary: false
  num_sanity_val_steps: 0
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: runs, name: run}}
"""


def named_base(path):
    """Return the base of the command in a file's first lines."""
    command = re.search(r"fl-lightning fit --config configs/(\S+) --config (\S+)", path.read_text())
    assert command.group(2) == f"configs/algorithms/{path.name}"
    return FOLDER.parent / command.group(1)


def small_base(path):
    """Return a small one whose clients train as those of the base that a file names."""
    base = yaml.safe_load(BASE)
    named = yaml.safe_load(named_base(path).read_text())
    base["trainer"]["accelerator"] = ACCELERATOR
    base["model"]["init_args"]["optimizer"] = named["model"]["init_args"]["optimizer"]
    return base


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_runs_over_a_base(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    Path("base.yaml").write_text(yaml.safe_dump(small_base(path)))
    main(["fit", "--config", "base.yaml", "--config", str(path)])
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
    assert named_base(path).is_file()
    model = yaml.safe_load(path.read_text()).get("model", {"init_args": {"optimizer": None}})
    assert model.keys() == {"init_args"}
    assert model["init_args"].keys() == {"optimizer"}
