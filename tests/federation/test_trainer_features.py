"""Lightning's own features act on rounds of the global model."""

import csv
import re

import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch.utils.tensorboard import FileWriter
from toys import ToyModule, toy_data, validating_trainer, weights

from fl_lightning import (
    ClientEvaluation,
    ConfigurationError,
    Federation,
    PartitionReport,
    RoundProgressBar,
    RunReport,
    UniformCohort,
)
from fl_lightning.callbacks.client_evaluation import chosen_clients
from fl_lightning.core.update import ClientUpdate
from fl_lightning.updates.message import bytes_down, bytes_up


def fit(*callbacks, module=None, cohort_size=3, data=None, **options):
    module = module or ToyModule()
    cohort = UniformCohort(size=cohort_size)
    federation = Federation(cohort=cohort, seed=0)
    trainer = validating_trainer(federation, *callbacks, **options)
    trainer.fit(module, datamodule=data or toy_data())
    return trainer


class Moments(Callback):
    """Notes the order of events with the global step at each."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append(("round", trainer.global_step))

    def on_validation_end(self, trainer, module):
        self.seen.append(("validation", trainer.global_step))

    def on_train_epoch_end(self, trainer, module):
        self.seen.append(("end", trainer.global_step))


def test_the_server_steps_before_validation_once_per_round():
    moments = Moments()
    fit(moments, max_epochs=2)
    assert moments.seen == [
        *[("round", 1), ("validation", 1), ("end", 1)],
        *[("round", 2), ("validation", 2), ("end", 2)],
    ]


@pytest.mark.parametrize(
    "options",
    [{"check_val_every_n_epoch": 2}, {"val_check_interval": 2, "check_val_every_n_epoch": None}],
)
def test_the_frequency_of_validation_counts_rounds(options):
    moments = Moments()
    fit(moments, max_epochs=4, **options)
    assert [step for name, step in moments.seen if name == "validation"] == [2, 4]


def test_max_steps_counts_rounds():
    assert fit(max_epochs=-1, max_steps=3).current_epoch == 3


def test_fast_dev_run_is_one_client():
    trainer = fit(fast_dev_run=True)
    assert trainer.global_step == 1
    assert trainer.callback_metrics["round/cohort_size"] == 1


@pytest.mark.parametrize(("limit", "clients"), [(2, 2), (0.4, 1), (1.0, 3), (9, 3)])
def test_limit_train_batches_limits_the_cohort(limit, clients):
    trainer = fit(limit_train_batches=limit, max_epochs=2)
    assert trainer.callback_metrics["round/cohort_size"] == clients
    assert trainer.global_step == 2
    assert trainer.limit_train_batches == limit


def test_no_client_by_limit_train_batches():
    assert fit(limit_train_batches=0).global_step == 0
    with pytest.raises(
        ConfigurationError, match=r"limit_train_batches 0\.1 leaves no client of a cohort of 3"
    ):
        fit(limit_train_batches=0.1)


def test_validation_is_counted_in_rounds():
    for interval in (100, 0.5):
        with pytest.raises(ConfigurationError, match=rf"1 here, got {interval}.*check_val_every_n"):
            fit(val_check_interval=interval)


@pytest.mark.parametrize(("monitor", "patience"), [("val/loss", 1), ("train/loss", 0)])
def test_early_stopping_stops_after_rounds(monitor, patience):
    stopper = EarlyStopping(monitor, patience=patience, min_delta=1e9)
    assert fit(stopper, max_epochs=10).current_epoch == 2


def test_model_checkpoint_keeps_the_best_and_the_last_round(tmp_path):
    best = ModelCheckpoint(tmp_path, monitor="val/loss", filename="{epoch}", save_last=True)
    by_step = ModelCheckpoint(
        tmp_path / "steps", every_n_train_steps=2, save_top_k=-1, filename="{step}"
    )
    trainer = fit(best, by_step, max_epochs=4, enable_checkpointing=True)
    assert {p.name for p in (tmp_path / "steps").iterdir()} == {"step=2.ckpt", "step=4.ckpt"}
    assert (tmp_path / "last.ckpt").exists()
    saved = torch.load(best.best_model_path, weights_only=True)
    assert float(best.best_model_score) <= float(trainer.callback_metrics["val/loss"])
    assert saved["global_step"] == saved["epoch"] + 1


def test_timer_and_progress_bars(caplog):
    timer = Timer(duration={"hours": 1})
    fit(timer, RichProgressBar(), enable_progress_bar=True, max_epochs=1)
    assert timer.time_elapsed("train") > 0
    fit(RoundProgressBar(), enable_progress_bar=True, max_epochs=2)
    assert re.search(r"round 2/2: train/loss \S+, 3 clients, \S+ s", caplog.text)


def test_csv_logger_counts_rounds(tmp_path):
    fit(logger=CSVLogger(tmp_path, name="", version=""), max_epochs=3)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))

    def column(name):
        return {row["step"]: float(row[name]) for row in rows if row[name]}

    for name in ("train/loss", "val/loss", "round/seconds"):
        assert list(column(name)) == ["0", "1", "2"], name
        assert min(column(name).values()) > 0
    down = bytes_down(torch.zeros(67), torch.zeros(0))
    update = ClientUpdate(
        0, torch.zeros(67), torch.zeros(0), 1, 1, {"train/loss": 0.0, "train/accuracy": 0.0}
    )
    assert set(column("round/bytes_down").values()) == {down}
    assert set(column("round/bytes_up").values()) == {bytes_up(update)}
    assert set(column("round/total_bytes_up").values()) == {3 * bytes_up(update)}


def test_tensorboard_shows_what_a_user_looks_for(tmp_path):
    data = toy_data(client_val_fraction=0.3)
    logger = TensorBoardLogger(tmp_path, name="", version="")
    monitor = LearningRateMonitor(logging_interval="epoch")
    callbacks = PartitionReport(), ClientEvaluation(), monitor, RunReport(page=False)
    fit(*callbacks, data=data, logger=logger, max_epochs=3)
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 1}).Reload()
    scalars = {
        name: [event.step for event in events.Scalars(name)] for name in events.Tags()["scalars"]
    }
    per_round = ("train/loss", "train/loss_std", "val/loss", "val/accuracy", "lr-SGD")
    ours = [f"· round/{fact}" for fact in ("client_update_norm", "seconds", "update_norm")]
    for name in (*per_round, *ours):
        assert scalars[name] == [0, 1, 2], name
    # `epoch` and what is the same in every round, such as bytes of dense updates, are no charts
    assert sorted(scalars)[-3:] == ours  # TensorBoard sorts by name
    assert {n.split("/")[0] for n in scalars} == {"lr-SGD", "train", "val", "· round"}
    for statistic in ("mean", "std", "worst_decile"):
        assert f"· clients/val/accuracy_{statistic}" not in scalars  # once, thus no chart
        table = events.Tensors("results/clients/text_summary")[0].tensor_proto.string_val[0]
        assert f"clients/val/accuracy_{statistic} | ".encode() in table
    assert events.Tags()["images"] == ["· partition"]
    assert "· clients/val/accuracy" in events.Tags()["histograms"]
    assert (tmp_path / "partition.csv").exists()
    assert (tmp_path / "clients_validation.csv").read_text().startswith("client,num_examples,val/")


def events_of(folder):
    """Return what each event in TensorBoard's file holds: its step, its values by name."""
    (path,) = folder.glob("events.out.*")
    return [
        (event.step, {value.tag: value for value in event.summary.value})
        for event in EventFileLoader(str(path)).Load()
        if event.summary.value
    ]


