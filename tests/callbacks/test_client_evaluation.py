"""Per-client figures: of whose examples, of which part of them, against counts by hand."""

import copy
import csv
import pickle

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional
from torchmetrics import MetricCollection, R2Score
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from toys import LoaderData, ToyModule, toy_data, validating_trainer

from fl_lightning import (
    ClientEvaluation,
    ConfigurationError,
    FederatedDataModule,
    Federation,
    Personal,
)
from fl_lightning.callbacks.client_evaluation import worst_decile
from fl_lightning.federation.visits.client_visits import evaluate_clients

SHORT = {"validation": "val", "test": "test"}
# the test set is the training set moved by 0.1: figures of clients' examples differ from its own
OPTIONS = {"num_examples": 90, "client_val_fraction": 0.25, "client_test_fraction": 0.35}


class Scored(ToyModule):
    """Logs torchmetrics objects: one, a collection that shares states, and the values of a third."""

    def __init__(self):
        super().__init__()
        kinds = {"macro": MulticlassF1Score(3), "plain": MulticlassF1Score(3, average="micro")}
        for stage in SHORT.values():
            setattr(self, f"{stage}_right", MulticlassAccuracy(3, average="micro"))
            setattr(self, f"{stage}_f1", MetricCollection(kinds, prefix=f"{stage}/").clone())
            setattr(self, f"{stage}_so_far", MulticlassAccuracy(3, average="micro"))

    def score(self, stage, batch):
        x, y = batch
        logits = self.net(x)
        right, f1 = getattr(self, f"{stage}_right"), getattr(self, f"{stage}_f1")
        so_far = getattr(self, f"{stage}_so_far")
        right(logits, y)
        self.log(f"{stage}/right", right, batch_size=len(y))
        f1.update(logits, y)
        self.log_dict(f1, batch_size=len(y))
        so_far.update(logits, y)
        self.log(f"{stage}/seen", float(so_far.compute()), reduce_fx="max", batch_size=len(y))

    def validation_step(self, batch, batch_idx):
        self.score("val", batch)

    def test_step(self, batch, batch_idx):
        self.score("test", batch)


class QuantitySizes:
    """Shards of given sizes, one after the other."""

    uses_labels = False

    def __init__(self, sizes):
        self.sizes = sizes

    def assign(self, labels, num_clients, seed):
        return np.split(np.arange(len(labels)), np.cumsum(self.sizes)[:-1])


def table(trainer, stage):
    with open(f"{trainer.log_dir}/clients_{stage}.csv") as file:
        return {int(row.pop("client")): row for row in csv.DictReader(file)}


def counted(module, data, stage):
    """Return (right, of how many) of every client's held-out examples, by a plain loop."""
    module.eval()
    found = {}
    for client, shard in enumerate(data.held_out(stage)):
        x, y = (tensor[shard] for tensor in data.train_dataset.tensors)
        if len(shard):
            with torch.no_grad():
                found[client] = int((module.net(x).argmax(1) == y).sum()), len(shard)
    return found


def check(module, data, trainer, stage):
    found, expected = table(trainer, stage), counted(module, data, stage)
    assert found.keys() == expected.keys()
    assert len({right / number for right, number in expected.values()}) > 2
    for client, (right, number) in expected.items():
        row, short = found[client], SHORT[stage]
        assert int(row["num_examples"]) == number
        assert float(row[f"{short}/right"]) == pytest.approx(right / number, abs=1e-6)
        assert float(row[f"{short}/plain"]) == pytest.approx(right / number, abs=1e-6)
        if number <= data.batch_size:
            assert float(row[f"{short}/seen"]) == pytest.approx(right / number, abs=1e-6)


class TestMetricObjects:
    """Each client's figure is that of its own examples alone, in all four stages."""

    @pytest.fixture
    def run(self, tmp_path):
        torch.manual_seed(0)  # clients' figures must differ, whatever ran before
        module, data = Scored(), toy_data(**OPTIONS)
        evaluation = ClientEvaluation(every_n_rounds=1)
        trainer = validating_trainer(
            Federation(seed=0), evaluation, max_epochs=2, logger=CSVLogger(tmp_path)
        )
        trainer.fit(module, datamodule=data)
        return module, data, trainer

    @pytest.mark.parametrize("stage", ["validation", "test"])
    def test_in_a_fit_in_validate_and_test(self, run, stage, tmp_path):
        module, data, fitted = run
        check(module, data, fitted, "validation")
        trainer = validating_trainer(ClientEvaluation(), logger=CSVLogger(tmp_path / "after"))
        evaluate = {"validation": trainer.validate, "test": trainer.test}[stage]
        [reported] = evaluate(module, datamodule=data, verbose=False)
        check(module, data, trainer, stage)
        x, y = data.source.val.tensors
        right = float((module.net(x).argmax(1) == y).float().mean())
        assert reported[f"{SHORT[stage]}/right"] == pytest.approx(right, abs=1e-6)

    def test_the_modules_own_validation_goes_on_where_it_was(self, run):
        module, data, trainer = run
        module.val_right.update(torch.eye(3), torch.tensor([0, 1, 0]))
        evaluate_clients(trainer, data, "validation")
        assert float(module.val_right.compute()) == pytest.approx(2 / 3)


