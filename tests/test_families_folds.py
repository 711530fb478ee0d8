"""What every aggregator and every robust rule keeps to: order, groups, processes, checkpoints.

A rule is tested as the aggregator that a federation makes of it. Where an aggregator says that order
does not matter, all of it holds to the bit, else to rounding.
"""

import inspect
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from threading import Barrier

import pytest
import torch
from families import ROWS, made, through_a_file

from fl_lightning import ClientFailure, ConfigurationError
from fl_lightning.core.traits import Trait
from fl_lightning.core.update import ClientUpdate, GlobalModel, Updates
from fl_lightning.secure.encrypted_mean import EncryptedMean
from fl_lightning.server import Server
from fl_lightning.server.protected import Terms
from fl_lightning.server.server import as_aggregator

SIZE, CLIENTS, ROUNDS = 6, 9, 3


class Way:
    """A way to make a member's aggregator: exact, where that is an option, or not."""

    def __init__(self, cls, **options):
        self.cls, self.options = cls, options

    @cached_property
    def probe(self):
        """An aggregator that is asked, in the middle of a round."""
        aggregator = self.made()
        aggregator.open(torch.zeros(SIZE))
        return aggregator

    @property
    def restarts(self):
        """Whether each round has keys of its own, so that no two are alike to the bit."""
        return isinstance(self.probe, EncryptedMean)

    @property
    def is_sorted(self):
        """Whether it keeps rows until all are there, and so has them in one order."""
        return not (self.probe.sums() or self.restarts)

    @cached_property
    def sorts_buffers(self):
        """Whether it combines buffers itself."""
        aggregator = self.made()
        aggregator.open(torch.zeros(SIZE))
        for update in self.updates(0):
            aggregator.add(update)
        aggregator.close()
        return self.is_sorted and aggregator.buffers is not None

    @property
    def in_one_order(self):
        """What has the same bits in one order: parameters and memory, buffers."""
        return not self.restarts, True

    @property
    def in_any_order(self):
        """What has the same bits in any order: parameters and memory, buffers."""
        exact = self.probe.exact
        return exact or self.is_sorted, exact or self.sorts_buffers

    def __str__(self):
        return f"{self.cls.__name__}{'-exact' if self.options else ''}"

    def made(self, num_processes=1):
        aggregator = as_aggregator(made(self.cls, **self.options))
        if aggregator.protection is not None:
            terms = Terms(most_clients=CLIENTS, seed=5, num_processes=num_processes)
            aggregator.protection.begin(terms)
        return aggregator

    def server(self, num_processes=1):
        model = GlobalModel(torch.zeros(SIZE), torch.zeros(2))
        return Server(model, self.made(num_processes))

    @cached_property
    def whole(self):
        """A server after some rounds, to compare others with."""
        return trained(self)

    def updates(self, round_index):
        """Return a round's updates, under masks of the clients' own if those are taken."""
        random = torch.Generator().manual_seed(round_index)
        updates = []
        for client in range(CLIENTS):
            delta, active = torch.randn(SIZE, generator=random), None
            if Trait.ONE_MASK not in self.probe.traits.needs:
                active = torch.rand(SIZE, generator=random) < 0.6
                delta = delta * active
            buffers, loss = torch.rand(2, generator=random), torch.rand((), generator=random)
            steps = 1 + client % 3
            update = ClientUpdate(
                client,
                delta,
                buffers,
                num_examples=5 + 7 * client % 11,
                num_steps=steps,
                metrics={"train/loss": loss},
                active=active,
                effective_steps=float(steps),
            )
            updates.append(update)
        return updates


def ways():
    for family, cls in ROWS:
        if family == "aggregator":
            yield Way(cls)
            if "exact" in inspect.signature(cls).parameters:
                yield Way(cls, exact=True)


def assert_same(one, other, to_the_bit):
    """Compare two servers: parameters and memory, and buffers, to the bit or to rounding."""
    vectors, buffers = to_the_bit
    for found, expected, exactly in (
        (one.model.params, other.model.params, vectors),
        (one.model.buffers, other.model.buffers, buffers),
        (memory_of(one), memory_of(other), vectors),
    ):
        tolerance = {"rtol": 0, "atol": 0} if exactly else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(found, expected, **tolerance)
    assert float(one.model.params.norm()) > 0


def memory_of(server):
    return dict(server.state_dict().get("memory", {}))


every_way = pytest.mark.parametrize("way", list(ways()), ids=str)


def steps(way, arrange=lambda updates: updates):
    """Return what a server does in some rounds of updates, which are arranged in some way."""
    done = []
    for index in range(ROUNDS):
        updates = arrange(way.updates(index))
        done.append(partial(Server.open_round, round_index=index))
        done += [partial(Server.receive, updates=update) for update in updates]
        done.append(Server.close_round)
    return done


