"""The scripts of docs/how_to: short, the same as on the page, and they learn what they are about."""

import re
import runpy
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from readme import ROOT

FOLDER = ROOT / "docs" / "how_to"
PAGE = (ROOT / "docs" / "data.md").read_text()
MOST_LINES = 30  # that hold something
# module that a script needs besides ours, metric of its test, least and most it must be
SCRIPTS = {
    "resnet18": ((), "test/accuracy", 0.9, 1.0),
    "segmentation": ((), "test/pixels", 0.9, 1.0),
    "tabular_regression": (("pandas",), "test/mae", 0.0, 0.12),
    "text_classifier": (("datasets", "peft", "transformers"), "test/accuracy", 0.85, 1.0),
}


def test_every_script_is_tested():
    # tests/experiments/test_sweeps_doc.py, tests/test_pages_understood.py, tests/test_coming_from.py
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