def test_tensorboard_gets_the_numbers_of_a_round_as_one_event(tmp_path):
    """With the values that another logger gets, under the names that the user's prefix makes."""
    tables = CSVLogger(tmp_path / "csv", name="", version="")
    board = TensorBoardLogger(tmp_path / "board", name="", version="", prefix="mine")
    fit(RunReport(page=False), logger=[board, tables], max_epochs=2, limit_val_batches=0)
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        rows = [{k: v for k, v in row.items() if v and k != "step"} for row in csv.DictReader(file)]
    events = [event for event in events_of(tmp_path / "board") if "mine-train/loss" in event[1]]
    assert [step for step, _ in events] == [0, 1]
    shown = {
        (step, name): value
        for step, values in events_of(tmp_path / "board")
        for name, value in values.items()
        if name.startswith("mine-")
    }
    assert (0, "mine-· round/seconds") in shown  # held back until it changed
    assert (1, "mine-· round/seconds") in shown
    for (step, name), value in shown.items():
        known = float(rows[step][name.removeprefix("mine-").removeprefix("· ")])
        assert float(value.tensor.float_val[0]) == pytest.approx(known, rel=1e-6)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_loss_that_the_module_logs_as_well_is_one_number(tmp_path, by_hand):
    class Logs(ToyModule):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", 2 * loss if by_hand else loss, on_step=False, on_epoch=True)
            return loss

    trainer = fit(module=Logs(), logger=CSVLogger(tmp_path, name="", version=""), max_epochs=1)
    names = set((tmp_path / "metrics.csv").read_text().splitlines()[0].split(","))
    assert {"train_loss", "train_loss_std"} <= names
    both = {"train/loss", "train/loss_std"}
    assert both & names == (both if by_hand else set())
    assert both <= trainer.callback_metrics.keys()  # what callbacks monitor is there


