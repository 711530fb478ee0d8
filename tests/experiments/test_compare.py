"""``fl-lightning compare`` as a user types it, on a toy."""

import csv
import re
from pathlib import Path

import matplotlib.image
import pytest
import yaml
from toys import toy_options

from fl_lightning.cli import main
from fl_lightning.experiments.results import curves

CSV = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "elsewhere"}}
BASE = toy_options(max_epochs=3, logger=CSV)
FRAGILE = {"trainer": {"callbacks": [{"class_path": "toys.NeedsFile", "init_args": {"path": "f"}}]}}
EXPERIMENT = {
    "base": BASE,
    "variants": {"plain": None, "fragile": FRAGILE},
    "report": ["test/loss", "val/accuracy"],
}


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def compare(*words, **changes):
    Path("toy.yaml").write_text(yaml.safe_dump({**EXPERIMENT, **changes}))
    main(["compare", "--config", "toy.yaml", *words])


def rows(folder):
    with Path(folder, "results.csv").open() as file:
        return {row["variant"]: row for row in csv.DictReader(file)}


@pytest.mark.slow
def test_a_failed_run_is_named_and_alone_run_again_from_where_it_was(capsys):
    compare("--only", "plain")
    assert set(rows("runs/toy")) == {"plain"}
    with pytest.raises(SystemExit, match=r"1 of 2 runs failed:\n  fragile, seed 0: .*f is missing"):
        compare()
    assert set(rows("runs/toy")) == {"plain"}
    began = Path("runs/toy/plain/seed_0/run.json").stat().st_mtime_ns
    capsys.readouterr()

    Path("f").touch()
    compare()
    said = capsys.readouterr().out
    assert "1 of 2 runs were finished before" in said
    assert Path("runs/toy/plain/seed_0/run.json").stat().st_mtime_ns == began
    results = rows("runs/toy")
    plain, fragile = results["plain"], results["fragile"]
    unequal = {name for name in plain if plain[name] != fragile[name]}
    assert unequal <= {"variant", "seconds"}  # nothing was lost, nothing counted twice
    logged = curves(Path("runs/toy/fragile/seed_0"))
    assert list(logged["round/seconds"]) == [1, 2, 3]
    with Path("runs/toy/curves.csv").open() as file:
        of_one = [row["round"] for row in csv.DictReader(file) if row["variant"] == "plain"]
    assert of_one == ["1", "2", "3"], "the test's value is no round"
    assert float(plain["val/accuracy (best round)"]) == max(logged["val/accuracy"].values())
    sent = 4 * sum(logged["round/bytes_up"].values())  # by each of four clients
    assert float(plain["bytes up"]) == sent > 0

    assert Path("runs/toy/results.md").read_text().strip() in said
    assert matplotlib.image.imread("runs/toy/results.png").std() > 0
    assert "val/accuracy" in Path("runs/toy/plain/seed_0/metrics.csv").read_text()
    assert not Path("elsewhere").exists()
    page = Path("runs/toy/report.html").read_text()
    assert all(f"{float(row['test/loss']):.6g}" in page for row in results.values())
    assert "test/loss & val/accuracy" in Path("runs/toy/results.tex").read_text()
    assert Path("runs/toy/figures/val_accuracy.svg").exists()
    assert Path("runs/toy/plain/seed_0/rounds.jsonl").read_text().count("\n") == 3
    assert not Path("runs/toy/plain/seed_0/report.html").exists()  # there is one of all runs

    # what is reported may change without any run; one at a time elsewhere gives the same numbers
    compare(report=["val/loss"])
    assert "val/loss" in rows("runs/toy")["plain"]
    compare("--only", "plain", "--workers", "1", "--out", "other")
    again = rows("other")["plain"]
    assert {name for name in plain if plain[name] != again[name]} <= {"seconds"}


@pytest.mark.parametrize(
    ("words", "changes", "says"),
    [
        ((), {"variants": {"a": None, "b": {"federation": {"local_step": 2}}}}, "'b'.*local_steps"),
        ((), {"varants": {"a": None}}, "varants"),
        ((), {"configs": ["nowhere.yaml"]}, "nowhere.yaml"),
        (("--workers", "0"), {}, "workers"),
        (("--only", "plan"), {}, "no variant .plan.: the variants are .fragile., .plain."),
        (("--", "--trainer.max_rounds", "1"), {}, "max_rounds"),
    ],
)
def test_mistakes_are_told_before_anything_runs(capsys, words, changes, says):
    with pytest.raises(SystemExit) as exit_:
        compare(*words, **changes)
    code = exit_.value.code
    said = code if isinstance(code, str) else capsys.readouterr().err
    assert re.search(says, said), said
    assert not Path("runs").exists()


def test_the_command_is_listed_and_prints_what_it_understood(capsys):
    main(["--help"])
    assert "compare" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_:
        compare("--seeds", "0,1", "--print_config")
    assert exit_.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["base"], printed["seeds"]) == (BASE, "0,1")
