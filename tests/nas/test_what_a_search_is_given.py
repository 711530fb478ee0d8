"""What a search is given has an influence or is refused, and a search goes on as it would have gone."""

import math
from functools import partial

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from nas.test_supernet import TwoLayers, data
from nas.test_supernet_federated import alpha, search, singles, supernet
from scipy.optimize import brentq
from toys import toy_trainer, weights

from fl_lightning import ConfigurationError, Federation
from fl_lightning.models import Schedule
from fl_lightning.nas import (
    HardGumbel,
    LogPenalty,
    NASBench201,
    Reward,
    SinglePath,
    Softmax,
    Supernet,
    ZeroCostStart,
)
from fl_lightning.nas.network import retraining
from fl_lightning.nas.report import _check_one_device, _check_precision, _check_reach
from fl_lightning.nas.spaces.space import Networks

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
]


class Waiting(Softmax):
    alpha_from = 1.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rule": SinglePath()}, r"model\.rule SinglePath has no gradient of alpha"),
        (
            {"learn": Reward(), "penalty": LogPenalty(10.0)},
            r"model\.penalty LogPenalty is part of a loss",
        ),
        ({"recalibration_examples": 1}, "recalibration_examples must be at least 2, got 1"),
        ({"recalibration_examples": 0}, "recalibration_examples must be at least 2, got 0"),
    ],
)
def test_what_would_do_nothing_is_refused(options, says):
    with pytest.raises(ConfigurationError, match=says):
        supernet(**options)


LBFGS = {"optimizer": torch.optim.LBFGS}
OF_ALPHA = {"architecture_optimizer": torch.optim.LBFGS}


@pytest.mark.parametrize(
    ("options", "says"),
    [  # optimizers that ask for the loss, images of another size
        ({**LBFGS, "architecture_state": "clients"}, r"model\.optimizer is LBFGS"),
        (OF_ALPHA, r"model\.architecture_optimizer is LBFGS"),
        ({**OF_ALPHA, "architecture_state": "clients"}, r"model\.architecture_optimizer is LBFGS"),
        ({"image_size": 8}, "image_size is 8, and the images are 1 x 1"),
    ],
)
def test_what_no_search_can_use_is_refused(options, says):
    given = {"num_classes": 2, "in_channels": 4, "image_size": 1, **options}
    with pytest.raises(ConfigurationError, match=says):
        search(Supernet(TwoLayers(), **given))


def test_runs_that_are_no_search_are_refused():
    with pytest.raises(ConfigurationError, match="must be at least 1 in a search, got -1"):
        search(rounds=-1, trainer={"max_steps": 3})
    with pytest.raises(ConfigurationError, match="bf16-true, and alpha has 8 binary digits"):
        _check_precision("bf16-true")  # in which small steps are none
    for half in ("16-mixed", "16-true"):
        with pytest.raises(ConfigurationError, match="bf16-mixed"):
            _check_precision(half)
    _check_precision("bf16-mixed")
    with pytest.raises(ConfigurationError, match=r"got 2: each would have its own alpha"):
        _check_one_device(2)
    _check_one_device(1)


class Stop(Callback):
    """Ends a run after its first round."""

    def on_train_epoch_end(self, trainer, module):
        trainer.should_stop = True


def test_a_search_says_if_alpha_has_not_moved(caplog):
    told = "alpha has not moved: it is fixed for the first 100% of the search"
    for early in (True, False):
        caplog.clear()
        with caplog.at_level("INFO"):
            search(supernet(Waiting()), *([Stop()] if early else []), rounds=3)
        assert (told in caplog.text) == early


@pytest.mark.parametrize("state", ["clients", "none"])
def test_alpha_that_waits_moves_at_clients_in_its_round(state):
    """Its optimizer's state begins to change rounds after the first steps of the run."""
    module = search(supernet(Waiting(), architecture_state=state))
    assert not torch.equal(alpha(module), alpha(supernet()))
    assert bool(module.kept_state.any()) == (state == "clients")


def central(module, *callbacks, ckpt_path=None, rounds=3):
    trainer = toy_trainer(*callbacks, max_epochs=rounds, enable_checkpointing=bool(callbacks))
    trainer.fit(module, datamodule=data(singles(), 1, 20), ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize("rule", [None, HardGumbel()], ids=["all operations", "one operation"])
def test_a_central_search_taken_up_ends_in_the_same_bits(rule, tmp_path):
    whole = central(supernet(rule), ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1))
    torch.rand(7)  # what a program does beside has no say in what is drawn
    again = central(supernet(rule), ckpt_path=tmp_path / "epoch=1.ckpt")
    assert torch.equal(weights(again), weights(whole))


class Rates(Callback):
    """Notes the weights' learning rate of each round."""

    def __init__(self):
        self.seen = {}

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen[trainer.current_epoch] = trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.parametrize("clients", [True, False], ids=["clients", "central"])
def test_a_run_taken_up_from_a_rounds_last_batch_has_each_rounds_rate(clients, tmp_path):
    def run(*callbacks, ckpt_path=None):
        module, rates = supernet(schedule=Schedule("cosine")), Rates()
        everything = [rates, *callbacks, *([Federation(local_steps=1, seed=4)] if clients else [])]
        fitting = toy_trainer(*everything, max_epochs=4, enable_checkpointing=bool(callbacks))
        fitting.fit(module, datamodule=data(singles(), 2, 30), ckpt_path=ckpt_path)
        return rates.seen, int(fitting.num_training_batches)

    steps = run()[1]
    at_last = ModelCheckpoint(
        tmp_path, filename="{epoch}", save_top_k=-1, every_n_train_steps=steps
    )
    whole, _ = run(at_last)
    again, _ = run(ckpt_path=tmp_path / "epoch=1.ckpt")
    assert again == {round_: rate for round_, rate in whole.items() if round_ in again}
    assert len(set(whole.values())) == 4


