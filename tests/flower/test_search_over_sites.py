"""Searches over sites end as their simulations: the same cell, the same statistics, whatever sites say."""

import multiprocessing
import os

import pytest
import torch
from flower.site_processes import (
    CLIENTS,
    OF_RUNS,
    Between,
    LyingServer,
    configuration,
    differing,
    over_network,
    simulated,
    three_sites,
)
from flower.test_same_bits import KillingAt, built
from flower.test_site_masks import Sites, clients_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fl_lightning import Federation
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.messages import Answer, ClientAnswer, Order, digest
from fl_lightning.flower.packing import SUMS
from fl_lightning.nas import MobileNet, NASBench201, Supernet
from fl_lightning.nas.spaces.space import Networks
from fl_lightning.nas.sub_networks.evaluation import batch_norms, collect_sums

pytestmark = OF_RUNS

SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "momentum": 0.9}}
ADAM = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.1, "betas": [0.5, 0.999]}}
MEAN = {"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0}}
SPARSE = built("SparseSGDM", lr=0.05, momentum=0.9)
IMAGES = {"num_classes": 10, "in_channels": 1, "image_size": 8, "recalibration_examples": 64}
CELLS = {
    "space": built("nas.NASBench201"),
    "channels": 4,
    "cells": 1,
    "optimizer": SGD,
    "architecture_optimizer": ADAM,
    "schedule": built("models.Schedule", kind="cosine"),
    **IMAGES,
}
SIZES = {
    "space": built(
        "nas.MobileNet",
        kernels=[3, 5],
        expansions=[2, 3],
        depths=[1, 2],
        widths=[8, 8, 8, 16, 32, 32],
        strides=[1, 2, 2],
        squeeze=[False, False, True],
        swish=[False, True, True],
    ),
    "optimizer": SGD,
    **IMAGES,
}
ROUNDS = {
    "federation__local_epochs": None,
    "federation__local_steps": 2,
    "trainer__logger": True,
}


def searching(options=None, **more):
    """Return a configuration of a search of cells, with options of `Supernet`."""
    model = built("nas.Supernet", **CELLS | (options or {}))
    return configuration(model=model, data__init_args__search_fraction=0.5, **ROUNDS | more)


def of_all_sizes(options, **more):
    """Return a configuration that trains networks of all sizes, with options of `OneShot`."""
    return configuration(model=built("nas.OneShot", **SIZES | options), **ROUNDS | more)


def measured(root):
    """Return metrics that a run has logged, as steps and values by name."""
    [folder] = {file.parent for file in root.rglob("events.out.tfevents*")}
    log = EventAccumulator(str(folder))
    log.Reload()
    kinds = ("train/", "val/", "clients/", "search/", "recalibration/")
    names = [n for n in log.Tags()["scalars"] if n.removeprefix("· ").startswith(kinds)]
    return {n.removeprefix("· "): [(e.step, e.value) for e in log.Scalars(n)] for n in names}


def compared(config, folder, channel_of=None, begun=lambda *given: ()):
    """Run a configuration over sites and simulated; return what the simulation has logged."""
    with three_sites(config) as sites:
        channel = None if channel_of is None else channel_of(sites)
        words = begun(sites, config, folder / "network")
        network = over_network(sites, config, folder / "network", *words, channel=channel)
    alone = simulated(config, folder / "alone")
    assert differing(network, alone) == []
    there, here = (measured(folder / name) for name in ("network", "alone"))
    if words:  # a chart of what has changed before the run was resumed, and not since, is left out
        here.pop("recalibration/bytes_up", None)
    assert there == here
    return here


DRAWN = {"rule": built("nas.HardGumbel")}
OF_CELLS = {
    "PC-DARTS": ({"rule": built("nas.PartialChannels", part=2, alpha_from=0.5)}, {}),
    "alpha held": ({"alpha_held": True, "architecture_optimizer": MEAN}, {}),
    "GDAS": (DRAWN, {}),
    "clients step alpha": ({"architecture_state": "clients"}, {}),
    "ENAS": ({"rule": built("nas.SinglePath"), "learn": built("nas.Reward")}, {}),
    "second order": ({"learn": built("nas.Gradient", order="finite")}, {}),
    "hidden": ({}, {"federation__aggregator": built("secure.SecureMean")}),
}
OF_SIZES = {
    "sandwich": {"method": built("nas.Sandwich", num_drawn=1)},
    "shrinking": {"method": built("nas.Shrinking", order=["expansion"])},
    "budgets": {"capability": built("nas.DeviceClasses", budgets_of_classes=[0.6, 1.0])}
    | {"optimizer": SPARSE},
}
QUICK = ("PC-DARTS", "budgets")
SPACE = MobileNet(**SIZES["space"]["init_args"])
LARGEST = Networks(SPACE, 8, {"num_classes": 10, "in_channels": 1}).cost(SPACE.largest).flops


def cases(given):
    for name, options in given.items():
        marks = () if name in QUICK else pytest.mark.slow
        yield pytest.param(options, id=name, marks=marks)


@pytest.mark.parametrize("given", list(cases(OF_CELLS)))
def test_a_search_over_sites_has_the_bits_of_its_simulation(given, tmp_path):
    options, more = given
    found = compared(searching(options, **more), tmp_path)
    assert {"val/accuracy", "search/entropy"} <= found.keys()
    assert ("recalibration/bytes_up" in found) == (not more)


@pytest.mark.parametrize("options", list(cases(OF_SIZES)))
def test_networks_of_all_sizes_train_over_sites_as_in_their_simulation(options, tmp_path):
    found = compared(of_all_sizes(options, trainer__max_epochs=2), tmp_path)
    assert {"val/smallest_accuracy", "val/accuracy"} <= found.keys()


@pytest.mark.slow
def test_budgets_go_with_compression_and_without_validation(tmp_path):
    feedback = built("updates.ErrorFeedback", transforms=[built("updates.TopK", fraction=0.1)])
    compared(
        of_all_sizes(
            OF_SIZES["budgets"], federation__updates=[feedback], trainer__limit_val_batches=0
        ),
        tmp_path,
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", [searching, of_all_sizes])
def test_clients_are_evaluated_with_the_statistics_of_all(make, tmp_path):
    evaluation = built("ClientEvaluation", every_n_rounds=1)
    more = {
        "data__init_args__client_val_fraction": 0.2,
        "trainer__callbacks": [evaluation],
        "trainer__check_val_every_n_epoch": 2,  # in between alpha has other values than statistics
    }
    compared(make({}, **more), tmp_path)
    there, here = (
        next((tmp_path / name).rglob("clients_validation.csv")).read_text()
        for name in ("network", "alone")
    )
    assert there == here
    assert len(here.splitlines()) == 7


@pytest.mark.slow
def test_a_site_that_is_killed_while_it_sums_finds_the_same(tmp_path):
    def is_of_norms(order):
        return order.kind == "calibrate"

    compared(searching(), tmp_path, lambda sites: KillingAt(sites, [is_of_norms] * 2))


class Dying(Between):
    """A channel whose server is killed, as by a power cut, when it has sent the first order of a round and kind."""

    def __init__(self, sites, kind):
        super().__init__(sites)
        self._last = kind, 1

    def send(self, site, message, ttl):
        super().send(site, message, ttl)
        order = Order.from_bytes(message, limit=2**30)
        if (order.kind, order.round) == self._last:
            os._exit(9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["train", "calibrate"])
@pytest.mark.parametrize("make", [searching, of_all_sizes])
def test_a_server_that_is_killed_resumes_a_search_to_the_same_bits(make, kind, tmp_path):
    def killed(sites, config, root):
        fork, given = multiprocessing.get_context("fork"), {"channel": Dying(sites, kind)}
        server = fork.Process(target=over_network, args=[sites, config, root], kwargs=given)
        server.start()
        server.join()
        assert server.exitcode == 9
        [file] = root.rglob("last.ckpt")
        return [f"--ckpt_path={file}"]

    compared(make({}), tmp_path, begun=killed)


def of_budgets(capability, **more):
    """Return a configuration that trains networks of all sizes with budgets."""
    return of_all_sizes({"capability": capability, "optimizer": SPARSE}, **more)


def test_a_site_trains_nothing_larger_than_it_allows(tmp_path):
    table = tmp_path / "budgets.csv"
    table.write_text(
        "client,budget\n" + "".join(f"{c},{0.6 if c in CLIENTS['b'] else 1}\n" for c in range(6))
    )
    config = of_budgets(built("nas.DeviceClasses", budgets_of_classes=[1.0]))
    with three_sites(config) as sites:
        sites.kill("b")
        sites.policy = {"most_cost": {"flops": 0.6 * LARGEST}}
        sites.start("b")
        network = over_network(sites, config, tmp_path / "network")
    alone = of_budgets(built("nas.BudgetTable", path=str(table), relative=True))
    assert differing(network, simulated(alone, tmp_path / "alone")) == []
    there, here = (measured(tmp_path / name) for name in ("network", "alone"))
    assert there == here


def test_a_run_without_budgets_says_that_a_site_has_one(tmp_path):
    config = of_all_sizes({}, trainer__max_epochs=1)
    said = r"model\.capability: sites have a most_cost"
    with (
        three_sites(config, most_cost={"flops": 0.6 * LARGEST}) as sites,
        pytest.raises(ConfigurationError, match=said),
    ):
        over_network(sites, config, tmp_path)


# what a site says, and what it lets leave


def search():
    """Return a search whose cell has batch norms."""
    net = Supernet(NASBench201(), num_classes=2, in_channels=1, image_size=8, channels=2, cells=1)
    with torch.no_grad():
        net.alpha.copy_(torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0]).expand_as(net.alpha))
    return net