@pytest.mark.parametrize(("every", "steps"), [(2, [1, 2]), (0, [2])])
def test_values_of_clients_stand_at_the_step_of_their_round(every, steps, tmp_path):
    class Counted(ClientEvaluation):
        times = 0

        def _report(self, *args):
            self.times += 1
            super()._report(*args)

    evaluation, logger = Counted(every_n_rounds=every), CSVLogger(tmp_path)
    trainer = validating_trainer(Federation(seed=0), evaluation, max_epochs=3, logger=logger)
    trainer.fit(Scored(), datamodule=toy_data(**OPTIONS))
    with open(f"{trainer.log_dir}/metrics.csv") as file:
        rows = [*csv.DictReader(file)]
    of = {
        n: [int(r["step"]) for r in rows if r[n]] for n in ("val/right", "clients/val/right_mean")
    }
    assert of == {"val/right": [0, 1, 2], "clients/val/right_mean": steps}
    assert evaluation.times == len(steps), "each model is evaluated once"


def test_a_diverged_client_is_in_the_worst_decile():
    for higher_is_better in (True, False):
        values = torch.tensor([0.5, torch.nan, 0.7])
        assert worst_decile(values, higher_is_better=higher_is_better).isnan()


def test_validation_and_test_examples_and_those_that_train_are_a_disjoint_cover():
    data = toy_data(**OPTIONS)
    parts = [data.clients, data.held_out("validation"), data.held_out("test")]
    assert sorted(torch.cat([shard for part in parts for shard in part]).tolist()) == [*range(90)]
    for client in range(6):
        sizes = [len(part[client]) for part in parts]
        assert sizes[0] >= 1
        assert sizes[1] == pytest.approx(0.25 * sum(sizes), abs=0.51)
        assert sizes[2] == pytest.approx(0.35 * sum(sizes), abs=1.01)


@pytest.mark.parametrize(
    ("stage", "option"),
    [("validation", "client_val_fraction"), ("test", "client_test_fraction")],
)
def test_nothing_stands_under_a_wrong_name(stage, option, tmp_path, caplog):
    """Examples for validation say nothing in a test, nor the other way round."""
    other = {"client_val_fraction", "client_test_fraction"} - {option}
    module, data = ToyModule(), toy_data(**dict.fromkeys(other, 0.3))
    trainer = validating_trainer(ClientEvaluation(), logger=CSVLogger(tmp_path))
    evaluate = {"validation": trainer.validate, "test": trainer.test}[stage]
    evaluate(module, datamodule=data, verbose=False)
    assert not [*tmp_path.rglob("clients_*.csv")]
    assert f"hold out no {stage} examples (data.{option} is 0)" in caplog.text


def test_examples_that_a_checkpoint_may_have_trained_on_are_not_held_out(tmp_path, caplog):
    module, path = ToyModule(), tmp_path / "round.ckpt"
    fitted = validating_trainer(Federation(seed=0), max_epochs=1)
    fitted.fit(module, datamodule=toy_data())  # which holds nothing out
    fitted.save_checkpoint(path)
    logger = CSVLogger(tmp_path)
    trainer = validating_trainer(ClientEvaluation(), Federation(seed=0), logger=logger)
    [reported] = trainer.test(module, toy_data(**OPTIONS), ckpt_path=path, verbose=False)
    assert reported["test/loss"] > 0
    assert "the model was trained on another partition" in caplog.text
    caplog.clear()
    # which trains on everything that clients hold out, and evaluates none of them
    central = validating_trainer(
        ClientEvaluation(), max_epochs=1, logger=CSVLogger(tmp_path), log_every_n_steps=1
    )
    central.fit(module, datamodule=toy_data(**OPTIONS))
    assert "on another partition or centrally" in caplog.text
    caplog.clear()
    central.save_checkpoint(path)
    trainer.test(module, toy_data(**OPTIONS), ckpt_path=path, verbose=False)
    assert "on another partition or centrally" in caplog.text
    assert not [*tmp_path.rglob("clients_*.csv")]
    trainer.test(module, toy_data(client_test_fraction=0.3), verbose=False)
    assert len(table(trainer, "test")) == 6


