"""Several processes: the same model as in one, whatever is shared out, fails or is resumed."""

import csv
import multiprocessing
import os
import signal
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from test_failures import sabotage
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy
from toys import (
    SaveEverywhere,
    ToyData,
    ToyModule,
    federated,
    toy_data,
    validating_trainer,
    weights,
)

from fl_lightning import (
    ClientEvaluation,
    ClientFailure,
    ConfigurationError,
    FederatedDataModule,
    Federation,
    Mean,
    PoissonCohort,
    RoundFailure,
    UniformCohort,
)
from fl_lightning.core.errors import ProcessFailure
from fl_lightning.engines.compiler.compiling import Compiled
from fl_lightning.federation.checks.fit import check_compatible
from fl_lightning.federation.processes.ranks import Ranks


class AllAgree(Callback):
    """Every process ends every round with the same model, server and metrics."""

    def on_train_epoch_end(self, trainer, module):
        rounds = next(c for c in trainer.callbacks if isinstance(c, Federation)).rounds
        mine = weights(module), str(rounds.server.state_dict()), rounds.record.state_dict()
        mine[2].pop("seconds")
        first, *others = Ranks(trainer).gather(mine)
        for other in others:
            assert torch.equal(first[0], other[0])
            assert first[1] == other[1]
            assert str(first[2]) == str(other[2])


TOLD = [
    torch.tensor(1.5),
    torch.arange(6).view(2, 3).T,
    torch.empty(0, dtype=torch.bool),
    torch.ones(3, dtype=torch.bfloat16),
    torch.eye(3).to_sparse(),
    torch.ones(2, dtype=torch.complex64).conj(),
    torch.nn.Parameter(torch.ones(2)),
]


class Telling(Callback):
    """Processes tell each other values of any length and type, and add up what one or all have."""

    def on_train_epoch_end(self, trainer, module):
        ranks = Ranks(trainer)
        for lengths in [(0, 10_000, 3), (10, 1_200_000, 0), (1_200_000, 50_000, 7)]:
            texts = ranks.gather((ranks.rank, "x" * lengths[ranks.rank]))
            told = [(rank, len(text)) for rank, text in texts]
            assert told == list(enumerate(lengths))[: ranks.size]
        for told in ranks.gather(TOLD):
            for found, tensor in zip(told, TOLD, strict=True):
                assert (found.dtype, found.layout) == (tensor.dtype, tensor.layout)
                assert torch.equal(found.to_dense(), tensor.to_dense())
        for shape in [(), (0,), (7,), (3, 5), (300_001,)]:
            for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
                total = self.own(ranks.rank, shape, dtype)
                ranks.all_reduce(total)
                expected = sum(self.own(rank, shape, dtype) for rank in range(ranks.size))
                assert torch.equal(total, expected)
            for dtype in (torch.float32, torch.int16, torch.bool, torch.complex64):
                tensor = self.own(ranks.rank, shape, dtype)
                ranks.broadcast(tensor, source=1)
                assert torch.equal(tensor, self.own(1, shape, dtype))

    def own(self, rank, shape, dtype):
        """Whole numbers, of which all types have the sums."""
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 9
        return numbers.round().to(dtype)


def test_processes_tell_each_other_whatever_they_have():
    fit(3, ToyModule, None, Telling(), max_epochs=1)


