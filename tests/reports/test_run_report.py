"""A run's report: the rounds that it keeps, and the page and figures that are made of them."""

import csv
import json
import logging
import re
import resource
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader
from toys import ToyModule, toy_data, toy_trainer, validating_trainer

from fl_lightning import (
    CentralDP,
    ClientEvaluation,
    ConfigurationError,
    Federation,
    FedProx,
    PartitionReport,
    PoissonCohort,
    RoundProgressBar,
    RunLog,
    RunReport,
    UniformCohort,
)
from fl_lightning.callbacks.standard_callbacks import every_round_checkpoint
from fl_lightning.cli import main
from fl_lightning.core.processes import write_whole
from fl_lightning.experiments import ReportRounds
from fl_lightning.experiments.results import curves
from fl_lightning.federation import log_numbers
from fl_lightning.reports.evaluated_model import ResultsTable
from fl_lightning.reports.history import History, RoundLine, append, begin
from fl_lightning.reports.overview import RunOverview, why_it_stopped
from fl_lightning.reports.panels import distribution
from fl_lightning.reports.run_charts import read_table
from fl_lightning.reports.run_report import write_report
from fl_lightning.reports.screen import plain


class Balanced(HTMLParser):
    """Counts what is opened and not closed, and what would be loaded from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.ids = [], [], []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.loads += [value for key, value in attrs if key == "src" and value]
        link = given.get("href") or given.get("xlink:href") or "#"
        self.loads += [link] if not link.startswith(("#", "data:")) else []
        self.ids += [given["id"]] if "id" in given else []
        if tag not in ("meta", "br", "rect", "path", "use", "image"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if self.open[-1:] == [tag]:
            self.open.pop()

    def handle_endtag(self, tag):
        if self.open[-1:] == [tag]:
            self.open.pop()


def fit(folder, *callbacks, rounds=3, cohort=None, logger=None, **options):
    cohort = cohort or UniformCohort(fraction=0.5)
    federation = Federation(cohort=cohort, local_steps=2, **options)
    logger = logger or CSVLogger(folder, "toy", version=0)
    trainer = validating_trainer(federation, *callbacks, max_epochs=rounds, logger=logger)
    data = toy_data(num_examples=90, client_val_fraction=0.3)
    trainer.fit(ToyModule(), datamodule=data)
    return trainer, folder / "toy" / "version_0"


def test_rounds_are_those_that_the_loggers_have(tmp_path):
    _, folder = fit(tmp_path, RunReport(page=False))
    rounds = History.read(folder).rounds
    with (folder / "metrics.csv").open() as file:
        logged = [row for row in csv.DictReader(file) if row["round/cohort_size"]]
    assert [line.number for line in rounds] == [1, 2, 3]
    for line, row in zip(rounds, logged, strict=True):
        for name in ("train_loss", "round/update_norm", "round/total_bytes_up"):
            if row.get(name):
                assert line.metrics[name] == pytest.approx(float(row[name]), rel=1e-6)
    assert not (folder / "report.html").exists()
    for line in rounds:  # clients' numbers are those whose mean is logged
        assert len(line.clients["ids"]) == line.metrics["round/cohort_size"]
        names = [name for name in line.clients if name != "ids"]
        assert names
        for name in names:
            values = line.clients[name]
            mean = sum(values) / len(values)
            spread = (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5
            assert spread == pytest.approx(line.metrics[f"{name}_std"], abs=1e-6)
    _, folder = fit(tmp_path / "many", RunReport(page=False, max_clients=1), rounds=1)
    assert not any(line.clients for line in History.read(folder).rounds)


def test_the_page_needs_nothing_else(tmp_path):
    _, folder = fit(tmp_path, PartitionReport(), ClientEvaluation(), RunReport())
    page = (folder / "report.html").read_text()
    parser = Balanced()
    parser.feed(page)
    assert not parser.open
    assert not parser.loads
    assert "<script" not in page
    assert len(set(parser.ids)) == len(parser.ids)
    used = set(re.findall(r"url\(#([^)]+)\)", page)) | set(re.findall(r'href="#([^"]+)"', page))
    assert used <= set(parser.ids)
    assert "#1b1c1e" not in page.split("</style>")[1]  # else dark on dark
    figures = {path.stem for path in (folder / "figures").glob("*.svg")}
    pictures = {path.stem for path in (folder / "figures").glob("*.png")}
    assert figures == pictures - {"partition"}  # a logger's
    parts = {name.partition("-")[0] for name in figures}
    assert {"training", "clients_at_the_end", "partition", "bytes", "time"} <= parts
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert facts["data"] == "ToyData, 6 clients"
    assert facts["seed"] == "0"
    assert re.fullmatch(r"0:\d\d", facts["duration"])
    assert {"date", "model", "federation", "machine", "versions"} <= set(facts)
    assert "<h1>toy</h1>" in page
    assert "stopped" not in json.loads((folder / "provenance.json").read_text())["duration"]
    # every value is said under the pointer: the loss of a round, of a client
    for number, value in History.read(folder).curve("val/loss").items():
        assert f"<title>round {number}: {value:.4g}</title>" in page
    with (folder / "clients_validation.csv").open() as file:
        for row in csv.DictReader(file):
            said = f"client {row['client']}: {float(row['val/loss']):.4g}"
            assert f"<title>{said}</title>" in page


def test_a_loss_that_the_module_logs_as_well_has_one_name(tmp_path):
    class Logs(ToyModule):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss)
            return loss

    trainer = validating_trainer(
        Federation(local_steps=2),
        RunReport(),
        max_epochs=2,
        logger=TensorBoardLogger(tmp_path, "toy", 0),
    )
    trainer.fit(Logs(), datamodule=toy_data(num_examples=90))
    history = History.read(tmp_path / "toy" / "version_0")
    assert history.curve("train/loss") == pytest.approx(history.curve("train_loss"))
    shown = history.without_twin()
    assert {*history.names} - {*shown.names} == {"train/loss", "train/loss_std"}
    assert {*history.client_names} - {*shown.client_names} == {"train/loss"}
    assert "train/loss" not in (tmp_path / "toy" / "version_0" / "report.html").read_text()
    events = EventAccumulator(trainer.logger.log_dir).Reload()
    assert "train_loss" in events.Tags()["scalars"]
    assert not [name for name in events.Tags()["scalars"] if "train/loss" in name]
    assert "| train_loss | " in _text(events, "last round/text_summary")
    assert "train/loss" not in _text(events, "last round/text_summary")


@pytest.mark.parametrize("logged", ["sum", "later", "now and then"])
def test_another_loss_does_not_take_the_place_of_the_clients_own(tmp_path, logged):
    class Logs(ToyModule):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss, reduce_fx="sum" if logged == "sum" else "mean")
            return loss + 0.1 * self.current_epoch * (logged == "now and then")

    class Later(Callback):
        """Gives the name train/loss to another number, after the round's."""

        def on_train_epoch_end(self, trainer, module):
            trainer.callback_metrics["train/loss"] = torch.tensor(9.0)

    logger = CSVLogger(tmp_path, "toy", version=0)
    parts = [Federation(local_steps=1), *[Later()] * (logged == "later"), RunReport(page=False)]
    trainer = toy_trainer(*parts, max_epochs=2, logger=logger)
    trainer.fit(Logs(), datamodule=toy_data(batch_size=60))
    history = History.read(Path(logger.log_dir)).without_twin()
    curve, clients = history.curve("train/loss"), history.of_clients("train/loss")
    assert {*curve} == {*clients} == {1, 2}
    if logged == "later":
        assert {*curve.values()} == {9.0}
    if logged == "sum":
        table = read_table(Path(logger.log_dir, "metrics.csv"))
        assert table["train/loss"].tolist() == pytest.approx([*curve.values()], rel=1e-4)
        sums = [sum(values) for values in clients.values()]
        assert table["train_loss"].tolist() == pytest.approx(sums, rel=1e-4)
        assert sums[0] > 2 * curve[1]