class Explained(ToyModule):
    """Logs R², which one example does not have."""

    def __init__(self):
        super().__init__()
        self.r2 = R2Score()

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.r2.update(self.net(batch[0])[:, 0], batch[1].float())
        self.log("val/r2", self.r2)


def test_a_client_with_one_example_too_few_for_a_metric_is_left_out(tmp_path):
    sizes = QuantitySizes([2, 20, 38])
    data = toy_data(num_clients=3, partition=sizes, client_val_fraction=0.5, batch_size=40)
    trainer = validating_trainer(ClientEvaluation(), logger=CSVLogger(tmp_path))
    with pytest.warns(
        UserWarning, match="leaves client 0 out, because its last batch has one example"
    ):
        trainer.validate(Explained(), datamodule=data, verbose=False)
    rows = table(trainer, "validation")
    assert rows.keys() == {1, 2}
    assert all(row["val/r2"] and row["val/loss"] for row in rows.values())


class AtTheEnd(ToyModule):
    """Logs at the end of a validation, and in no step."""

    def validation_step(self, batch, batch_idx):
        self.last = self.net(batch[0]).mean()

    def on_validation_epoch_end(self):
        self.log("val/last", self.last)


def test_a_module_whose_step_logs_nothing_is_told_that_clients_have_no_metric():
    trainer = validating_trainer(ClientEvaluation())
    with pytest.warns(
        UserWarning, match=r"no client has a metric, because validation_step logs none"
    ):
        trainer.validate(AtTheEnd(), datamodule=toy_data(client_val_fraction=0.5), verbose=False)


def test_only_the_end_of_a_fit_is_called_its_last_round(caplog):
    data = toy_data(client_val_fraction=0.2)
    trainer = validating_trainer(
        ClientEvaluation(every_n_rounds=1), Federation(seed=0), max_epochs=2
    )
    trainer.fit(ToyModule(), datamodule=data)
    assert "per-client evaluation (validation): the model after round 2" in caplog.text
    assert "the last one of this fit" not in caplog.text
    trainer.validate(trainer.lightning_module, datamodule=data, verbose=False)
    assert "the model after round 2, the last one of this fit" in caplog.text


class EmptyTests(LoaderData):
    """A source whose test_fraction is 0."""

    def test_dataloader(self):
        return []