def trained(way, arrange=lambda updates: updates):
    server = way.server()
    for step in steps(way, arrange):
        step(server)
    return server


def group_of(updates):
    return Updates(
        [update.client_id for update in updates],
        torch.stack([update.delta for update in updates]),
        torch.stack([update.buffers for update in updates]),
        [update.num_examples for update in updates],
        [update.num_steps for update in updates],
        {"train/loss": torch.stack([update.metrics["train/loss"] for update in updates])},
        effective_steps=[update.effective_steps for update in updates],
        active=[update.active for update in updates],
    )


@every_way
def test_the_order_of_updates_does_not_matter(way):
    shuffled = trained(way, lambda updates: [*updates[5:], *updates[4::-1]])
    assert_same(way.whole, shuffled, way.in_any_order)


@every_way
def test_a_group_is_its_members_one_by_one(way):
    grouped = trained(way, lambda updates: [group_of(updates[:4]), group_of(updates[4:])])
    assert_same(way.whole, grouped, way.in_one_order)


@every_way
def test_updates_stay_as_they_are(way):
    given = way.updates(0)
    trained(way, lambda _: given)  # in every round
    for update, before in zip(given, way.updates(0), strict=True):
        assert torch.equal(update.delta, before.delta)
        assert torch.equal(update.buffers, before.buffers)
        assert update.metrics == before.metrics


@every_way
def test_it_says_what_it_reads(way):
    """Losses and steps: without them it is as before, or refuses."""
    reads = {
        "metrics": Trait.PRIVATE_EXAMPLES in way.probe.traits.breaks,
        "effective_steps": way.probe.needs_effective_steps,
    }
    nothing = {"metrics": {}, "effective_steps": None}
    for name, is_read in reads.items():

        def without(updates, name=name):
            return [replace(update, **{name: nothing[name]}) for update in updates]

        if is_read:
            with pytest.raises((ConfigurationError, ClientFailure), match="client 0"):
                trained(way, without)
        else:
            assert_same(way.whole, trained(way, without), way.in_one_order)


@every_way
def test_what_it_remembers_changes_between_rounds_alone(way):
    server, before = way.server(), {}
    for step in steps(way):
        step(server)
        if server.is_open:
            torch.testing.assert_close(memory_of(server), before, rtol=0, atol=0)
        before = {name: value.clone() for name, value in memory_of(server).items()}


class Pair:
    """Two threads that exchange as two processes do."""

    def __init__(self):
        self._barrier, self._given = Barrier(2, timeout=60), [None, None]
        self.num_sums = 0

    def gather(self, rank, thing):
        self._given[rank] = thing
        self._barrier.wait()
        everyones = list(self._given)
        self._barrier.wait()
        return everyones

    def all_reduce(self, rank, tensor):
        self.num_sums += rank == 0
        one, other = self.gather(rank, tensor.clone())
        tensor.copy_(one + other)

    def train(self, way, rank):
        """Return a process's server, which gets every other update."""
        server = way.server(num_processes=2)
        for index in range(ROUNDS):
            server.open_round(index)
            for update in way.updates(index)[rank::2]:
                server.receive(update)
            server.reduce(lambda t: self.all_reduce(rank, t), lambda x: self.gather(rank, x))
            server.close_round()
        return server


@every_way
def test_two_processes_give_what_one_gives(way):
    if way.restarts:  # its keys are in one process
        with pytest.raises(ConfigurationError, match=r"set trainer\.devices to 1"):
            way.server(num_processes=2)
        return
    alone, pair = way.whole, Pair()
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(lambda rank: pair.train(way, rank), range(2))
    assert_same(one, other, (True, True))
    if not way.is_sorted:  # few collectives: the dtypes of sums travel together
        assert pair.num_sums <= 2 * ROUNDS
    assert_same(alone, one, way.in_any_order)


@pytest.mark.parametrize("cut", [1, 5, CLIENTS + 1, CLIENTS + 2])
@every_way
def test_it_goes_on_from_a_checkpoint(way, cut):
    """From the second round: opened, with four of its updates, with all of them, closed."""
    first, second = way.server(), way.server()
    todo, begin, is_open = steps(way), CLIENTS + 2, cut < CLIENTS + 2
    for step in todo[: begin + cut]:
        step(first)
    second.replace_model(first.model)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert not second.is_open  # such a round begins anew
    for step in todo[begin if is_open else begin + cut :]:
        step(second)
    assert_same(way.whole, second, way.in_one_order)
