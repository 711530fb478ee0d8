"""What a site hides before anything leaves, and what of a run it believes: nothing that the server says."""

import sys

import numpy as np
import pytest
import torch
from flower.site_processes import configuration, over_network, three_sites

from fl_lightning import LocalDP, UniformCohort
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.update import ClientUpdate
from fl_lightning.flower.messages import Order
from fl_lightning.flower.policy import Policy, Refused
from fl_lightning.flower.site.privacy import SitePrivacy
from fl_lightning.flower.wire.failures import OrderRefused
from fl_lightning.privacy.run import AccountedRun

RUN = AccountedRun(UniformCohort(size=2), num_clients=6, num_rounds=10, seed=3)
LOCAL = LocalDP(clip_norm=2.0, noise_multiplier=4.0, secure_noise=False)


def policy(tmp_path, **options):
    given = {"name": "a", "clients": {0: 0}, "socket": tmp_path / "s", "memory": tmp_path}
    return Policy(**given | options)


def order(round_index, *clients):
    return Order(
        kind="train",
        run="a" * 32,
        configuration="b" * 64,
        round=round_index,
        clients=clients,
        counted=dict.fromkeys(clients, -1),
    )


def allowed(epsilon):
    """Refuse nothing."""


def test_clients_are_followed_in_the_rounds_of_their_cohorts_only():
    privacy = SitePrivacy(LOCAL, RUN, allowed)
    cohorts = list(RUN.cohorts(10))
    for number in (4, 7, 2):  # a server that was killed goes back
        inside = int(cohorts[number][0])
        outside = next(c for c in range(6) if c not in cohorts[number])
        privacy.check_order(order(number, inside))
        with pytest.raises(OrderRefused, match=rf"clients \[{outside}\] are asked more often"):
            privacy.check_order(order(number, inside, outside))
    with pytest.raises(OrderRefused, match="round 10 is beyond"):
        privacy.check_order(order(10, 0))


def test_a_run_that_costs_too_much_is_refused_whatever_the_server_says(tmp_path):
    cost = SitePrivacy(LOCAL, RUN, allowed).mechanism.epsilon(10)
    SitePrivacy(LOCAL, RUN, policy(tmp_path, most_epsilon=cost * 1.01).check_epsilon)
    with pytest.raises(Refused, match="the run costs"):
        SitePrivacy(LOCAL, RUN, policy(tmp_path, most_epsilon=cost * 0.99).check_epsilon)


def test_a_run_without_an_end_has_no_cost():
    endless = AccountedRun(UniformCohort(size=2), num_clients=6, num_rounds=None, seed=3)
    with pytest.raises(ConfigurationError, match=r"set trainer\.max_epochs"):
        SitePrivacy(LOCAL, endless, allowed)


def test_what_leaves_is_clipped_and_has_the_noise_of_the_client():
    privacy = SitePrivacy(LOCAL, RUN, allowed)
    bare = ClientUpdate(5, torch.full((20_000,), 3.0), torch.empty(0), 10, 1)
    noisy = privacy.noisy(bare, 0)
    spread = float(noisy.delta.double().std())
    assert spread == pytest.approx(4.0 * 2.0, rel=0.03)  # noise multiplier · clip norm
    assert float(noisy.delta.double().mean()) == pytest.approx(2.0 / np.sqrt(20_000), abs=0.3)
    assert torch.equal(noisy.delta, privacy.noisy(bare, 0).delta)  # of (seed, round, client)
    assert not torch.equal(noisy.delta, privacy.noisy(bare, 1).delta)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("log_unprotected", [False, True])
def test_no_metric_leaves_without_noise(log_unprotected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    local = {
        "class_path": "fl_lightning.LocalDP",
        "init_args": {
            "clip_norm": 0.5,
            "noise_multiplier": 3.0,
            "log_unprotected": log_unprotected,
        },
    }
    config = configuration(trainer__max_epochs=1, federation__privacy=local)
    with three_sites(config) as sites:
        channel = Listening(sites.channel())
        over_network(sites, config, tmp_path / "network", channel=channel)
    told = [
        name for answer in channel.answers for name in (b"train/loss", b"norm") if name in answer
    ]
    assert bool(told) == log_unprotected


class Listening:
    """A channel that keeps what comes from sites."""

    def __init__(self, channel):
        self._channel, self.answers = channel, []
        self.sites, self.send = channel.sites, channel.send

    def receive(self, seconds):
        came = self._channel.receive(seconds)
        self.answers += [content for _, content in came if isinstance(content, bytes)]
        return came