class OneName(ToyModule):
    """Logs the same name in validation and test, and names that differ as text only."""

    def validation_step(self, batch, batch_idx):
        for name in ("loss", "val/loss", "val_loss"):
            self.log(name, self.net(batch[0]).square().mean(), batch_size=len(batch[1]))

    test_step = validation_step


def test_each_metric_has_a_chart_and_a_file_of_its_own(tmp_path):
    logger = CSVLogger(tmp_path, "toy", version=0)
    trainer = validating_trainer(
        *(Federation(local_steps=1), ClientEvaluation(), RunReport()), max_epochs=2, logger=logger
    )
    data = toy_data(num_examples=150, client_val_fraction=0.3, client_test_fraction=0.3)
    module = OneName()
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    files = {path.stem for path in Path(logger.log_dir, "figures").glob("*.svg")}
    at_the_end = {"clients_at_the_end-loss", "clients_at_the_end-loss_test"}
    assert {"validation-val_loss", "validation-val_loss_2"} | at_the_end <= files
    ids = re.findall(r'<svg[^>]* id="([^"]+)"', Path(logger.log_dir, "report.html").read_text())
    assert len(ids) == len(set(ids))


def test_an_early_stopping_says_why_at_the_end_and_in_the_report(tmp_path, caplog):
    stopping = EarlyStopping("val/loss", patience=2, min_delta=100.0)
    with caplog.at_level(logging.INFO):
        parts = RunOverview(), stopping, RunReport()
        unnamed = {"logger": CSVLogger(tmp_path), "correction": FedProx(mu=0.1)}
        fit(tmp_path, *parts, rounds=9, **unnamed)
    folder = tmp_path / "lightning_logs" / "version_0"
    page = (folder / "report.html").read_text()
    assert "<title>ToyModule, ToyData, FedProx</title>" in page  # called by what it trains
    best = History.read(folder).curve("val/loss")[1]
    why = "val/loss has not improved by more than 100 in 2 validations; its best is"
    assert f"stopped: after round 3 of 9, because {why} {best:.4g}" in caplog.messages
    assert f"stopped after round 3 of 9, because {why}" in page