def test_a_logger_that_writes_in_its_own_way_is_left_to_it(tmp_path):
    class Own(TensorBoardLogger):
        def log_metrics(self, metrics, step=None):
            assert isinstance(self.experiment.file_writer, FileWriter)
            super().log_metrics(metrics, step)

    fit(logger=Own(tmp_path, name="", version=""), max_epochs=1)
    assert all(len(values) == 1 for _, values in events_of(tmp_path))


def test_per_client_evaluation_weighs_up_to_the_pooled_mean():
    """Over held-out examples the clients' means, weighted, are the plain mean."""
    from fl_lightning.federation.visits.client_visits import evaluate_clients

    module, data = ToyModule(), toy_data(client_val_fraction=0.3)
    trainer = fit(module=module, data=data, max_epochs=1)
    values = evaluate_clients(trainer, data, "validation")
    sizes = torch.tensor(data.held_out("validation").num_examples[list(values)])
    means = torch.stack([metrics["val/loss"] for metrics in values.values()])
    held_out = torch.cat(list(data.held_out("validation")))
    x, y = (tensor[held_out] for tensor in data.train_dataset.tensors)
    module.eval()
    pooled = torch.nn.functional.cross_entropy(module.net(x), y)
    torch.testing.assert_close((means * sizes).sum() / sizes.sum(), pooled.detach())


def test_per_client_evaluation_of_many_clients_takes_some_of_them(tmp_path):
    data = toy_data(client_val_fraction=0.3)
    logger = CSVLogger(tmp_path, name="", version="")
    fit(ClientEvaluation(every_n_rounds=1, max_clients=4), data=data, logger=logger, max_epochs=2)
    rows = (tmp_path / "clients_validation.csv").read_text().splitlines()[1:]
    clients = [int(row.split(",")[0]) for row in rows]
    assert clients == chosen_clients(data, 4).tolist() == sorted(set(clients))
    assert len(clients) == 4
    assert chosen_clients(toy_data(client_val_fraction=0.3), 4).tolist() == clients
    assert chosen_clients(data, 6).tolist() == list(range(6))


def test_the_worst_clients_are_those_with_the_highest_inertia(tmp_path):
    class Sums(ToyModule):
        def validation_step(self, batch, batch_idx):
            self.log_dict({"val/inertia": batch[0].square().mean(), "val/shift": batch[0].mean()})

    logger = CSVLogger(tmp_path, name="", version="")
    data = toy_data(client_val_fraction=0.3)
    fit(ClientEvaluation(), module=Sums(), data=data, logger=logger, max_epochs=1)
    with (tmp_path / "clients_validation.csv").open() as file:
        clients = list(csv.DictReader(file))
    with (tmp_path / "metrics.csv").open() as file:
        logged = {k: float(v) for row in csv.DictReader(file) for k, v in row.items() if v}
    worst = max(float(client["val/inertia"]) for client in clients)
    assert logged["clients/val/inertia_worst_decile"] == pytest.approx(worst)
    assert min(float(client["val/shift"]) for client in clients) < 0
    jains = {name for name in logged if name.endswith("_jain")}
    assert jains == {"clients/val/inertia_jain"}  # it is for what is not negative


def test_fit_can_go_on_with_more_rounds():
    module, data = ToyModule(), toy_data()
    trainer = fit(module=module, data=data, max_epochs=2)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, datamodule=data)
    assert (trainer.global_step, trainer.current_epoch) == (4, 4)


class Average(Callback):
    """A moving average of the weights, as one keeps it in a central run; and what it was handed."""

    def __init__(self):
        self.started, self.ended, self.models = [], [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.started.append((trainer.global_step, list(batch), batch_idx))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.ended.append((trainer.global_step, list(batch), batch_idx))
        self.models.append(weights(module))


def test_a_batch_is_all_clients_of_a_round():
    average = Average()
    end = weights(fit(average).lightning_module)
    assert [step for step, _, _ in average.started] == [0, 1, 2]
    assert [step for step, _, _ in average.ended] == [1, 2, 3]  # when the server has stepped
    assert all(len(clients) == 3 and index == 0 for _, clients, index in average.ended)
    assert torch.equal(average.models[-1], end)


@pytest.mark.skipif(
    not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="Lightning 2.6 has it"
)
def test_lightnings_own_average_is_of_rounds():
    class OfRounds(lightning_callbacks.EMAWeightAveraging):
        def should_update(self, step_idx=None, epoch_idx=None):
            return epoch_idx is not None

    average, rounds = OfRounds(decay=0.5), Average()
    end = weights(fit(average, rounds).lightning_module)
    assert int(average._average_model.n_averaged) == 3
    # by hand: the first update takes the model, each later one half of it
    first, second, third = rounds.models
    expected = 0.5 * (0.5 * first + 0.5 * second) + 0.5 * third
    torch.testing.assert_close(end, expected, rtol=1e-5, atol=1e-7)
