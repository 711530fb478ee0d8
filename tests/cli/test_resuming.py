"""``ckpt_path`` on the command line: the right run, whatever the logger, or a sentence."""

import csv
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fl_lightning.cli import main
from fl_lightning.federation import take_folders

CONFIG = Path(__file__).with_name("small_run.yaml")
LOGGERS = "lightning.pytorch.loggers."
TENSORBOARD = [
    "--trainer.logger",
    f"{LOGGERS}TensorBoardLogger",
    "--trainer.logger.save_dir",
    "runs",
]
CSV = ["--trainer.logger", f"{LOGGERS}CSVLogger", "--trainer.logger.save_dir", "runs"]
WANDB = [
    *("--trainer.logger", f"{LOGGERS}WandbLogger", "--trainer.logger.save_dir", "runs"),
    *("--trainer.logger.offline", "true", "--trainer.logger.project", "a_project"),
]
NONE = ["--trainer.logger", "false"]
LAST = ["--ckpt_path", "last"]


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def fit(*words, rounds=2):
    main(["fit", "--config", str(CONFIG), "--trainer.max_epochs", str(rounds), *words])
    if "wandb" in sys.modules:  # a process has one run of W&B at a time
        sys.modules["wandb"].finish()


def refused(*words, rounds=3):
    """Return the sentence with which a fit is refused."""
    with pytest.raises(SystemExit) as end:
        fit(*words, rounds=rounds)
    assert isinstance(end.value.code, str)
    assert "\n" not in end.value.code
    return end.value.code


def run_folders():
    """Return the folders of all runs, in the order in which they began."""
    found = Path().rglob("partition.csv") if Path("runs").exists() else Path().rglob("config.yaml")
    return sorted((path.parent for path in found), key=lambda path: path.stat().st_ctime_ns)


def last_state(folder):
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


SLOW = [pytest.param(logger, marks=pytest.mark.slow) for logger in (NONE, [])]


@pytest.mark.parametrize("logger", [TENSORBOARD, CSV, WANDB, *SLOW])
def test_last_is_the_run_of_this_configuration(logger):
    if logger is WANDB:
        pytest.importorskip("wandb")
    fit(*logger)
    (ours,) = run_folders()
    fit(*logger, "--federation.local_steps", "3")  # a newer run, with another option
    assert len(run_folders()) == 2
    fit(*logger, *LAST, rounds=4)
    assert len(run_folders()) == 2
    resumed = last_state(ours)
    assert resumed["global_step"] == 4
    others = [folder for folder in run_folders() if folder != ours]
    assert last_state(others[0])["global_step"] == 2
    options = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in (ours, *others)]
    assert [each["federation"]["local_steps"] for each in options] == [4, 3]

    shutil.rmtree(others[0])
    fit(*logger, rounds=4)
    (whole,) = [folder for folder in run_folders() if folder != ours]
    for name, tensor in last_state(whole)["state_dict"].items():
        assert torch.equal(tensor, resumed["state_dict"][name]), name


def test_a_run_under_another_logger_is_another_run():
    fit(*CSV)
    said = refused(*TENSORBOARD, *LAST)
    assert "trainer.logger.class_path (lightning.pytorch.loggers.CSVLogger there, " in said
    assert "init_args" not in said  # those of another class are others


def test_nothing_to_go_on_from_is_an_error():
    assert "there is no run with a checkpoint: start without" in refused(*LAST)
    assert not list(Path().iterdir())


def test_differences_are_listed_and_refused_unless_asked_for():
    fit(*CSV)
    (folder,) = run_folders()
    changed = ["--federation.local_steps", "3", "--model.optimizer.lr", "0.02"]
    for path in ("last", str(folder / "checkpoints" / "last.ckpt")):
        said = refused(*CSV, *changed, "--ckpt_path", path)
        assert (
            f"the run in {folder} has another configuration: federation.local_steps (4 there"
            in said
        )
        assert "optimizer.init_args.lr (0.01 there, 0.02 here)" in said
        assert "--resume_changed true" in said
    fit(*CSV, *changed, *LAST, "--resume_changed", "true", rounds=3)
    assert last_state(folder)["global_step"] == 3
    assert run_folders() == [folder]


