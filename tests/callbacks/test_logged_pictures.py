"""Pictures and histograms reach every logger that takes them, each in its offline mode."""

import time
from pathlib import Path

import matplotlib.image
import pandas
import pytest
import torch
from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toys import ToyModule, toy_data, validating_trainer

from fl_lightning import CentralDP, ClientEvaluation, Federation, PoissonCohort, RunReport
from fl_lightning.federation.logs import keep_once, logged_once
from fl_lightning.reports.history import History
from fl_lightning.reports.loggers import log_figure, log_histogram


class Album(Logger):
    """Takes pictures by the call that Lightning's own loggers have."""

    name, version = "album", 0

    def __init__(self):
        super().__init__()
        self.images = {}

    def log_metrics(self, metrics, step=None): ...

    def log_hyperparams(self, params): ...

    def log_image(self, key, images, step):
        self.images[key, step] = images[0]


def figure():
    drawn = Figure(figsize=(2, 1), dpi=50)
    drawn.subplots().plot([1, 2], [3, 1])
    return drawn


def log(logger, folder, trainer=None):
    trainer = trainer or validating_trainer(logger=logger, default_root_dir=folder)
    log_figure(trainer, "clients/a picture", figure, step=3)
    log_histogram(trainer, "clients/loss", torch.tensor([1.0, 2.0, float("nan"), 2.5]), step=3)


def fitted_with_curves(logger, folder):
    """A fit that logs curves of clients, then a picture and a histogram."""
    trainer = validating_trainer(
        Federation(local_steps=1),
        ClientEvaluation(every_n_rounds=1, client_curves=True),
        RunReport(page=False, client_curves=True),
        logger=logger,
        default_root_dir=folder,
        max_epochs=2,
    )
    trainer.fit(ToyModule(), datamodule=toy_data(num_clients=2, client_val_fraction=0.3))
    log(logger, folder, trainer)
    return trainer


def test_any_logger_with_log_image_has_the_picture(tmp_path):
    album = Album()
    log(album, tmp_path)
    (pixels,) = album.images.values()
    assert pixels.shape == (50, 100, 3)
    assert pixels.std() > 0
    assert [*album.images] == [("clients/a picture", 3)]


def test_without_such_a_logger_it_is_a_file_and_without_any_nothing_is_drawn(tmp_path):
    logger = CSVLogger(tmp_path, "run", version=0)
    log(logger, tmp_path)
    pixels = matplotlib.image.imread(Path(logger.log_dir, "figures", "clients_a_picture.png"))
    assert pixels.std() > 0
    log_figure(validating_trainer(logger=False), "never", pytest.fail, step=0)


def test_tensorboard_has_pictures_histograms_and_curves_of_clients(tmp_path):
    logger = TensorBoardLogger(tmp_path, "run")
    trainer = fitted_with_curves(logger, tmp_path)
    logger.experiment.close()
    events = EventAccumulator(logger.log_dir).Reload()
    assert [event.step for event in events.Images("· clients/a picture")] == [3]
    assert events.Histograms("· clients/loss")[0].histogram_value.num == 2 + 1
    for client in (0, 1):
        for name in ("train/loss", "val/loss"):
            curve = events.Scalars(f"· client/{client}/{name}")
            assert [event.step for event in curve] == [0, 1]
    (last,) = History.read(Path(logger.log_dir)).rounds[-1:]
    assert events.Scalars("· client/1/train/loss")[-1].value == pytest.approx(
        last.clients["train/loss"][1]
    )
    assert not [name for name in trainer.callback_metrics if name.startswith("client/")]


def recorded(folder, *names, seconds=60.0):
    """Return W&B's files once each has its name; its own process writes them some time after a run has finished."""
    end = time.monotonic() + seconds
    while True:
        files = sorted(folder.rglob("*.wandb"))
        if len(files) == len(names) and all(
            n in f.read_bytes() for n, f in zip(names, files, strict=True)
        ):
            return files
        assert time.monotonic() < end, (names, files)
        time.sleep(0.2)


@pytest.mark.filterwarnings("ignore")  # of W&B itself
def test_wandb_offline_has_pictures_histograms_and_curves_of_clients(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = WandbLogger(save_dir=tmp_path, offline=True, name="run")
    fitted_with_curves(logger, tmp_path)
    logger.experiment.finish()
    for name in (b"clients/loss", b"client/0/train/loss", b"client/1/val/loss"):
        recorded(tmp_path, name)
    (picture,) = tmp_path.rglob("media/images/clients/*.png")
    assert matplotlib.image.imread(picture).std() > 0


@pytest.mark.filterwarnings("ignore")  # of W&B itself
def test_wandb_offline_has_the_rounds_of_several_processes(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    trainer = validating_trainer(Federation(local_steps=1), devices=2, logger=logger, max_epochs=2)
    module, data = ToyModule(), toy_data(num_clients=2)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    fit, test = recorded(tmp_path, b"train/loss", b"test/loss")  # one run in two folders
    assert fit.name == test.name == f"run-{logger.version}.wandb"


@pytest.mark.filterwarnings("ignore")  # of MLflow itself
def test_mlflow_has_pictures_and_curves_of_clients(tmp_path):
    pytest.importorskip("mlflow")
    logger = MLFlowLogger(
        "toy", tracking_uri=f"sqlite:///{tmp_path}/m.db", artifact_location=str(tmp_path / "a")
    )
    fitted_with_curves(logger, tmp_path)
    curve = logger.experiment.get_metric_history(logger.run_id, "client/1/train/loss")
    assert [point.step for point in curve] == [0, 1]
    (picture,) = tmp_path.rglob("figures/*.png")
    assert picture.name == "clients_a_picture_3.png"


def test_privacy_leaves_out_curves_of_clients_and_says_so(tmp_path):
    private = CentralDP(clip_norm=1.0, noise_multiplier=1.0, log_unprotected=False)
    logger = CSVLogger(tmp_path, "run", version=0)
    trainer = validating_trainer(
        Federation(local_steps=1, privacy=private, cohort=PoissonCohort(fraction=0.5)),
        RunReport(page=False, client_curves=True),
        logger=logger,
        max_epochs=1,
    )
    with pytest.warns(UserWarning, match="client_curves: no curves .* because privacy hides"):
        trainer.fit(ToyModule(), datamodule=toy_data(num_clients=4))
    assert "client/" not in Path(logger.log_dir, "metrics.csv").read_text()
    shown = pandas.read_csv(Path(logger.log_dir, "metrics.csv")).drop(columns=["epoch", "step"])
    assert not shown.isna().all(axis=1).any()


def test_what_is_logged_once_is_written_beside_and_put_in_place(tmp_path):
    """A kill in the middle leaves the file before or the file after, never half of one."""
    trainer = validating_trainer(logger=CSVLogger(tmp_path))
    keep_once(trainer, "test", {"test/loss": 0.5})
    file = Path(trainer.log_dir, "results.json")
    before = Path(tmp_path, "before.json")
    before.hardlink_to(file)  # the same file, unless another is put in its place
    old = before.read_text()
    keep_once(trainer, "test", {"test/accuracy": 1.0})
    assert before.read_text() == old
    assert logged_once(file.parent) == {"test/loss": 0.5, "test/accuracy": 1.0}
    assert [path.name for path in file.parent.iterdir()] == ["results.json"]