def test_the_command_makes_the_page_again(tmp_path, capsys):
    _, folder = fit(tmp_path, RunReport(page=False), rounds=1)
    main(["report", str(folder)])
    assert f"{folder}/report.html" in capsys.readouterr().out.replace("\n", "")
    first = (folder / "report.html").read_bytes()
    assert first == write_report(folder).read_bytes()
    with pytest.raises(SystemExit, match=f"contains no rounds.jsonl: .* such as {folder}"):
        main(["report", str(folder.parent)])


def test_a_nan_is_neither_the_least_nor_a_clients_number(tmp_path):
    with pytest.raises(
        ConfigurationError, match="RunReport: max_clients must be at least 0, got -1"
    ):
        RunReport(max_clients=-1)
    with pytest.raises(ConfigurationError, match=r"contains no rounds\.jsonl"):
        write_report(tmp_path)
    for number, loss in enumerate((float("nan"), 0.5, 0.25), start=1):
        append(tmp_path, RoundLine(number, {"val/loss": loss}))
    (tmp_path / "clients_test.csv").write_text("client,num_examples,test/loss\n0,9,1.5\n1,9,\n")
    page = write_report(tmp_path).read_text()
    assert "<td>val/loss</td><td>0.25</td><td>0.25</td><td>0.5</td>" in page
    assert "<td>test/loss</td><td>1</td><td>1.5</td>" in page, "one of two clients has a number"


def test_few_values_are_dots_and_few_different_ones_are_words():
    few = {f"client {n}": float(n) for n in range(5)}
    axes = Figure().subplots()
    tooltips = distribution({"a": few}, x="loss")(axes)
    assert [tooltip.text for tooltip in tooltips] == [f"client {n}: {n}" for n in range(5)]
    assert not axes.patches
    assert [label.get_text() for label in axes.get_yticklabels()] == list("01234")
    distribution({"a": {f"client 1, round {n}": n for n in range(5)}})(axes := Figure().subplots())
    assert not axes.get_yticklabels()  # they would be cut off
    assert distribution({"a": {str(n): float(n % 3) for n in range(90)}}) is None
    many = {str(n): float(n) for n in range(100)}
    tooltips = distribution({"a": many}, x="loss")(axes := Figure().subplots())
    assert (
        sum(tooltip.height for tooltip in tooltips)
        == sum(bar.get_height() for bar in axes.patches)
        == 100
    )