class Counting(ToyModule):
    """Logs what the pooling of metrics could get wrong."""

    def __init__(self, **options):
        super().__init__(dropout=0.3, batch_norm=True, **options)
        self.train_accuracy = MulticlassAccuracy(num_classes=3)
        self.val_accuracy = MulticlassAccuracy(num_classes=3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.train_accuracy(logits, y)
        self.log("train/pooled", self.train_accuracy, prog_bar=True)
        self.log("train/size", float(len(y)), reduce_fx="sum")
        return F.cross_entropy(logits, y)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        x, y = batch
        self.val_accuracy(self.net(x), y)
        self.log("val/object", self.val_accuracy)
        self.log("val/examples", float(len(y)), reduce_fx="sum")
        self.log("val/inferred", F.cross_entropy(self.net(x), y))
        self.log_dict({"val/of_several": F.cross_entropy(self.net(x), y)})


class AtTheEnd(Counting):
    """Computes values that are no means over examples at the end of validation and test."""

    losses: list

    def _note(self, batch, batch_idx):
        x, y = batch
        self.losses = [] if batch_idx == 0 else self.losses
        self.losses.append(F.cross_entropy(self.net(x), y, reduction="none"))

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self._note(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        super().test_step(batch, batch_idx)
        self._note(batch, batch_idx)

    def on_validation_epoch_end(self):
        losses = torch.cat(self.losses)
        self.log_dict({"val/worst": losses.max(), "val/count": float(len(losses))})

    def on_test_epoch_end(self):
        self.log("test/worst", torch.cat(self.losses).max())


def some_data(**options):
    return toy_data(num_examples=61, batch_size=4, drop_last=True, **options)


def fit(devices, make=None, data=None, *callbacks, ckpt_path=None, exact=False, **options):
    seed_everything(0, verbose=False)
    trainer_options = {
        name: options.pop(name)
        for name in ("max_epochs", "logger", "enable_checkpointing", "limit_val_batches")
        if name in options
    }
    federation = Federation(
        **{"cohort": UniformCohort(size=4), "local_epochs": 2, "seed": 4} | options,
        aggregator=Mean(exact=exact),
        server_optimizer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.5),
    )
    trainer = validating_trainer(
        *(federation, AllAgree(), *callbacks),
        devices=devices,
        **trainer_options,
    )
    module = (make or Counting)()
    data = data if data is not None else some_data()
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module, trainer


@pytest.mark.parametrize(("size", "exact"), [(5, True), (1, True), (5, False)])
def test_the_number_of_processes_does_not_change_the_model(size, exact):
    """Several clients for each process, or fewer than processes."""
    # what float32 rounds differently in one round, training magnifies in the next
    rounds = 2 if exact else 1
    options = {"cohort": UniformCohort(size=size), "exact": exact, "max_epochs": rounds}
    (alone, one), (module, trainer) = fit(1, **options), fit(3, **options)
    if exact:
        assert torch.equal(weights(module), weights(alone))
    else:
        expected = weights(alone)
        assert float((weights(module) - expected).norm() / expected.norm()) < 1e-6
    assert (trainer.global_step, trainer.current_epoch) == (rounds, rounds)
    assert trainer.callback_metrics.keys() == one.callback_metrics.keys()
    for name, value in one.callback_metrics.items():
        found = float(trainer.callback_metrics[name])
        if exact and name.startswith(("train/", "round/")) and name != "round/seconds":
            assert found == value, name
        elif name != "round/seconds":
            assert found == pytest.approx(float(value), rel=2e-6), name


def test_one_process_of_the_strategy_is_one_process():
    expected, _ = fit(1)
    seed_everything(0, verbose=False)
    module = Counting()
    momentum = {"server_optimizer": lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.5)}
    federation = Federation(cohort=UniformCohort(size=4), local_epochs=2, seed=4, **momentum)
    trainer = validating_trainer(federation, devices=1, strategy="federated")
    trainer.fit(module, datamodule=some_data())
    assert torch.equal(weights(module), weights(expected))


