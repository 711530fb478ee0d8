"""What a site hides before anything leaves, and what of a run it believes: nothing that the server says."""

import json
import time
from dataclasses import replace
from datetime import date, timedelta

import numpy as np
import pytest
import torch
from flower.site_processes import Between, LyingServer, configuration, over_network, three_sites

from fl_lightning import LocalDP, UniformCohort
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.update import ClientUpdate
from fl_lightning.flower.messages import Order, OrderRefused
from fl_lightning.flower.policy import Refused
from fl_lightning.flower.site.ledger import Ledger, PrivacyBudget
from fl_lightning.flower.site.order_queue import OrderQueue, OrderResult, OutOfTime
from fl_lightning.flower.site.privacy import SitePrivacy
from fl_lightning.privacy.accounting.gaussian import composed_epsilon
from fl_lightning.privacy.mechanism import AccountedRun

RUN = AccountedRun(UniformCohort(size=2), num_clients=6, num_rounds=10, seed=3)
LOCAL = LocalDP(clip_norm=2.0, noise_multiplier=4.0, secure_noise=False)


def order(round_index, *clients):
    return Order(
        kind="train",
        run="a" * 32,
        configuration="b" * 64,
        round=round_index,
        clients=clients,
        counted=dict.fromkeys(clients, -1),
    )


def account(tmp_path, run="a" * 32, **budget):
    budget = PrivacyBudget(**budget) if budget else None
    return Ledger(tmp_path / "privacy.json", budget, run, "b" * 64)


def private(tmp_path, privacy=LOCAL, **options):
    return SitePrivacy(privacy, RUN, account(tmp_path), range(6), **options)


def test_clients_are_followed_in_the_rounds_of_their_cohorts_only(tmp_path):
    privacy = private(tmp_path)
    cohorts = list(RUN.cohorts(10))
    for number in (4, 7, 2):  # a server that was killed goes back
        inside = int(cohorts[number][0])
        outside = next(c for c in range(6) if c not in cohorts[number])
        privacy.check_order(order(number, inside))
        with pytest.raises(OrderRefused, match=rf"clients \[{outside}\] are not in the cohort"):
            privacy.check_order(order(number, inside, outside))
    with pytest.raises(OrderRefused, match="round 10 is beyond"):
        privacy.check_order(order(10, 0))


def test_a_run_that_costs_too_much_is_refused_whatever_the_server_says(tmp_path):
    cost = private(tmp_path).mechanism.epsilon(10)
    SitePrivacy(LOCAL, RUN, account(tmp_path, epsilon=cost * 1.01), range(6))
    with pytest.raises(Refused, match="would have spent"):
        SitePrivacy(LOCAL, RUN, account(tmp_path, epsilon=cost * 0.99), range(6))
    endless = replace(RUN, num_rounds=None)
    with pytest.raises(ConfigurationError, match=r"set trainer\.max_epochs"):
        SitePrivacy(LOCAL, endless, account(tmp_path), range(6))
    with pytest.raises(Refused, match="would have spent"):  # the run's own δ counts for nothing
        SitePrivacy(
            replace(LOCAL, delta=0.9), RUN, account(tmp_path, epsilon=cost * 0.99), range(6)
        )


def test_what_leaves_is_clipped_and_has_the_noise_of_the_client(tmp_path):
    privacy = private(tmp_path, secure=False)
    bare = ClientUpdate(5, torch.full((20_000,), 3.0), torch.empty(0), 10, 1)
    noisy = privacy.noisy(bare, 0)
    spread = float(noisy.delta.double().std())
    assert spread == pytest.approx(4.0 * 2.0, rel=0.03)  # noise multiplier · clip norm
    assert float(noisy.delta.double().mean()) == pytest.approx(2.0 / np.sqrt(20_000), abs=0.3)
    assert torch.equal(noisy.delta, privacy.noisy(bare, 0).delta)  # of (seed, round, client)
    assert not torch.equal(noisy.delta, privacy.noisy(bare, 1).delta)