class Summing(Sites):
    """A channel to sites whose clients send sums over random images, changed by a test."""

    def __init__(self, module, change=lambda name, sums: sums):
        super().__init__()
        self.module, self.alter = module, change

    def send(self, site, message, ttl):
        order = Order.from_bytes(message, limit=10**7)
        examples = dict(order.options["examples"])
        told = {}
        for client in order.clients:
            images = torch.randn(examples[client], 1, 8, 8)
            for network, weights in self.module.shown.items():
                run = lambda batch, weights=weights: self.module.network(batch, weights)
                for name, sums in collect_sums(self.module.network, run, [images]).items():
                    told[f"{client}/{SUMS}{network}/{name}"] = self.alter(name, sums)
        answer = Answer(
            site=site,
            order=digest(message),
            clients=tuple(ClientAnswer(client=c, num_examples=examples[c]) for c in order.clients),
            tensors={name: sums for name, sums in told.items() if sums is not None},
        )
        self.waiting.insert(0, (site, answer.to_bytes()))


def factors(of_sums, of_squares):
    """Return factors of sums, which leave counts as they are."""
    return torch.tensor([[1.0], [of_sums], [of_squares]], dtype=torch.float64)


def summed(channel, asked, skips=False):
    clients, trainer = clients_of(channel, channel.module)
    trainer.callbacks.append(Federation(on_client_failure="skip" if skips else "raise"))
    channel.module.trainer = trainer
    with torch.no_grad():
        shown = channel.module.shown
        return list(channel.module._remote_sums(clients.sums, shown, asked))