def test_accumulation_and_clipping_are_the_clients_own():
    def end(devices):
        trainer = {"devices": devices, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
        return weights(federated(partial(ToyModule, momentum=0.0), trainer=trainer).module)

    torch.testing.assert_close(end(2), end(1), rtol=2e-6, atol=1e-6)


class TestEvaluation:
    def test_fewer_examples_than_processes(self):
        class Two(ToyData):
            def setup(self, stage):
                super().setup(stage)
                self.val = torch.utils.data.Subset(self.val, [0, 1])

        data = FederatedDataModule(Two(), num_clients=3, seed=0)
        module, trainer = fit(3, ToyModule, data, cohort=None)
        evaluator = validating_trainer()
        evaluator.validate(module, datamodule=data, verbose=False)
        expected = float(evaluator.callback_metrics["val/loss"])
        assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(expected, rel=1e-6)

    def test_values_of_all_examples_are_those_of_one_process(self):
        def evaluated(devices):
            data = toy_data(num_examples=129, drop_last=True)  # 65 and 64: a batch more in one
            module, trainer = fit(devices, AtTheEnd, data, max_epochs=1)
            validated = dict(trainer.callback_metrics)
            return validated | trainer.test(module, datamodule=data, verbose=False)[0]

        one, two = evaluated(1), evaluated(2)
        assert {"val/worst", "test/worst", "test/loss", "val/object"} <= set(one)
        assert float(two["val/examples"]) == float(two["val/count"]) == 129
        for name in (name for name in one if name.startswith(("val/", "test/"))):
            assert float(two[name]) == pytest.approx(float(one[name]), rel=1e-5), name

    def test_of_several_loaders_a_tiny_one_changes_no_other(self):
        class Loaders(ToyData):
            def test_dataloader(self):
                tiny = torch.utils.data.Subset(self.val, [0])
                return [torch.utils.data.DataLoader(s, batch_size=8) for s in (self.val, tiny)]

        class Module(ToyModule):
            def test_step(self, batch, batch_idx, dataloader_idx):
                x, y = batch
                self.log("test/loss", F.cross_entropy(self.net(x), y), batch_size=len(y))

        data = FederatedDataModule(Loaders(num_examples=61), num_clients=3, seed=0)
        module, trainer = fit(2, Module, data, cohort=None, max_epochs=1)
        found = trainer.test(module, datamodule=data, verbose=False)
        expected = validating_trainer().test(module, datamodule=data, verbose=False)
        assert len(found) == 2
        for ours, alone in zip(found, expected, strict=True):
            assert ours == pytest.approx(alone, rel=1e-6)

    def test_predictions_are_shared_out_whatever_the_module_does_at_the_end(self, tmp_path):
        class Predicting(AtTheEnd):
            def predict_step(self, batch, batch_idx):
                name = f"{self.global_rank}-{batch_idx}"
                (tmp_path / name).write_text(str(len(batch[0])))
                return batch[1]

        module, trainer = fit(2, Predicting, max_epochs=1)
        source = ToyData(num_examples=61)
        source.setup("predict")
        trainer.predict(module, torch.utils.data.DataLoader(source.val, batch_size=8))
        assert sum(int(path.read_text()) for path in tmp_path.iterdir()) == 61

    def test_per_client_evaluation_is_shared_out(self, tmp_path):
        rows = []
        for devices in (1, 2):
            logger = CSVLogger(tmp_path, name=str(devices))
            data = some_data(client_val_fraction=0.3)
            options = {"exact": True, "logger": logger, "max_epochs": 1}
            fit(devices, ToyModule, data, ClientEvaluation(), **options)
            with Path(logger.log_dir, "clients_validation.csv").open() as file:
                rows.append(list(csv.reader(file)))
            assert os.listdir(tmp_path / str(devices)) == ["version_0"]
        assert rows[0] == rows[1]
        assert len(rows[0]) == 1 + 6


def sabotaged(data, clients, how):
    return lambda: sabotage(how, clients, data)[0]


class TestFailures:
    def test_a_client_failing_in_another_process_is_named(self):
        data = toy_data()
        with pytest.raises(ClientFailure, match="round 1, client 5: KeyError") as caught:
            fit(2, sabotaged(data, [5], "raise"), data, cohort=None)
        assert caught.value.client_id == 5
        assert "no such thing" in str(caught.value.__cause__)

    def test_of_several_the_one_is_named_that_one_process_would_name(self):
        data = toy_data()
        for devices in (1, 3):
            with pytest.raises(ClientFailure, match="client 1: its training loss is nan"):
                fit(devices, sabotaged(data, [5, 4, 3, 2, 1], "nan"), data, cohort=None)

    def test_skipped_clients_are_counted_over_all(self, capfd):
        data = toy_data()
        options = {"cohort": None, "on_client_failure": "skip", "max_epochs": 1}
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_: print(message, file=sys.stderr, flush=True)
            module, trainer = fit(2, sabotaged(data, [1, 4], "nan"), data, **options)
            said = capfd.readouterr().err
            expected, _ = fit(1, sabotaged(data, [1, 4], "nan"), data, **options)
        assert trainer.callback_metrics["round/skipped"] == 2
        assert trainer.callback_metrics["round/cohort_size"] == 6
        torch.testing.assert_close(weights(module), weights(expected), rtol=2e-6, atol=1e-6)
        for client in (1, 4):
            assert said.count(f"skipped: round 1, client {client}: its training loss") == 1

    @pytest.mark.filterwarnings("ignore:skipped")
    def test_replies_are_counted_over_all(self):
        data = toy_data()
        options = {"cohort": None, "on_client_failure": "skip", "max_epochs": 1}
        make = sabotaged(data, [0, 1, 2, 3], "nan")
        fit(2, make, data, min_replies=2, **options)
        with pytest.raises(RoundFailure, match="2 of 6"):
            fit(2, make, data, min_replies=3, **options)

    @pytest.mark.parametrize(
        ("hook", "rank"), [("on_train_batch_start", 0), ("on_validation_epoch_end", 1)]
    )
    def test_an_error_in_one_process_ends_all(self, hook, rank):
        class Breaks(Callback):
            pass

        def broken(self, trainer, *args):
            if trainer.global_rank == rank:
                raise ZeroDivisionError("in a hook")

        setattr(Breaks, hook, broken)
        began = time.monotonic()
        with pytest.raises(ZeroDivisionError, match="in a hook"):
            fit(2, None, None, Breaks())
        assert time.monotonic() - began < 20

    @pytest.mark.filterwarnings(
        "ignore:.*was called without a model", "ignore:.*no last checkpoint"
    )
    def test_a_checkpoint_of_the_failed_run_is_of_what_was_trained(self, tmp_path):
        class FailsInRoundOne(Callback):
            def on_train_batch_start(self, trainer, *args):
                if trainer.current_epoch == 1:
                    raise ZeroDivisionError("in all processes")

        callbacks = FailsInRoundOne(), OnExceptionCheckpoint(tmp_path, "failed")
        with pytest.raises(ZeroDivisionError, match="in all processes"):
            fit(2, ToyModule, None, *callbacks, enable_checkpointing=True, exact=True)
        assert os.listdir(tmp_path) == ["failed.ckpt"]
        assert torch.load(tmp_path / "failed.ckpt", weights_only=True)["global_step"] == 1
        module, _ = fit(2, ToyModule, ckpt_path=tmp_path / "failed.ckpt", exact=True)
        assert torch.equal(weights(module), weights(fit(2, ToyModule, exact=True)[0]))

    def test_a_killed_process_ends_all(self):
        class Killed(Callback):
            def on_train_epoch_start(self, trainer, module):
                if trainer.current_epoch == 1 and trainer.global_rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)

        with pytest.raises(ProcessFailure, match="process 1 of 2 was ended by SIGKILL"):
            fit(2, None, None, Killed())

    @pytest.mark.filterwarnings(
        "ignore:.*was called without a model", "ignore:.*no last checkpoint"
    )
    @pytest.mark.parametrize(
        ("hook", "ranks"),
        [("on_train_batch_start", {0, 1}), ("on_validation_epoch_end", {1})],
    )
    def test_a_process_that_is_asked_to_end_ends_all(self, tmp_path, hook, ranks):
        class Asked(Callback):
            pass

        def kill(self, trainer, *args):
            if trainer.current_epoch == 1 and trainer.global_rank in ranks:
                os.kill(os.getpid(), signal.SIGTERM)

        setattr(Asked, hook, kill)
        began = time.monotonic()
        callbacks = Asked(), OnExceptionCheckpoint(tmp_path, "ended")
        with pytest.raises(SIGTERMException):
            fit(2, None, None, *callbacks, enable_checkpointing=True)
        assert time.monotonic() - began < 20
        if 0 in ranks:
            assert os.listdir(tmp_path) == ["ended.ckpt"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    module, trainer = fit(2, None, None, SaveEverywhere(folder), exact=True)
    return folder, weights(module), dict(trainer.callback_metrics)


class TestResuming:
    @pytest.mark.parametrize("moment", ["0-validation", "1-trained"])
    def test_anywhere_ends_in_the_same_bits(self, uninterrupted, moment):
        folder, expected, metrics = uninterrupted
        module, trainer = fit(2, ckpt_path=folder / f"{moment}.ckpt", exact=True)
        assert torch.equal(weights(module), expected)
        assert (trainer.global_step, trainer.current_epoch) == (3, 3)
        for name in ("train/pooled", "train/loss", "round/cohort_size"):
            assert trainer.callback_metrics[name] == metrics[name], name

    @pytest.mark.parametrize(("devices", "moment"), [(1, "0-end"), (3, "1-trained")])
    def test_with_another_number_of_processes(self, uninterrupted, devices, moment):
        folder, expected, _ = uninterrupted
        module, trainer = fit(devices, ckpt_path=folder / f"{moment}.ckpt", exact=True)
        assert torch.equal(weights(module), expected)
        assert (trainer.global_step, trainer.current_epoch) == (3, 3)


def test_what_a_fit_leaves_behind_comes_home(tmp_path):
    callback = ModelCheckpoint(tmp_path, monitor="val/loss", save_last=True)
    stopping = EarlyStopping("val/loss", patience=9)
    _, trainer = fit(2, None, None, callback, stopping, enable_checkpointing=True)
    assert Path(callback.best_model_path).exists()
    assert Path(callback.last_model_path).exists()
    assert callback.best_model_score == stopping.best_score  # states of all callbacks
    assert trainer.callbacks[0].state_dict()["server"]
    with pytest.raises(ConfigurationError, match="build another Trainer"):
        trainer.fit(Counting(), datamodule=toy_data())


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_the_module_comes_home_in_the_precision_of_the_fit(precision):
    class WithWholeNumbers(ToyModule):
        def __init__(self):
            super().__init__()
            self.register_buffer("counts", torch.arange(3, dtype=torch.int16))  # unknown to gloo

    options = {"max_epochs": 1, "precision": precision}
    alone, module = (
        federated(
            WithWholeNumbers, trainer={"devices": devices, **options}, aggregator=Mean(exact=True)
        ).module
        for devices in (1, 2)
    )
    assert module.net[0].weight.dtype == alone.net[0].weight.dtype != torch.float32
    assert torch.equal(weights(module), weights(alone))


class MadeAtStart(Callback):
    """A state that only a process that trains can load."""

    def on_fit_start(self, trainer, module):
        self.average = weights(module).clone()

    def state_dict(self):
        return {"average": self.average}

    def load_state_dict(self, state_dict):
        self.average.copy_(state_dict["average"])


class Unpicklable(Callback):
    def state_dict(self):
        return {"function": lambda: None}


def test_callbacks_whose_states_cannot_come_home_are_named():
    stopping = EarlyStopping("val/loss", patience=9)
    with pytest.warns(UserWarning, match="could not be copied") as told:
        module, _ = fit(2, None, None, MadeAtStart(), Unpicklable(), stopping)
    texts = [str(each.message) for each in told if "could not be copied" in str(each.message)]
    assert len(texts) == 2
    assert "callback MadeAtStart" in texts[0]
    assert "callback Unpicklable" in texts[1]
    assert stopping.best_score < torch.inf
    assert torch.equal(weights(module), weights(fit(2)[0]))


def test_other_strategies_are_refused():
    trainer = validating_trainer(
        Federation(), devices=2, strategy="ddp"
    )  # not started: it would stay
    with pytest.raises(ConfigurationError, match=r"set trainer\.strategy to federated"):
        check_compatible(trainer, ToyModule())


def test_central_training_without_gradient_exchange_is_refused():
    trainer = validating_trainer(devices=2)
    with pytest.raises(ConfigurationError, match=r"use trainer\.strategy ddp"):
        trainer.fit(ToyModule(), datamodule=some_data())


def test_layers_that_exchange_statistics_are_refused():
    class Synchronised(ToyModule):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.SyncBatchNorm(8)

    with pytest.raises(ConfigurationError, match="sync_batchnorm to false"):
        fit(2, Synchronised)


def square(x):
    return x * x


def fit_after_compiling(compile_, folder):
    """In a process that has not seen a backward pass before its first graph."""
    x = torch.ones(2, requires_grad=True)
    compile_(square)(x.detach())
    x.sum().backward()
    try:
        fit(2, max_epochs=1)
    except ConfigurationError as error:
        (folder / "refused").write_text(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("compile_", [Compiled, partial(torch.compile, backend="eager")])
def test_a_process_that_has_compiled_forks_or_says_why_not(tmp_path, compile_):
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=fit_after_compiling, args=(compile_, tmp_path))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == 0
    if compile_ is Compiled:
        assert not (tmp_path / "refused").exists()
    else:
        assert "Restart it" in (tmp_path / "refused").read_text()


def one_of_two(rank, port, folder):
    """As torchrun or a scheduler starts a process."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2")
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")
    module, _ = fit(2, None, None, Telling())
    torch.save(weights(module), folder / f"weights_{rank}")
    data = toy_data()
    try:
        fit(2, sabotaged(data, [0], "raise"), data, cohort=None)
    except ClientFailure as failure:
        (folder / f"failure_{rank}").write_text(str(failure))


def test_processes_started_from_outside_all_know_everything(tmp_path):
    context = multiprocessing.get_context("fork")
    arguments = (find_free_network_port(), tmp_path)
    processes = [context.Process(target=one_of_two, args=(r, *arguments)) for r in range(2)]
    for process in processes:
        process.start()
    expected, _ = fit(2)
    for rank, process in enumerate(processes):
        process.join(timeout=60)
        assert process.exitcode == 0
        assert torch.equal(torch.load(tmp_path / f"weights_{rank}"), weights(expected))
        failure = (tmp_path / f"failure_{rank}").read_text()
        assert failure == "round 1, client 0: KeyError: 'no such thing'"


def test_every_client_is_in_one_share():
    from fl_lightning.data.cohorts.population import Population
    from fl_lightning.federation.processes.ranks import shares as divided
    from fl_lightning.federation.round_cohorts import RoundCohorts

    work = np.arange(1, 31)
    for num_ranks in (1, 2, 3, 7):
        parts = [
            RoundCohorts(
                PoissonCohort(fraction=0.3),
                Population(work),
                seed=0,
                share=lambda ids, rank=rank, num=num_ranks: ids[divided(work[ids], num)[rank]],
            )
            for rank in range(num_ranks)
        ]
        for round_index in range(5):
            shares = [list(part.clients(round_index)) for part in parts]
            assert all(share == sorted(share) for share in shares)
            cohort = PoissonCohort(fraction=0.3).sample(round_index, Population(work), 0)
            assert sorted(client for share in shares for client in share) == cohort.tolist()
            loads = [work[share].sum() for share in shares]
            assert max(loads) <= 4 / 3 * max(work[cohort].sum() / num_ranks, work[cohort].max())