def test_who_knows_the_seed_cannot_take_the_noise_off(tmp_path):
    """The attack: remake what a seed gives, and subtract it. It left the update itself, cosine 1.0."""
    direction = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    bare = ClientUpdate(5, direction, torch.empty(0), 10, 1)
    nothing = ClientUpdate(5, torch.zeros(20_000), torch.empty(0), 10, 1)

    def cosine(privacy):
        remade = private(tmp_path, secure=False).noisy(nothing, 0).delta
        found = privacy.noisy(bare, 0).delta - remade
        return float(torch.cosine_similarity(found, direction, dim=0))

    assert cosine(private(tmp_path, secure=False)) == pytest.approx(1.0, abs=1e-3)
    assert abs(cosine(private(tmp_path))) < 0.05  # LOCAL says secure_noise: false


SPENT = 1.0  # the budget; a run of ten rounds costs 0.82 of it
FIRM = replace(LOCAL, noise_multiplier=21.5)


def spend(tmp_path, run, **budget):
    """Plan a run of ten rounds, and make all its releases; return ε of client 0 after them."""
    paid = account(tmp_path, run=run, **budget)
    privacy = SitePrivacy(FIRM, RUN, paid, range(6))
    for number, cohort in enumerate(RUN.cohorts(10)):
        privacy.check_order(order(number, *map(int, cohort)))
        privacy.charge(map(int, cohort))
    return paid.spent()


def test_runs_are_paid_from_one_budget_also_after_a_kill(tmp_path):
    """200 runs of 0.82 each were followed at a most_epsilon of 1."""
    cost = spend(tmp_path, "1" * 32, epsilon=SPENT)
    assert 0.5 < cost < SPENT
    for number in range(2, 200, 50):  # each a new process, which finds the file
        with pytest.raises(Refused, match=r"would have spent .*, \d\S* of it in other runs"):
            spend(tmp_path, f"{number:032}", epsilon=SPENT)
    assert spend(tmp_path, "9" * 32, epsilon=10.0) == pytest.approx(
        composed_epsilon({private(tmp_path, FIRM).cost: 2 * RUN.most_turns(10)}, 1e-5)
    )


def test_a_run_goes_on_with_what_it_has_planned(tmp_path):
    cost = private(tmp_path, FIRM).mechanism.epsilon(10)
    spend(tmp_path, "1" * 32, epsilon=cost * 1.001)
    again = account(tmp_path, run="1" * 32, epsilon=cost * 1.001)
    resumed = SitePrivacy(FIRM, RUN, again, range(6))  # what is planned is paid already
    with pytest.raises(Refused, match="would have spent"):  # a second answer to its last round
        resumed.check_order(order(9, *map(int, list(RUN.cohorts(10))[9])))


def test_a_budget_per_year_comes_back(tmp_path):
    spend(tmp_path, "1" * 32, epsilon=SPENT, per="year")
    file = tmp_path / "privacy.json"
    told = file.read_text()

    def days_later(days):
        then = (date.today() - timedelta(days=days)).isoformat()
        file.write_text(told.replace(date.today().isoformat(), then))

    days_later(365)
    with pytest.raises(Refused, match="per: year"):
        spend(tmp_path, "2" * 32, epsilon=SPENT, per="year")
    days_later(366)
    assert spend(tmp_path, "2" * 32, epsilon=SPENT, per="year") < SPENT
    for content in ("", "{}", '{"entries": [{}]}', '{"entries": 3}'):  # is no empty one
        file.write_text(content)
        with pytest.raises(Refused, match="restore it from a copy"):
            SitePrivacy(FIRM, RUN, account(tmp_path, epsilon=SPENT), range(6))


def of(name, **options):
    return {"class_path": f"fl_lightning.{name}", "init_args": options}


LOUD = of("LocalDP", clip_norm=0.5, noise_multiplier=0.1, epsilon=0.5, secure_noise=False)
UNPAID = {
    "training would show": {},
    "CentralDP would show": {
        "federation__privacy": of("CentralDP", clip_norm=0.5, noise_multiplier=9.0)
    },
    "use the aggregator SecureMean": {
        "federation__privacy": of("DistributedDP", clip_norm=0.5, noise_multiplier=99.0)
    },
    "would have spent": {"federation__privacy": LOUD},
}