def test_sums_come_in_the_order_of_the_clients_with_their_numbers():
    module = search()
    found = summed(Summing(module), {3: 5, 0: 7, 2: 2})
    first = [next(iter(sums.values()))[0, 0].item() for sums, _ in found]
    assert first == [5 * 64, 7 * 64, 2 * 64]
    assert [len(own) for own in found] == [len(module.shown)] * 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda sums: None, "no batch norm sums of 4 examples"),
        (lambda sums: sums[:, :1], "must be finite float64"),
        (lambda sums: sums.float(), "must be finite float64"),
        (lambda sums: sums * torch.nan, "must be finite float64"),
        (lambda sums: sums * 1000, r"numbers per channel, but square images of model\.image_size"),
        (lambda sums: sums * factors(1.0, -1.0), "have a variance below 0"),
        (lambda sums: sums * factors(1e150, 1.0), "have a variance below 0"),
        (lambda sums: sums * factors(1.0, 1e200), "have a variance below 0"),
    ],
)
def test_a_client_with_sums_of_no_examples_is_named_or_left_out(change, said):
    module = search()
    bad = list(dict(batch_norms(module.network)))[-1]
    channel = Summing(module, lambda name, sums: change(sums.double()) if name == bad else sums)
    with pytest.raises(ConfigurationError, match=f"client 1 at site b: .*{said}"):
        summed(channel, {1: 4})
    with (
        pytest.warns(UserWarning, match=f"left out: .*client 1 at site b: .*{said}"),
        pytest.raises(ConfigurationError, match="no client sent sums"),
    ):
        summed(channel, {1: 4}, skips=True)


def test_a_site_sums_only_for_a_search_and_only_if_its_metrics_may_leave():
    config = searching(trainer__max_epochs=1)
    options = {"what": "batch_norm/sums", "examples": [[0, 2]]}
    with three_sites(config, metrics=("train/*",)) as sites:
        server = LyingServer(sites)
        assert server.ask("hello", config).failure is None
        said = server.refusal("calibrate", config, options=options)
        assert "metrics of site.yaml do not allow batch_norm/sums" in said
    config = configuration(trainer__max_epochs=1)
    with three_sites(config) as sites:
        server = LyingServer(sites)
        assert server.ask("hello", config).failure is None
        assert "needs no such sums" in server.refusal("calibrate", config, options=options)