def test_tables_go_on_where_the_checkpoint_is():
    fit(*CSV, rounds=2)
    (folder,) = run_folders()
    shutil.copy(folder / "metrics.csv", "before.csv")
    fit(*CSV, *LAST, rounds=4)
    with (folder / "metrics.csv").open() as file:
        rows = [(row["step"], row["train/loss"]) for row in csv.DictReader(file)]
    assert [step for step, loss in rows if loss] == ["0", "1", "2", "3"]
    with Path("before.csv").open() as file:
        before = [(row["step"], row["train/loss"]) for row in csv.DictReader(file)]
    assert set(before[:-2]) <= set(rows)  # the last two are about the model after the fit


def test_events_go_on_in_the_folder_of_lightnings_own_logger():
    fit()
    fit(*LAST, rounds=4)
    assert [path.name for path in Path("lightning_logs").iterdir()] == ["version_0"]
    events = EventAccumulator("lightning_logs/version_0").Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [0, 1, 2, 3]


def test_the_configuration_of_a_resumed_run_gives_another_run():
    fit(*CSV)
    (folder,) = run_folders()
    fit(*CSV, *LAST, rounds=3)
    before = last_state(folder)["state_dict"]
    main(["fit", "--config", str(folder / "config.yaml")])
    (other,) = [each for each in run_folders() if each != folder]
    assert last_state(other)["global_step"] == 3
    assert all(torch.equal(last_state(folder)["state_dict"][name], before[name]) for name in before)


def test_runs_that_begin_at_one_moment_have_folders_of_their_own():
    def begun():
        loggers = [TensorBoardLogger("runs"), CSVLogger("runs"), CSVLogger("tables")]
        return Trainer(logger=loggers, accelerator="cpu", enable_checkpointing=False)

    one, other = begun(), begun()
    for run in (one, other):  # neither has written anything when both look for a folder
        take_folders(run, None)
    assert [logger.log_dir for logger in one.loggers] == [
        *["runs/lightning_logs/version_0"] * 2,
        "tables/lightning_logs/version_0",
    ]
    folders = [{logger.log_dir for logger in run.loggers} for run in (one, other)]
    assert not set.intersection(*folders)


def test_a_resumed_run_cleans_up_after_the_dead():
    fit(*CSV)
    (folder,) = run_folders()
    (folder / "checkpoints" / ".best.ckpt.unfinished").write_text("half of one")
    fit(*CSV, *LAST, rounds=3)
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {"last.ckpt"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("text.ckpt", r"text\.ckpt is not a checkpoint of Lightning, or is damaged"),
        ("folder.ckpt", "is a folder, not a checkpoint"),
        ("empty.ckpt", "is empty"),
        ("half.ckpt", "or is damaged"),
        ("tensor.ckpt", "is not a checkpoint of Lightning: it has no state_dict"),
        ("no_such.ckpt", r"no_such\.ckpt does not exist.* path of a \.ckpt file"),
        ("", "ckpt_path is empty"),
        ("best", "a fit resumes from last"),
    ],
)
@pytest.mark.parametrize("command", ["fit", "test"])
def test_what_is_no_checkpoint_is_refused_in_a_sentence(command, given, says):
    Path("text.ckpt").write_text("hello")
    Path("folder.ckpt").mkdir()
    Path("empty.ckpt").touch()
    torch.save({"x": torch.ones(2)}, "tensor.ckpt")
    whole = Path("tensor.ckpt").read_bytes()
    Path("half.ckpt").write_bytes(whole[: len(whole) // 2])
    if (command, given) == ("test", "best"):
        says = "no run with a checkpoint"
    with pytest.raises(SystemExit, match=says):
        main([command, "--config", str(CONFIG), "--ckpt_path", given])


def test_a_full_disk_is_told_in_a_sentence():
    """A limit on the size of a file refuses to write as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        said = refused(*CSV, rounds=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "last.ckpt could not be written: " in said
    assert "MB are free" in said
    assert not list(Path().rglob("*.unfinished"))


def test_a_folder_that_cannot_be_written_is_told_in_a_sentence():
    Path("runs").write_text("a file")
    assert "could not be written: " in refused(*CSV, rounds=1)