def audit_of(sites):
    """Return the lines of the sites' audit log."""
    return [json.loads(line) for line in (sites.folder / "audit.jsonl").read_text().splitlines()]


HEAVY = {
    "batches of federation.local_epochs or local_steps is": {"federation__local_epochs": 10**9},
    "local_epochs or local_steps is 1e+07": {
        "federation__local_epochs": None,
        "federation__local_steps": 10,
        "trainer__accumulate_grad_batches": 10**6,
    },
    "too many parameters": {"model__init_args__network_kwargs__embed_dim": 10**6},
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_site_counts_itself_what_an_order_costs_and_does_no_more_work_than_it_allows():
    """The server says that its orders cost 0.5, with a configuration that costs more, or everything."""
    mean = {"federation__aggregator": of("Mean", weight_by_examples=False)}
    policy = {"most_epsilon": PrivacyBudget(epsilon=1.0)}
    policy |= {"most_steps": 1_000_000, "most_parameters": 10**7}
    with three_sites(configuration(), {"a": (0, 1)}, **policy) as sites:
        for said, options in HEAVY.items():
            assert said in LyingServer(sites).refusal("hello", configuration(**options))
        for said, options in UNPAID.items():
            config, server = configuration(**mean, **options), LyingServer(sites)
            assert server.ask("hello", config).failure is None
            if not options:
                refused = server.refusal("evaluate", config, options={"mask": ""})
                assert "an evaluation of clients would show" in refused
            refused = server.refusal("train", config, options={"epsilon": 0.5, "mask": ""})
            assert said in refused
            line = audit_of(sites)[-1]
            assert said in line.pop("refusal")
            line = {k: line[k] for k in line.keys() - {"time", "order", "seconds", "failure"}}
            assert min(line.pop("bytes_in"), line.pop("bytes_out")) > 100
            assert line == {
                "site": "a",
                "kind": "train",
                "run": server.run,
                "round": 0,
                "clients": [0],
                "epsilon_spent": 0.0,
                "epsilon_left": 1.0,
            }


def test_an_order_that_takes_too_long_ends_as_refused():
    queue = OrderQueue(most_minutes=0.2 / 60)
    queue.start_clock()
    with pytest.raises(OutOfTime, match="longer than most_minutes") as late:
        time.sleep(30)
    queue.fail(late.value)
    with pytest.raises(Refused, match="longer than most_minutes"):
        queue.ask(None)
    queue.start_clock()
    queue.answer(OrderResult())
    time.sleep(0.4)  # nobody is late any more


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("log_unprotected", [False, True])
@pytest.mark.usefixtures("in_an_empty_folder")
def test_no_metric_leaves_without_noise_unless_the_site_says_so(log_unprotected, tmp_path):
    local = {
        "class_path": "fl_lightning.LocalDP",
        "init_args": {
            "clip_norm": 0.5,
            "noise_multiplier": 3.0,
            "log_unprotected": not log_unprotected,  # the server's wish counts for nothing
        },
    }
    config = configuration(trainer__max_epochs=1, federation__privacy=local)
    with three_sites(config, log_unprotected=log_unprotected) as sites:
        channel = Listening(sites)
        over_network(sites, config, tmp_path / "network", channel=channel)
        lines = audit_of(sites)
    trained = [line for line in lines if line["kind"] == "train"]
    assert all(("train/loss" in line["metrics"]) == log_unprotected for line in trained)
    assert all(line["epsilon_spent"] > 0 and line["epsilon_left"] is None for line in trained)
    told = [
        name for answer in channel.answers for name in (b"train/loss", b"norm") if name in answer
    ]
    assert bool(told) == log_unprotected


class Listening(Between):
    """A channel that keeps what comes from sites."""

    def __init__(self, sites):
        super().__init__(sites)
        self.answers = []

    def receive(self, seconds):
        came = self._channel.receive(seconds)
        self.answers += [content for _, content in came]
        return came
