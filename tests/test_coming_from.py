"""The pages for newcomers: a port of Flower's example, on images of noise, and the cheat sheet."""

import re
import runpy

import pytest
import torch
from readme import ROOT
from small_sets import write_idx

DOCS = ROOT / "docs"


def python(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers
def test_the_port_of_flowers_example_is_on_the_page_and_trains(tmp_path, monkeypatch):
    pytest.importorskip("torchvision")
    assert python("coming_from.md") == [(DOCS / "how_to" / "from_flower.py").read_text()]
    monkeypatch.chdir(tmp_path)
    write_idx(tmp_path / "data" / "MNIST" / "raw", num_train=160)
    names = runpy.run_path(str(DOCS / "how_to" / "from_flower.py"))
    trainer, data = names["trainer"], names["data"]
    assert trainer.global_step == trainer.current_epoch == 3  # rounds
    assert [len(client) for client in data.clients] == [24] * 4  # 60 % of 40
    record = names["federation"].rounds.record
    assert len(record.finished) == 2
    losses = trainer.callback_metrics
    assert 0 < losses["test_loss"] < 1
    assert torch.isfinite(losses["clients/test_loss_mean"])  # each client's own fifth


def test_the_python_of_the_cheat_sheet_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = python("cheat_sheet.md")
    names: dict = {}
    exec(compile(block, "cheat_sheet.md", "exec"), names)  # noqa: S102 - our own words
    assert names["trainer"].global_step == 1


def test_every_family_of_the_decision_table_has_a_page():
    links = re.findall(r"\]\(algorithms/(\w+)\.md", (DOCS / "which_algorithm.md").read_text())
    assert set(links) >= {path.stem for path in (DOCS / "algorithms").glob("*.md")} - {
        "attacks",  # not for use
        "published",
    }
