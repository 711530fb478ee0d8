"""The runs whose results are frozen: every algorithm's configuration and more, over one small base.

PYTHONPATH=tests python -m golden.record [NAME …]      # anew, after a change of results on purpose
"""

from __future__ import annotations

import hashlib
import re
import warnings
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import yaml

from fl_lightning.cli import main

ROOT = Path(__file__).parents[2]
ALGORITHMS = sorted(path.stem for path in (ROOT / "configs" / "algorithms").glob("*.yaml"))
ROUNDS = 3

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
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1, momentum: 0.9}}
data:
  class_path: fl_lightning.FederatedDataModule
  init_args:
    source: {class_path: fl_lightning.data.Digits, init_args: {batch_size: 16}}
    num_clients: 8 # of which Bulyan needs seven
    partition: {class_path: fl_lightning.data.DirichletPerClass, init_args: {alpha: 1.0}}
    client_val_fraction: 0.1
federation:
  cohort: {class_path: fl_lightning.UniformCohort, init_args: {fraction: 0.5}}
  local_epochs: 1
  aggregator: {class_path: fl_lightning.Mean, init_args: {exact: true}}
trainer:
  accelerator: cpu
  devices: 1
  enable_progress_bar: false
  enable_model_summary: false
  num_sanity_val_steps: 0
  logger: false
"""
PRIVATE = {"clip_norm": 0.1, "noise_multiplier": 4.0, "delta": 1e-3, "secure_noise": False}


def private(kind: str, **federation: Any) -> dict[str, Any]:
    path = f"fl_lightning.{kind}"
    mean = {"class_path": "fl_lightning.Mean", "init_args": {"weight_by_examples": False}}
    options = {"aggregator": mean, "privacy": {"class_path": path, "init_args": PRIVATE}}
    return {"federation": {**options, **federation}}


def updates(*transforms: tuple[str, dict[str, Any]], **federation: Any) -> dict[str, Any]:
    path = [
        {"class_path": f"fl_lightning.updates.{name}", "init_args": options}
        for name, options in transforms
    ]
    return {"federation": {"updates": path, **federation}}


def optimizer(name: str, **options: Any) -> dict[str, Any]:
    return {"model": {"init_args": {"optimizer": {"class_path": name, "init_args": options}}}}


def masked(density: float) -> dict[str, Any]:
    rule = {"class_path": "fl_lightning.sparsity.LeastSensitive"}
    calibration = {"density": density, "rule": rule}
    made = {"class_path": "fl_lightning.MaskCalibration", "init_args": calibration}
    sparse = optimizer("fl_lightning.SparseSGDM", lr=0.1, momentum=0.9)
    return {**sparse, "trainer": {"callbacks": [made]}}


# name -> what it changes in the base
OTHERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adamw": optimizer("torch.optim.AdamW", lr=0.003, weight_decay=0.01),
    "steps": {"federation": {"local_epochs": None, "local_steps": 3}},
    "not exact": {"federation": {"aggregator": {"class_path": "fl_lightning.Mean"}}},
    "gradients clipped": {"trainer": {"gradient_clip_val": 0.5}},
    "accumulated": {"trainer": {"accumulate_grad_batches": 2}},
    "bfloat16": {"trainer": {"precision": "bf16-mixed"}},
    "float64": {"trainer": {"precision": "64-true"}},
    "dropout": {"model": {"init_args": {"drop_rate": 0.2}}},
    "poisson cohort": {
        "federation": {
            "cohort": {"class_path": "fl_lightning.PoissonCohort", "init_args": {"fraction": 0.5}}
        }
    },
    "mask": masked(0.1),
    "compressed": {"file": "compressed.yaml"},
    "low rank": {"file": "low_rank.yaml"},
    "signs": updates(
        ("ErrorFeedback", {"transforms": [{"class_path": "fl_lightning.updates.Sign"}]})
    ),
    "random k": updates(("RandomK", {"fraction": 0.2})),
    "central privacy": private("CentralDP"),
    "local privacy": private("LocalDP"),
    "distributed privacy": private("DistributedDP"),
    "example privacy": private("ExampleDP", local_epochs=None, local_steps=3),
    "secure": {"file": "secure.yaml"},
}
NAMES = [*OTHERS, *ALGORITHMS]


@dataclass(frozen=True)
class Variant:
    """How a run is executed; none of it should change a result by more than rounding."""

    engine: str
    devices: int

    def __str__(self) -> str:
        return f"{self.engine}, {self.devices}"


VARIANTS = [Variant(engine, devices) for devices in (1, 2) for engine in ("sequential", "slots")]


def configs(name: str, folder: Path) -> list[Path]:
    """Write the base, and return it with a run's own file."""
    base = folder / "base.yaml"
    content = yaml.safe_load(BASE)
    if name in OTHERS:
        change = dict(OTHERS[name])
        if "file" in change:
            own = ROOT / "configs" / change["file"]
        else:
            own = folder / "own.yaml"
            own.write_text(yaml.safe_dump(change))
    else:
        own = ROOT / "configs" / "algorithms" / f"{name}.yaml"
        named = re.search(r"--config configs/(\S+) --config", own.read_text())
        assert named
        user = yaml.safe_load((ROOT / "configs" / named.group(1)).read_text())
        content["model"]["init_args"]["optimizer"] = user["model"]["init_args"]["optimizer"]
    base.write_text(yaml.safe_dump(content))
    return [base, own]


def result(name: str, variant: Variant, folder: Path) -> dict[str, Any]:
    """Run, and return the last model's hash and a few of its numbers, or what was refused."""
    words = [word for path in configs(name, folder) for word in ("--config", str(path))]
    words += ["--federation.engine", variant.engine, "--trainer.devices", str(variant.devices)]
    words += ["--trainer.max_epochs", str(ROUNDS), "--trainer.default_root_dir", str(folder)]
    said = StringIO()
    try:
        with redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a run may say that it goes another way, and go on
            main(["fit", *words])
    except SystemExit as refusal:
        sentence = refusal.code if isinstance(refusal.code, str) else said.getvalue().strip()
        return {"refused": sentence.splitlines()[-1]}
    [path] = folder.rglob("last.ckpt")
    state = torch.load(path, weights_only=True)["state_dict"]
    return digest(state)


def digest(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return what tells one model from another, to the bit and roughly."""
    code = hashlib.sha256()
    for name in sorted(state):
        code.update(name.encode() + state[name].contiguous().numpy().tobytes())
    numbers = torch.cat([value.double().flatten() for _, value in sorted(state.items())])
    places = torch.linspace(0, len(numbers) - 1, 5).long()
    rough = [float(numbers.norm()), *numbers[places].tolist()]
    return {"bits": code.hexdigest()[:16], "rough": [round(value, 9) for value in rough]}
