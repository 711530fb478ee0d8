"""The scripts of docs/how_to: short, the same as on the page, and they learn what they are about."""

import copy
import math
import re
import runpy
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from readme import ROOT

FOLDER = ROOT / "docs" / "how_to"
PAGE = "".join((ROOT / "docs" / name).read_text() for name in ("data.md", "language_models.md"))
MOST_LINES = 45  # that hold something
# module that a script needs besides ours, metric of its test, least and most it must be
SCRIPTS = {
    "preferences": (("peft", "transformers"), "test/preferred", 0.9, 1.0),
    "resnet18": ((), "test/accuracy", 0.9, 1.0),
    "segmentation": ((), "test/pixels", 0.9, 1.0),
    "tabular_regression": (("pandas",), "test/mae", 0.0, 0.12),
    "text_classifier": (("datasets", "peft", "transformers"), "test/accuracy", 0.85, 1.0),
}


def test_every_script_is_tested():
    # tests/experiments/test_sweeps_doc.py, tests/test_pages_understood.py, tests/test_pages.py
    elsewhere = {"sweep_on_slurm", "draw_partitions", "from_flower"}
    assert {path.stem for path in FOLDER.glob("*.py")} - elsewhere == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short_and_on_the_page(name):
    source = (FOLDER / f"{name}.py").read_text()
    assert len([line for line in source.splitlines() if line.strip()]) <= MOST_LINES
    blocks = re.findall(rf"`how_to/{name}\.py`.*?```python\n(.*?)```", PAGE, re.DOTALL)
    assert blocks[:1] == [source]


def trained(name, tmp_path, monkeypatch):
    """Run a script in an empty folder and return its trainer."""
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert isinstance(names["trainer"], Trainer)
    return names["trainer"]


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore"
)  # Lightning's advice: the scripts have no validation, no workers
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_learns(name, tmp_path, monkeypatch):
    needed, metric, least, most = SCRIPTS[name]
    for module in needed:
        pytest.importorskip(module)
    found = float(trained(name, tmp_path, monkeypatch).callback_metrics[metric])
    assert least <= found <= most


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_only_what_lora_trains_travels(tmp_path, monkeypatch):
    for module in SCRIPTS["text_classifier"][0]:
        pytest.importorskip(module)
    source = (FOLDER / "text_classifier.py").read_text().replace("max_epochs=10", "max_epochs=1")
    monkeypatch.chdir(tmp_path)
    Path("before.py").write_text(source.split("trainer.fit(")[0])
    names = runpy.run_path("before.py")
    module = names["Reviewer"]()
    frozen = {name: p.clone() for name, p in module.named_parameters() if not p.requires_grad}
    names["trainer"].fit(module, datamodule=names["data"])
    size = sum(p.numel() for p in module.parameters() if p.requires_grad)
    sent = float(names["trainer"].callback_metrics["round/bytes_up"])
    assert 4 * size <= sent <= 4 * size + 400  # 4 bytes a number, and a header
    assert size < sum(p.numel() for p in module.parameters()) / 10
    for name, parameter in module.named_parameters():
        assert name not in frozen or (parameter == frozen[name]).all()


def test_preferences_are_learned_from_the_ratio_to_the_model_without_adapters(tmp_path):
    """DPO's loss, Rafailov et al. 2023, equation 7, of a merged model beside its base, in float64."""
    for module in (*SCRIPTS["preferences"][0], "datasets"):
        pytest.importorskip(module)
    from tiny_llama import negative_log_likelihoods

    source = (FOLDER / "preferences.py").read_text()
    (tmp_path / "before.py").write_text(source.split("trainer = ")[0])
    names = runpy.run_path(str(tmp_path / "before.py"))
    model, pairs = names["model"].double(), [names["Pairs"]()[index] for index in range(3)]
    batch = {name: torch.stack([pair[name] for pair in pairs]) for name in pairs[0]}
    with torch.no_grad():
        assert float(model.training_step(batch, 0)) == pytest.approx(math.log(2), abs=1e-12)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    merged = copy.deepcopy(model.network).merge_and_unload()
    base = copy.deepcopy(model.network).unload()
    losses = []
    for pair in pairs:
        rewards = []
        for tokens, labels in zip(pair["input_ids"], pair["labels"], strict=True):
            alone, with_adapters = (
                negative_log_likelihoods(network, tokens, labels >= 0)[0]
                for network in (base, merged)
            )
            rewards.append(alone - with_adapters)
        margin = 0.1 * (rewards[0] - rewards[1])
        losses.append(math.log1p(math.exp(-margin)))
    found = float(model.training_step(batch, 0).detach())
    assert found == pytest.approx(sum(losses) / 3, rel=1e-9)
    assert abs(found - math.log(2)) > 1e-3