def test_a_resumed_run_goes_on_after_its_rounds(tmp_path):
    begin(tmp_path, 0)
    for number in (1, 2, 3):
        append(tmp_path, RoundLine(number, {"a": number}))
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4, "met')  # killed here
    begin(tmp_path, 2)
    append(tmp_path, RoundLine(3, {"a": 30.0, "b": float("nan")}))
    text = (tmp_path / "rounds.jsonl").read_text()
    assert [json.loads(line)["round"] for line in text.splitlines()] == [1, 2, 3]
    assert "NaN" not in text
    assert History.read(tmp_path).curve("a") == {1: 1.0, 2: 2.0, 3: 30.0}


@pytest.mark.filterwarnings("ignore:.*exists and is not empty")
@pytest.mark.parametrize("is_federated", [True, False])
def test_a_fit_that_is_taken_up_keeps_all_rounds(tmp_path, is_federated):
    folder = tmp_path / "toy" / "version_0"

    def go(rounds, **options):
        saves = ModelCheckpoint(
            dirpath=tmp_path,
            filename="last",
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        federation = [Federation(local_steps=2)] if is_federated else []
        evaluation = [ClientEvaluation(local_models=True)] if is_federated else []
        trainer = validating_trainer(
            *federation,
            *evaluation,
            RunReport(page=False),
            saves,
            max_epochs=rounds,
            logger=TensorBoardLogger(tmp_path, "toy", version=0),
            enable_checkpointing=True,
            log_every_n_steps=1,
        )
        trainer.fit(ToyModule(), datamodule=toy_data(num_examples=30), **options)

    go(2)
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "metrics": {"val/loss": 77}}')  # killed in its middle
    facts = json.loads((folder / "provenance.json").read_text())
    (folder / "provenance.json").write_text(json.dumps(facts | {"commit": "0123"}))
    go(4, ckpt_path=tmp_path / "last.ckpt")
    resumed = json.loads((folder / "provenance.json").read_text())
    now = facts.get("commit", "unknown")
    assert resumed["commit"] == f"0123, resumed {now}"
    assert resumed["versions"] == facts["versions"]
    assert resumed["date"].startswith(f"{facts['date']}, resumed ")
    if not is_federated:
        assert "4 epochs" in write_report(folder).read_text()
    rounds = History.read(folder).rounds
    assert [line.number for line in rounds] == [1, 2, 3, 4]
    assert all(0 < line.metrics["val/loss"] < 77 for line in rounds)
    assert len({line.metrics["val/loss"] for line in rounds}) == 4
    if is_federated:
        text = (folder / "local_models.csv").read_text()
        assert [row.split(",")[0] for row in text.splitlines() if "global" in row] == [*"1234"]


