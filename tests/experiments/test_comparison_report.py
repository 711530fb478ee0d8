"""The report of a comparison: its page, its figures, its table for LaTeX."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure

from fl_lightning.experiments.compare import _bars, _curves, _matrix, write_comparison
from fl_lightning.experiments.experiment import Experiment, PlannedRun, Variant, run_loggers
from fl_lightning.experiments.results import RunResult, latex

VALUES = {("plain", 0): 0.5, ("plain", 1): 0.7, ("top_k 5 %", 0): 0.8, ("top_k 5 %", 1): 0.8}


def results():
    return [
        RunResult(
            Variant(name, ({"model": {"lr": value}},)),
            seed,
            {"val/accuracy": {1: value / 2, 2: value}, "test/accuracy": {2: value}},
            {"val/accuracy": value, "test/accuracy": value, "seconds": 3.0},
        )
        for (name, seed), value in VALUES.items()
    ]


def test_bands_and_whiskers_are_standard_deviations_over_seeds():
    axes = Figure().subplots()
    _curves("val/accuracy", results(), None)(axes)
    assert [line.get_ydata().tolist() for line in axes.lines] == [[0.3, 0.6], [0.4, 0.8]]
    edge = axes.collections[0].get_paths()[0].vertices[:, 1]
    std = np.std([0.5, 0.7], ddof=1)
    assert edge.max() == pytest.approx(0.6 + std)
    axes = Figure().subplots()
    _bars("test/accuracy", results())(axes)
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([0.6, 0.8])


def test_the_best_mean_is_bold_and_names_are_escaped():
    lines = latex(results(), ["test/accuracy"], {"test/accuracy": "max"}).splitlines()
    assert r"plain & $0.600 \pm 0.141$ \\" in lines
    assert r"top\_k 5 \% & $\mathbf{0.800} \pm 0.000$ \\" in lines
    lowest = latex(results(), ["test/accuracy"], {"test/accuracy": "min"})
    assert r"\mathbf{0.600}" in lowest
    assert r"\mathbf" not in latex(results(), ["test/accuracy"], {})


def test_the_page_has_every_variant_and_run(tmp_path):
    experiment = Experiment(
        variants={"plain": {}, "top_k 5 %": {}},
        seeds=[0, 1],
        report=["val/accuracy", "test/accuracy"],
    )
    write_comparison(tmp_path, experiment, results())
    page = (tmp_path / "report.html").read_text()
    assert "2 variants, 2 seeds, 4 runs" in page
    assert "0.600 ± 0.141" in page
    assert "<title>plain, round 2: 0.6 ± 0.14</title>" in page
    assert "<title>top_k 5 %: 0.8 ± 0</title>" in page
    assert page.count("<tr><td>plain</td>") == 3  # of the table, and of two runs
    assert page.count("<svg") == 3  # curves of the monitored metric, two times bars
    assert {p.name for p in (tmp_path / "figures").iterdir()} == {
        f"{name}.{ending}"
        for name in ("val_accuracy", "val_accuracy_at_the_end", "test_accuracy_at_the_end")
        for ending in ("png", "svg")
    }


def test_two_axes_are_matrices_and_a_diverged_seed_is_not_left_out_of_a_cell(tmp_path):
    """A mean over the seeds that survive would be 0.9; the table has none either."""
    grid = {"lr": {"a": {}, "b": {}}, "rule": {"x": {}, "y": {}}}
    experiment = Experiment(grid=grid, report=["test/accuracy"], seeds="0,1")
    runs = [
        RunResult(
            v, seed, {}, {"test/accuracy": np.nan if (v.name, seed) == ("a / x", 1) else value}
        )
        for v in experiment.all_variants
        for seed, value in enumerate((0.9, 0.5))
    ]
    for given, cells in ((runs, ["0.7"] * 3), (runs[:2], [])):
        axes = Figure().subplots()
        _matrix("test/accuracy", given, experiment)(axes)
        assert [text.get_text() for text in axes.texts] == cells
    runs = [replace(run, columns={**run.columns, "seconds": 1.0}) for run in runs[:-1]]
    write_comparison(tmp_path, experiment, runs)  # one is missing
    page = (tmp_path / "report.html").read_text()
    assert "lr \\ rule" in page
    assert page.count("<svg") == 1


def test_the_users_loggers_stay_with_names_of_runs():
    of = "lightning.pytorch.loggers"
    given = [
        {"class_path": f"{of}.TensorBoardLogger", "init_args": {"save_dir": "mine"}},
        {"class_path": f"{of}.CSVLogger", "init_args": {"save_dir": "mine"}},
        {"class_path": f"{of}.WandbLogger", "init_args": {"project": "p", "offline": True}},
        {"class_path": "my.Logger", "init_args": {"x": 1}},
    ]
    text = yaml.safe_dump({"trainer": {"logger": given}})
    run = PlannedRun(Variant("top k", ()), 3, text, Path("runs/a/top_k/seed_3"))
    own, table, wandb, mine = run_loggers(run)
    place = {"save_dir": "runs/a", "name": "top_k", "version": "seed_3"}
    assert own["init_args"] == {**place, "default_hp_metric": False}
    assert table["init_args"] == place
    assert wandb["init_args"] == {
        "project": "p",
        "offline": True,
        "save_dir": "runs/a/top_k/seed_3",
        "name": "top_k-seed_3",
    }
    assert mine == given[3]
    for logger in (True, False, None):
        plain = yaml.safe_dump({"trainer": {"logger": logger}})
        only = PlannedRun(Variant("top k", ()), 3, plain, Path("runs/a/top_k/seed_3"))
        assert run_loggers(only) == [own]
