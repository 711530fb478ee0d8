"""``fl-lightning sweep`` as a user types it, on a toy."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
import yaml
from lightning.pytorch import Callback
from toys import toy_options

from fl_lightning.cli.main import main
from fl_lightning.experiments.results import curves

ROOT = Path(__file__).parents[2]
BASE = toy_options(max_epochs=4)
LR = {"low": 1.0e-4, "high": 1.0, "log": True}
SEARCH = {"base": BASE, "space": {"model.lr": LR}, "startup_trials": 2, "min_rounds": 1}


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def write(**changes):
    Path("toy.yaml").write_text(yaml.safe_dump({**SEARCH, **changes}))
    return ["sweep", "--search", "toy.yaml"]


def sweep(*words, **changes):
    main([*write(**changes), *words])


def rows(folder="runs/sweep_toy"):
    with Path(folder, "trials.csv").open() as file:
        return {int(row["trial"]): row for row in csv.DictReader(file)}


def logged(trial, seed=0):
    return curves(Path(f"runs/sweep_toy/trial_{trial:04d}/seed_{seed}"))


class SlowRounds(Callback):
    """Leaves time to kill a run."""

    def on_train_epoch_end(self, trainer, pl_module):
        time.sleep(0.5)


@pytest.mark.slow
def test_a_sweep_finds_a_rate_as_good_as_the_configured_one(capsys):
    sweep("--trials", "7", "--workers", "2")
    said = capsys.readouterr().out
    found = rows()
    assert len(found) == 7
    assert float(found[0]["model.lr"]) == 0.1  # the configuration's own comes first
    complete = {n: float(row["value"]) for n, row in found.items() if row["state"] == "complete"}
    best = max(complete, key=lambda n: (complete[n], -n))
    assert complete[best] >= complete[0]
    assert f"trial {best}; as configured {complete[0]:.4f}" in said
    for number, value in complete.items():
        assert logged(number)["val/accuracy"][4] == pytest.approx(value)
        assert "test/loss" not in logged(number)  # a search does not look at the test
    for number, row in found.items():
        if row["state"] == "stopped":
            assert max(logged(number)["val/accuracy"]) == int(row["rounds"]) < 4
    files = {path.name for path in Path("runs/sweep_toy").iterdir() if path.is_file()}
    pictures = {f"{name}.{kind}" for name in ("trials", "importance") for kind in ("png", "svg")}
    assert files == {"best.yaml", "study.db", "trials.csv", "trials.md", *pictures}

    main(["fit", "--config", "runs/sweep_toy/best.yaml", "--trainer.default_root_dir", "again"])
    again = curves(next(Path("again").rglob("version_0")))
    assert again["val/accuracy"][4] == pytest.approx(complete[best])


@pytest.mark.slow
def test_a_killed_sweep_goes_on_as_if_nothing_had_happened(tmp_path):
    """kill -9 to the command alone: its run ends by itself, and the trial by its checkpoint."""
    slow = {**BASE, "trainer": {**BASE["trainer"], "callbacks": ["test_sweep.SlowRounds"]}}
    words = write(base=slow, trials=5)
    command = [sys.executable, "-m", "fl_lightning", *words, "--workers=1"]
    path = f"{ROOT}:{ROOT / 'tests'}:{Path(__file__).parent}"
    env = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen([*command, "--out=killed"], env=env, stdout=subprocess.DEVNULL) as first:
        checkpoint = Path("killed/trial_0001/seed_0/checkpoints/last.ckpt")
        deadline = time.monotonic() + 120
        while not checkpoint.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL)
    assert checkpoint.exists()
    options = {"env": env, "capture_output": True, "text": True}
    second = subprocess.run([*command, "--out=killed"], check=False, **options)
    assert second.returncode == 0, second.stderr
    assert "trial 1: resumed where it was interrupted" in second.stdout
    assert "1 done before" in second.stdout
    whole = subprocess.run([*command, "--out=whole"], check=False, **options)
    assert whole.returncode == 0, whole.stderr
    there, here = rows("killed"), rows("whole")
    for row in (*there.values(), *here.values()):
        row.pop("seconds")
    assert there == here


@pytest.mark.slow
def test_several_commands_share_one_study():
    words = [*write(trials=6, pruner="none"), "--workers=1", "--storage=shared.journal"]
    command = [sys.executable, "-m", "fl_lightning", *words]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ends = [(*process.communicate(), process.returncode) for process in started]
    assert [code for _, _, code in ends] == [0, 0], ends
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend("shared.journal")
    )
    trials = optuna.load_study(study_name="toy", storage=storage).trials
    states = [trial.state.name for trial in trials]
    assert states.count("COMPLETE") == 6
    assert set(states) <= {"COMPLETE", "FAIL"}
    own = [out.count("] trial ") for out, _, _ in ends]
    assert sum(own) == 6
    assert min(own) > 0


@pytest.mark.slow
def test_a_trial_of_several_seeds_has_their_mean_and_any_metric_can_be_lowered():
    sweep(
        *("--trials", "3", "--workers", "2", "--pruner", "none", "--value", "best"),
        metric="val/loss",
        mode="min",
        seeds=[3, 4],
    )
    found = rows()
    for number, row in found.items():
        values = [min(logged(number, seed)["val/loss"].values()) for seed in (3, 4)]
        assert float(row["value"]) == pytest.approx(sum(values) / 2)
        assert [float(v) for v in row["values of seeds"].split()] == pytest.approx(values)
    assert list(found) == sorted(found, key=lambda n: float(found[n]["value"]))
    best = yaml.safe_load(Path("runs/sweep_toy/best.yaml").read_text())
    assert best["model"]["init_args"]["lr"] == float(next(iter(found.values()))["model.lr"])


@pytest.mark.slow
def test_a_grid_is_tried_once_each(capsys):
    space = {"model.lr": [0.01, 0.1], "federation.local_steps": {"low": 1, "high": 2}}
    sweep("--sampler", "grid", space=space, pruner="none", metric="train/accuracy")
    tried = {(row["model.lr"], row["federation.local_steps"]) for row in rows().values()}
    assert tried == {("0.01", "1"), ("0.01", "2"), ("0.1", "1"), ("0.1", "2")}
    for number, row in rows().items():
        assert logged(number)["train/accuracy"][4] == pytest.approx(float(row["value"]))
    capsys.readouterr()
    sweep("--sampler", "grid", space=space, pruner="none", metric="train/accuracy")
    assert "4 done before" in capsys.readouterr().out
    assert len(rows()) == 4

    with pytest.raises(SystemExit) as refused:
        sweep("--sampler", "grid", space=space, pruner="none", metric="val/loss")
    assert "metric (train/accuracy there, val/loss here)" in str(refused.value)
    with pytest.raises(SystemExit) as refused:
        sweep("--sampler=grid", "--", "--data.num_clients=5", space=space, metric="train/accuracy")
    assert "data.init_args.num_clients (4 there, 5 here)" in str(refused.value)


@pytest.mark.slow
def test_a_rate_that_diverges_is_stopped_and_a_mistake_ends_the_sweep(capsys):
    space = {"model.lr": [0.1, 1.0e30]}
    sweep("--sampler", "grid", space=space)
    states = {row["model.lr"]: row for row in rows().values()}
    assert states["0.1"]["state"] == "complete"
    assert states["1e+30"]["state"] == "stopped"
    assert "nan" in states["1e+30"]["reason"]
    with pytest.raises(SystemExit, match=r"do not log 'val/acuracy' in every round. Set it to one"):
        sweep("--out", "other", metric="val/acuracy")
    with pytest.raises(SystemExit, match="3 trials in a row failed"):
        sweep("--out=third", "--", "--trainer.callbacks=test_sweep.Broken", trials=5)


class Broken(Callback):
    """Fails for no reason of the configuration."""

    def on_train_start(self, trainer, pl_module):
        raise KeyError("a bug")


@pytest.mark.slow
def test_processes_of_a_run_stop_together():
    sweep("--trials=4", "--workers=1", "--", "--trainer.devices=2", startup_trials=1)
    found = rows()
    assert len(found) == 4
    assert found[0]["state"] == "complete"
    assert logged(0)["val/accuracy"][4] == pytest.approx(float(found[0]["value"]))


@pytest.mark.parametrize(
    ("words", "changes", "message"),
    [
        ((), {"base": None}, "a search needs a configuration: give --config"),
        ((), {"space": {}}, "space must name at least one option"),
        ((), {"seeds": [1, 1]}, "seeds must be different whole numbers"),
        ((), {"seeds": [2**32]}, "seeds must be different whole numbers from 0 to 4294967295"),
        (("--", "--trainer.check_val_every_n_epoch=0"), {}, "n_epoch must be at least 1, got 0"),
        (("--trials", "0"), {}, "trials must be a whole number"),
        (("--sampler", "tep"), {}, "sampler must be one of 'tpe', 'random', 'grid'"),
        (("--storage", "mysqk://x/y"), {}, "storage: mysqk://x/y"),
        (("--", "--trainer.max_epochs=fast"), {}, "trainer.max_epochs must be a whole number"),
    ],
)
def test_what_cannot_work_is_one_sentence(words, changes, message, capsys):
    with pytest.raises(SystemExit) as end:
        sweep(*words, **changes)
    said = f"{end.value} {capsys.readouterr().err}"
    assert message in said
    assert "Traceback" not in said
    assert not Path("runs/sweep_toy/trial_0000").exists()