def test_a_file_that_cannot_be_written_whole_stays_the_old_one(tmp_path):
    path = tmp_path / "run" / "provenance.json"
    write_whole(path, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            write_whole(path, "new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "old"


def test_a_private_run_keeps_nothing_of_single_clients(tmp_path):
    privacy = CentralDP(clip_norm=1.0, noise_multiplier=1.0, log_unprotected=False)
    _, folder = fit(tmp_path, RunReport(), cohort=PoissonCohort(fraction=0.5), privacy=privacy)
    lines = History.read(folder).rounds
    assert len(lines) == 3
    assert not any(line.clients for line in lines)
    assert not any(name.endswith("_std") for line in lines for name in line.metrics)
    assert [*(folder / "figures").glob("privacy-*.svg")]
    assert "3 rounds · " in (folder / "report.html").read_text()


@pytest.mark.parametrize("place", [0, 2])
def test_a_round_has_what_others_log_of_it_wherever_the_report_is_listed(place, tmp_path):
    callbacks: list = [Federation(local_steps=1), ClientEvaluation(every_n_rounds=1)]
    callbacks.insert(place, RunReport(page=False))
    trainer = validating_trainer(*callbacks, max_epochs=2, logger=CSVLogger(tmp_path, "toy", 0))
    trainer.fit(ToyModule(), datamodule=toy_data(client_val_fraction=0.3))
    history = History.read(tmp_path / "toy" / "version_0")
    assert {*history.curve("clients/val/loss_mean")} == {*history.curve("round/seconds")} == {1, 2}
    last = history.curve("clients/val/loss_mean")[2]
    assert last == float(trainer.callback_metrics["clients/val/loss_mean"])


def test_tensorboard_has_an_order_a_table_and_options(tmp_path):
    folder = tmp_path / "toy" / "version_0"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "model: {class_path: Toy, init_args: {lr: 0.1, depth: null}}"
    )
    logger = TensorBoardLogger(tmp_path, "toy", version=0, default_hp_metric=False)
    trainer, _ = fit(tmp_path, RunReport(), logger=logger)
    trainer.test(trainer.model, datamodule=trainer.datamodule, verbose=False)
    logger.experiment.close()
    events = EventAccumulator(str(folder)).Reload()
    tags = events.Tags()
    charts = _charts(events.Tensors("custom_scalars__config__")[-1])
    assert [*charts][:2] == ["validation", "validation loss"]
    for title, names in charts.items():  # none is empty, none has a single dot
        found = [name for name in tags["scalars"] if re.match(names, name)]
        assert found, title
        assert min(len(events.Scalars(name)) for name in found) > 1, title
    test, loss = "results/test/text_summary", float(trainer.callback_metrics["test/loss"])
    assert f"| test/loss | {loss:.6g} |" in _text(events, test)
    assert "| val/loss | " in _text(events, "last round/text_summary")
    plugins = events.summary_metadata
    assert {"model", "model.lr"} <= _options(plugins["_hparams_/session_start_info"])
    # nothing is a chart with a single dot, and what is none can be read from the folder
    assert min(len(events.Scalars(name)) for name in tags["scalars"]) > 1
    assert "test/loss" not in tags["scalars"]
    assert set(curves(folder)["test/loss"].values()) == {loss}


@pytest.mark.parametrize("every_n_rounds", [0, 1])
def test_clients_are_charts_where_they_are_evaluated_every_round(tmp_path, every_n_rounds):
    logger = TensorBoardLogger(tmp_path, "toy", version=0, default_hp_metric=False)
    evaluation = ClientEvaluation(every_n_rounds=every_n_rounds)
    trainer, _ = fit(tmp_path, evaluation, RunReport(page=False), logger=logger)
    logger.experiment.close()
    name = "clients/val/loss_mean"
    tags = EventAccumulator(logger.log_dir).Reload().Tags()
    assert (f"· {name}" in tags["scalars"]) == (every_n_rounds == 1)
    assert ("results/clients/text_summary" in tags["tensors"]) == (every_n_rounds == 0)
    found = curves(Path(logger.log_dir))[name]
    assert found[max(found)] == pytest.approx(float(trainer.callback_metrics[name]))


NUMBERS = {"before": "01111", "as resumed": "00011", "after": "00001", "never": "00000"}


class Numbers(Callback):
    """Logs numbers that change before a run is resumed, as it is resumed, after it, and never."""

    def on_train_epoch_end(self, trainer, pl_module):
        number = trainer.current_epoch
        values = {f"round/{name}": float(v[number]) / 3 for name, v in NUMBERS.items()}
        log_numbers(trainer, values, step=trainer.global_step - 1)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")
def test_charts_of_a_resumed_run_have_all_rounds(tmp_path):
    def go(rounds, **options):
        logger = TensorBoardLogger(tmp_path, "toy", version=0)
        callbacks = [Federation(local_steps=1), Numbers(), every_round_checkpoint()]
        trainer = validating_trainer(
            *callbacks,
            RunReport(page=False),
            max_epochs=rounds,
            logger=logger,
            enable_checkpointing=True,
        )
        trainer.fit(ToyModule(), datamodule=toy_data(), **options)
        logger.experiment.close()
        return Path(logger.log_dir)

    folder = go(3)
    go(5, ckpt_path=folder / "checkpoints" / "last.ckpt")
    events = EventAccumulator(str(folder)).Reload()
    steps = {
        name: [event.step for event in events.Scalars(tag)]
        for name in NUMBERS
        if (tag := f"· round/{name}") in events.Tags()["scalars"]
    }
    # of a constant stretch the first and the last round
    assert steps == {"before": [0, 1, 2, 3, 4], "as resumed": [0, 2, 3, 4], "after": [0, 3, 4]}


def test_a_run_that_went_on_after_an_early_stop_was_not_stopped(tmp_path):
    stopping = EarlyStopping("val/loss", patience=5)
    stopping.load_state_dict(stopping.state_dict() | {"stopped_epoch": 1})  # as of a checkpoint
    trainer, _ = fit(tmp_path, stopping)
    assert why_it_stopped(trainer) is None


def test_what_a_test_logs_each_step_is_a_curve(tmp_path):
    class Steps(ToyModule):
        def test_step(self, batch, batch_idx):
            self.log("test/step", float(batch_idx), on_step=True, on_epoch=False)

    logger = TensorBoardLogger(tmp_path, "toy", version=0, default_hp_metric=False)
    trainer = validating_trainer(RunReport(), logger=logger)
    trainer.test(Steps(), DataLoader(torch.ones(3, 1)), verbose=False)
    logger.log_metrics({"afterwards": 1.0}, step=3)  # by its own way again
    logger.experiment.close()
    events = EventAccumulator(logger.log_dir).Reload()
    assert [event.value for event in events.Scalars("test/step")] == [0.0, 1.0, 2.0]
    assert [event.step for event in events.Scalars("afterwards")] == [3]


def _text(events, tag):
    return events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()


def _charts(event):
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    layout = Layout.FromString(event.tensor_proto.string_val[0])
    return {c.title: c.multiline.tag[0] for category in layout.category for c in category.chart}


def _options(metadata):
    from tensorboard.plugins.hparams import metadata as parsing

    content = metadata.plugin_data.content
    return set(parsing.parse_session_start_info_plugin_data(content).hparams)


class Seen(Callback):
    """Notes what the bar shows after every round, and within the next one."""

    def __init__(self, bar):
        self.bar, self.lines = bar, []

    def on_train_epoch_end(self, trainer, pl_module):
        self.lines.append(plain(self.bar._run_line(400)))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0 and self.lines:
            assert "val/loss" in plain(self.bar._run_line(400)) or "val/loss" not in self.lines[-1]


@pytest.mark.parametrize("is_federated", [True, False], ids=["rounds", "epochs"])
def test_a_round_without_validation_shows_none(is_federated, tmp_path, caplog, capsys):
    """In its line, the log file, the bar, the loggers' curves, the report, a sweep and the table."""
    told, bar = {}, RoundProgressBar()
    watched = EarlyStopping("val/loss", patience=99), ReportRounds("val/loss", told.setdefault)
    tellers = RunLog(), ResultsTable(), RunReport(page=is_federated)
    trainer = validating_trainer(
        *([Federation(local_steps=2)] if is_federated else []),
        *(bar, Seen(bar), *watched, *tellers),
        max_epochs=5,
        check_val_every_n_epoch=2,
        log_every_n_steps=1,
        enable_progress_bar=True,
        logger=[TensorBoardLogger(tmp_path, "toy", 0), CSVLogger(tmp_path, "csv", 0)],
    )
    with caplog.at_level(logging.INFO):
        trainer.fit(ToyModule(), datamodule=toy_data(client_val_fraction=0.3))
    folder, unit = tmp_path / "toy" / "version_0", "round" if is_federated else "epoch"

    def with_loss(lines):
        return [("val/loss" in line) for line in lines]

    validated = [False, True, False, True, False]
    assert with_loss(line for line in caplog.messages if line.startswith(f"{unit} ")) == validated
    log = (folder / "run.log").read_text().splitlines()
    assert with_loss(line for line in log if re.search(rf"INFO \| {unit} \d/5", line)) == validated
    assert with_loss(next(c.lines for c in trainer.callbacks if isinstance(c, Seen))) == validated
    known = History.read(folder).curve("val/loss")
    assert [*known] == [*told] == [2, 4]
    assert [*told.values()] == pytest.approx([*known.values()])
    assert curves(folder)["val/loss"] == pytest.approx(known)
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        in_csv = [float(row["val/loss"]) for row in csv.DictReader(file) if row["val/loss"]]
    assert in_csv == pytest.approx([*known.values()])
    assert "val/loss" not in capsys.readouterr().out, "of the model after round 5 nothing is known"
    if is_federated:
        assert "val/loss, last, after 4" in (folder / "report.html").read_text()