class TestClientsAreTheTestSet:
    """Without a test set, the metrics of a test are those of all clients' test examples together."""

    @staticmethod
    def data(*, empty=False, **options):
        toy = toy_data(num_examples=90, client_test_fraction=0.35, **options)
        toy.setup("fit")
        source = (EmptyTests if empty else LoaderData)(toy.source.train_dataloader())
        return FederatedDataModule(
            source, num_clients=6, partition=toy.partition, client_test_fraction=0.35, seed=0
        )

    @pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
    @pytest.mark.parametrize("empty", [False, True])
    def test_pooled_and_by_client(self, empty, tmp_path, caplog):
        torch.manual_seed(0)
        module, data = Scored(), self.data(empty=empty)
        fitted = validating_trainer(Federation(seed=0), max_epochs=2)
        fitted.fit(module, datamodule=data)
        trainer = validating_trainer(ClientEvaluation(), logger=CSVLogger(tmp_path))
        [reported] = trainer.test(module, datamodule=data, verbose=False)
        check(module, data, trainer, "test")
        right, number = map(sum, zip(*counted(module, data, "test").values(), strict=True))
        assert reported["test/right"] == pytest.approx(right / number, abs=1e-6)
        assert f"test set: the {number} test examples of all clients together" in caplog.text
        mean = np.mean([r / n for r, n in counted(module, data, "test").values()])
        assert float(trainer.callback_metrics["clients/test/right_mean"]) == pytest.approx(mean)

    @pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
    def test_transforms_of_a_client_are_applied(self):
        data = self.data()
        for copied in (copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
            assert copied.test_dataloader.__self__ is copied  # which tests on clients of its own
        data.example_transforms = [Shifted()]
        data.setup("test")
        batches = list(data.test_dataloader())
        assert sum(map(len, (labels for _, labels in batches))) == len(
            data.held_out("test").indices
        )
        x, labels = (torch.cat(part) for part in zip(*batches, strict=True))
        rows = data.held_out("test").indices
        owners = np.repeat(np.arange(6), data.held_out("test").num_examples)
        plain = data.train_dataset.tensors[0][rows]
        torch.testing.assert_close(x, plain + torch.from_numpy(owners)[:, None])
        assert torch.equal(labels, data.train_dataset.tensors[1][rows])

    @pytest.mark.filterwarnings("ignore:You defined a `validation_step`", "ignore:Total length of")
    def test_not_of_a_model_that_may_have_trained_on_them(self, tmp_path):
        module, data, path = ToyModule(), self.data(), tmp_path / "central.ckpt"
        central = validating_trainer(max_epochs=1)
        central.fit(module, datamodule=data)
        central.save_checkpoint(path)
        for options in ({"datamodule": data}, {"datamodule": self.data(), "ckpt_path": path}):
            with pytest.warns(UserWarning, match="no examples are left to test on: the model was"):
                assert central.test(module, verbose=False, **options) == []
        federated = validating_trainer(Federation(seed=0), max_epochs=1)
        federated.fit(module, datamodule=data)
        [reported] = federated.test(module, datamodule=data, verbose=False)
        assert reported["test/loss"] > 0


class Shifted:
    """Adds the number of the client to its inputs."""

    def apply(self, inputs, labels, client, seeds):
        return inputs + client, labels


def test_without_examples_a_sentence_says_what_is_missing():
    toy = toy_data()
    toy.setup("fit")
    data = FederatedDataModule(LoaderData(toy.source.train_dataloader()), num_clients=2)
    trainer = validating_trainer()
    for run, loader in ((trainer.validate, "val_dataloader"), (trainer.test, "test_dataloader")):
        with pytest.raises(ConfigurationError, match=f"needs a {loader} in LoaderData"):
            run(ToyModule(), datamodule=data, verbose=False)


class TestCommonTestSet:
    def test_every_personal_model_is_tested_on_it(self, tmp_path, caplog):
        module, data = ToyModule(), toy_data(client_test_fraction=0.2)
        federation = Federation(personal=Personal(["net.4.*"]), seed=0)
        evaluation = ClientEvaluation(common_test_set=True)
        trainer = validating_trainer(
            federation, evaluation, max_epochs=2, logger=CSVLogger(tmp_path)
        )
        trainer.fit(module, datamodule=data)
        trainer.test(module, datamodule=data, verbose=False)
        rows, models = table(trainer, "test"), federation.personal_models(trainer)
        x, y = data.source.val.tensors
        assert set(rows[0]) == {"num_examples", "personal/test/loss"}
        for client, row in rows.items():
            with models.of(client):
                loss = functional.cross_entropy(module.net(x), y)
            assert float(row["personal/test/loss"]) == pytest.approx(float(loss.detach()), rel=1e-5)
            assert row["num_examples"] == "60"
        trainer = validating_trainer(evaluation, logger=CSVLogger(tmp_path))
        trainer.test(ToyModule(), datamodule=data, verbose=False)  # without personal models
        assert "all clients have the metrics of the global model" in caplog.text


@pytest.mark.parametrize(
    ("monitor", "every_n_rounds", "is_refused"),
    [
        (EarlyStopping("clients/val/loss/mean"), 2, True),
        (EarlyStopping("clients/val/loss/mean", strict=False), 2, False),
        (ModelCheckpoint(monitor="clients/val/loss/mean"), 0, True),
        (ModelCheckpoint(monitor="personal/val/loss_mean"), 0, True),
        (EarlyStopping("val/loss"), 0, False),
    ],
)
def test_monitors_of_clients_need_an_evaluation_every_round(monitor, every_n_rounds, is_refused):
    evaluation = ClientEvaluation(every_n_rounds=every_n_rounds)
    parts = Federation(engine="sequential"), evaluation, monitor
    trainer = validating_trainer(
        *parts, max_epochs=1, enable_checkpointing=isinstance(monitor, ModelCheckpoint)
    )
    if is_refused:
        with pytest.raises(ConfigurationError, match=rf"monitors {monitor.monitor}, .* to 1"):
            trainer.fit(ToyModule(), datamodule=toy_data())
    else:
        trainer.fit(ToyModule(), datamodule=toy_data())