def test_a_prediction_does_not_depend_on_its_neighbours():
    images = torch.randn(24, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    examples = torch.utils.data.TensorDataset(images, torch.arange(24) % 2)
    source = data(examples, 3, 24)
    module = Supernet(
        NASBench201(), num_classes=2, in_channels=1, image_size=8, channels=4, cells=1
    )
    trainer = toy_trainer(Federation(local_steps=1), max_epochs=1)
    trainer.fit(module, datamodule=source)

    def predicted(batch_size):
        source.predict_dataloader = lambda: torch.utils.data.DataLoader(
            examples, batch_size=batch_size
        )
        return torch.cat(trainer.predict(module, datamodule=source))

    torch.testing.assert_close(predicted(1), predicted(24), atol=1e-5, rtol=0)


def test_what_trains_what_was_found_names_no_buffers_of_the_search():
    run = {"federation": {"client_state": ["kept_state", "baseline", "running_*"]}}
    architecture = NASBench201().sample(torch.Generator().manual_seed(0))
    shape = {"num_classes": 2, "in_channels": 1, "channels": 4, "cells": 1}
    found = retraining(architecture, Networks(NASBench201(), 8, shape), run=run)
    assert found["federation"] == {"client_state": ["running_*"]}


@pytest.mark.parametrize("limit", [{"max_steps": 2}, {"limit_train_batches": 0}])
def test_a_search_that_ends_within_its_first_epoch_leaves_its_result(limit, tmp_path):
    module, logger = supernet(alpha_every=1), CSVLogger(tmp_path, "short", version=0)
    trainer = toy_trainer(max_epochs=3, logger=logger, log_every_n_steps=1, **limit)
    trainer.fit(module, datamodule=data(singles(), 4, 5))
    run = tmp_path / "short/version_0"
    found = yaml.safe_load((run / "architecture.yaml").read_text())["architecture"]
    assert found == str(module.architecture)
    assert {"cell.png", "retrain.yaml"} <= {path.name for path in run.iterdir()}
    assert not (run / "sections").exists()  # over rounds, of which there is none


def test_a_search_in_which_alpha_cannot_decide_is_refused():
    """One logit at r and four at -r have the entropy log Z - 2r e^2r / Z, Z = e^2r + 4."""

    def net(lr=0.01, kind=torch.optim.Adam, **options):
        options = {"architecture_optimizer": partial(kind, lr=lr), "num_classes": 4, **options}
        return Supernet(NASBench201(), channels=4, cells=1, image_size=8, **options)

    def excess(reach):
        total = math.exp(2 * reach) + 4
        return math.log(total) - 2 * reach * math.exp(2 * reach) / total - 0.98 * math.log(5)

    least, usual = brentq(excess, 0.01, 2), net()
    _check_reach(usual, math.ceil(least / 0.01) + 1, num_rounds=2)
    says = r"changes by 0\.2 at most, and a decision needs 0\.29\. Set the lr of .* to 0\.016, or"
    with pytest.raises(ConfigurationError, match=says):
        _check_reach(usual, 20, num_rounds=2)
    _check_reach(net(lr=0.016), 20, num_rounds=2)
    _check_reach(usual, math.inf, num_rounds=2)
    _check_reach(usual, 20, num_rounds=1)  # these try a configuration
    _check_reach(usual, 9, num_rounds=2)
    _check_reach(net(kind=torch.optim.SGD), 20, num_rounds=2)  # moves by the size of its gradients
    _check_reach(net(alpha_held=True), 20, num_rounds=2)
    _check_reach(net(alpha_start=ZeroCostStart()), 20, num_rounds=2)
    with pytest.raises(ConfigurationError, match="alpha cannot decide in this search"):
        _check_reach(net(alpha_start=ZeroCostStart(scale=0.1)), 20, num_rounds=2)
    usual.alpha.data[:, 3] = 2.0  # decided, by an earlier search
    _check_reach(usual, 20, num_rounds=2)
    module = supernet()
    module._architecture_optimizer = partial(torch.optim.Adam, lr=1e-4)
    with pytest.raises(ConfigurationError, match="alpha cannot decide in this search: in 12 steps"):
        search(module, rounds=12, local_steps=1)


class Stream(torch.utils.data.IterableDataset):
    """Four examples of an unknown number."""

    def __iter__(self):
        yield from ((torch.full((4, 1, 1), float(n)), n % 2) for n in range(4))


def test_a_search_takes_a_stream_whose_length_is_not_known():
    loader = torch.utils.data.DataLoader(Stream(), batch_size=2)
    module = supernet()
    before = alpha(module)
    toy_trainer(max_epochs=2).fit(module, CombinedLoader({"train": loader, "search": loader}))
    assert not torch.equal(alpha(module), before)
