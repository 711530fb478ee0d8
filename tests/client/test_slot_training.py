"""Slots against one client after the other: the same updates, whoever trains beside whom."""

import random

import numpy as np
import pytest
import torch
import toys
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from toys import ToyModule

from fl_lightning.client.local_step import PlainStep
from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.client.work import ClientWork
from fl_lightning.core.seeds import preserve_global_generators, seed_global_generators
from fl_lightning.engines.functional import CannotStack
from fl_lightning.engines.slots import results as slot_results
from fl_lightning.engines.slots.plan import pack
from fl_lightning.engines.slots.stacked_step import StackedStep
from fl_lightning.engines.slots.step_functions import StackedOptions
from fl_lightning.engines.slots.training import SlotTrainer
from fl_lightning.sparsity.optimizers.sparse_optimizers import SparseAdamW, SparseSGDM

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randint(3, (60,), generator=torch.Generator().manual_seed(2))
SIZES = [3, 17, 8, 4, 1, 12, 9]
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


def masks(params, density, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(p.shape, generator=generator) < density for p in params]


def sparse(make, density, seed=0, **options):
    """Return what makes a masked optimizer of a module's parameters."""

    def made(params):
        params = list(params)
        return make(params, masks=masks(params, density, seed), **options)

    return made


OPTIMIZERS |= {
    "sparse sgd": sparse(SparseSGDM, 0.3, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "nearly whole sgd": sparse(SparseSGDM, 0.8, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sparse adamw": sparse(SparseAdamW, 0.3, lr=0.01, weight_decay=0.1),
}


def read(indices):
    return X[indices], Y[indices]


def augmented(indices):
    """Draw from all global generators, example by example."""
    noise = [random.random() + np.random.rand() + torch.rand(4).double() for _ in indices]
    return X[indices] + torch.stack(noise), Y[indices]


def works(sizes=SIZES, batch_size=4, epochs=2):
    made = []
    for client, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(client)
        drawn = [torch.randperm(size, generator=generator) + client for _ in range(epochs)]
        sizes = [len(batch) for order in drawn for batch in order.split(batch_size)]
        made.append(ClientWork(client, size, torch.cat(drawn), sizes))
    return made


def sequential(module, make_optimizer, todo, read=read):
    collector = LogCollector()
    object.__setattr__(module, "log", collector.log)
    optimizer = make_optimizer(module.parameters())
    trainer = LocalTrainer(module, optimizer, PlainStep(module, optimizer, collector), collector)
    start = trainer.read()
    updates = []
    with preserve_global_generators():
        for work in todo:
            seed_global_generators(work.seed)
            update = trainer.train(
                start,
                client_id=work.client_id,
                num_examples=work.num_examples,
                batches=([(read(batch), len(batch))] for batch in work.batches),
            )
            updates.append(update)
    trainer.restore(start)
    return trainer, start, updates


def groups_of(trainer, start, step, todo, read=read):
    """Return the groups of updates that slots hand on."""
    at_random = read is augmented
    slots = SlotTrainer(step, trainer.space, trainer.buffers, read, 4, reads_at_random=at_random)
    with preserve_global_generators():
        return list(slots.train(start, todo))


def in_order(groups):
    return sorted((u for group in groups for u in group), key=lambda update: update.client_id)


def in_slots(module, make_optimizer, todo, num_slots=3, read=read, **options):
    trainer, start, expected = sequential(module, make_optimizer, todo, read)
    optimizer = make_optimizer(module.parameters())
    step = StackedStep(module, optimizer, True, StackedOptions(num_slots, **options))
    return in_order(groups_of(trainer, start, step, todo, read)), expected


def assert_same(updates, expected, tolerance=1e-12):
    assert [u.client_id for u in updates] == [u.client_id for u in expected]
    for ours, theirs in zip(updates, expected, strict=True):
        assert (ours.num_examples, ours.num_steps) == (theirs.num_examples, theirs.num_steps)
        torch.testing.assert_close(ours.delta, theirs.delta, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(ours.buffers, theirs.buffers, rtol=tolerance, atol=tolerance)
        assert ours.metrics.keys() == theirs.metrics.keys()
        for name, value in theirs.metrics.items():
            assert float(ours.metrics[name]) == pytest.approx(float(value), rel=1e-6)


def toy(kind=ToyModule, **options):
    return toys.toy(kind, **options).double()


def check(module, optimizer="momentum", todo=None, *args, **options):
    """See that slots give the updates that training one client after the other gives."""
    assert_same(*in_slots(module, OPTIMIZERS[optimizer], todo or works(), *args, **options))


compiled_too = pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)]
)


@pytest.mark.parametrize(
    ("optimizer", "padded"), [*((name, False) for name in OPTIMIZERS), ("sparse adamw", True)]
)
def test_unequal_clients_with_smaller_last_batches(optimizer, padded):
    check(toy(), optimizer, padded=padded)


def test_smaller_batches_of_a_loss_that_is_no_mean():
    """Each is a step on a batch of its own size, alone or with those of the same size."""

    class Summed(ToyModule):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(self.net(x), y, reduction="sum") / len(x) ** 0.5

    # of 3, 3, 0, 3, 2 and 1 examples in the last one
    check(toy(Summed), todo=works([7, 11, 8, 3, 6, 9]))
    check(toy(Summed), todo=works([3, 3, 3]))


@pytest.mark.parametrize(("num_slots", "most"), [(1, 7), (3, 4), (7, 2), (20, 1)])
def test_clients_that_end_one_by_one_are_handed_on_together(num_slots, most):
    module, make = toy(), OPTIMIZERS["momentum"]
    trainer, start, expected = sequential(module, make, works())
    step = StackedStep(module, make(module.parameters()), True, StackedOptions(num_slots))
    groups = groups_of(trainer, start, step, works())
    assert_same(in_order(groups), expected)
    assert len(groups) <= most
    assert max(len(group.client_ids) for group in groups) <= num_slots


def test_updates_of_large_models_have_the_bits_of_small_ones(monkeypatch):
    def deltas():
        found, _ = in_slots(toy(), OPTIMIZERS["momentum"], works())
        return torch.stack([update.delta for update in found])

    small = deltas()
    monkeypatch.setattr(slot_results, "_FEW_NUMBERS", 0)
    assert torch.equal(deltas(), small)


def test_a_parameter_may_be_empty():
    module = toy()
    module.nothing = torch.nn.Parameter(torch.empty(0, dtype=torch.float64))
    check(module)


def test_batch_norm():
    module = toy(batch_norm=True)
    before = module.state_dict()
    check(module, todo=works([8, 7, 12, 4, 15]))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.slow  # test_direct_slots and test_engines compile one in every run of the tests
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_compiled_step_is_the_same_step(dropout):
    check(toy(dropout=dropout), compiled=True)


class Words(ToyModule):
    """Reads texts, of which each batch is as long as its longest."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x).mean(1), y)


class Regression(ToyModule):
    """Predicts numbers, which are whole in one batch and not in the next."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return ((self.net(x)[:, 0] - y) ** 2).mean()


def words(indices):
    x, y = read(indices)
    longest = 1 + int(indices.max()) // 10
    return torch.stack([x * (1 + place) for place in range(longest)], 1), y


def numbers(indices):
    x, _ = read(indices)
    return x, indices // 20 if bool((indices >= 20).all()) else indices / 20


@compiled_too
@pytest.mark.parametrize(("kind", "read"), [(Words, words), (Regression, numbers)])
def test_batches_may_change_their_length_or_their_type(kind, read, compiled):
    orders = [torch.arange(8), torch.arange(20, 28), torch.arange(4), torch.arange(20, 32)]
    todo = [ClientWork(client, 32, torch.cat(orders), [4] * 8) for client in range(2)]
    check(toy(kind), "sgd", todo, 2, read, compiled=compiled)


@pytest.mark.parametrize(
    ("dropout", "num_slots", "read", "padded"),
    [
        *((0.5, 1, augmented, False), (0.5, 3, read, True), (0.5, 20, augmented, True)),
        *((0.5, 20, read, False), (0.5, 3, augmented, False), (0.0, 3, augmented, False)),
    ],
)
def test_dropout_and_augmentation_draw_what_they_draw_in_sequence(dropout, num_slots, read, padded):
    check(toy(dropout=dropout), "momentum", works(), num_slots, read, padded=padded)


def test_dropout_on_clients_of_one_size_and_one_step():
    for sizes in ([8, 8, 8], [3, 3]):
        check(toy(dropout=0.5), todo=works(sizes, epochs=1))


@pytest.mark.parametrize("read", [read, augmented])
def test_a_client_does_not_depend_on_its_company(read):
    todo = works()
    first, _ = in_slots(toy(dropout=0.5), OPTIMIZERS["momentum"], todo, read=read)
    second, _ = in_slots(toy(dropout=0.5), OPTIMIZERS["momentum"], [todo[3], todo[1]], read=read)
    assert torch.equal(first[1].delta, second[0].delta)
    assert torch.equal(first[3].delta, second[1].delta)


def test_draws_do_not_depend_on_who_was_there_before():
    """The last client of a first pass ends later than all of a second one, where a slot stays empty."""
    module, make = toy(dropout=0.5), OPTIMIZERS["momentum"]
    todo = works(sizes=(20, 16, 8), epochs=1)
    trainer, start, expected = sequential(module, make, todo, augmented)
    step = StackedStep(module, make(module.parameters()), True, StackedOptions(2))
    for chosen in (todo, [todo[2].head(1)], todo):
        groups = groups_of(trainer, start, step, chosen, augmented)
    assert_same(in_order(groups), expected)


def test_draws_are_the_clients_own_and_of_the_round():
    [one] = works([8])
    other, twin = one._replace(round_index=1), one._replace(client_id=7)
    deltas = [
        in_slots(toy(dropout=0.5), OPTIMIZERS["sgd"], [work])[0][0].delta
        for work in (one, other, twin)
    ]
    assert not torch.equal(deltas[0], deltas[1])
    assert not torch.equal(deltas[0], deltas[2])


@compiled_too
def test_slots_follow_a_new_mask_and_leave_frozen_entries_alone(compiled):
    # a single step is a single graph, which takes a while to compile
    module, todo = toy(), works([4, 4, 4], epochs=1) if compiled else works([8, 8, 8])
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    optimizer = sparse(SparseSGDM, 0.3, **options)(module.parameters())
    step = StackedStep(module, optimizer, True, StackedOptions(3, compiled=compiled))
    for seed in (0, 1):
        chosen = masks(list(module.parameters()), 0.3, seed)
        optimizer.set_masks(chosen)
        make = sparse(SparseSGDM, 0.3, seed, **options)
        trainer, start, expected = sequential(module, make, todo)
        updates = in_order(groups_of(trainer, start, step, todo))
        assert_same(updates, expected)
        num_active = sum(int(mask.sum()) for mask in chosen)
        for update in updates:
            assert update.delta.shape == (num_active,)
            assert update.delta.count_nonzero() > 0.9 * num_active
        for (name, param), mask in zip(module.named_parameters(), chosen, strict=True):
            assert (step.params[name][:, ~mask] == param[~mask]).all()


def test_clipping_each_client_for_itself():
    def clipped(params):
        optimizer = OPTIMIZERS["momentum"](params)

        def clip(optimizer, *_):
            params = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(params, 0.1)

        optimizer.register_step_pre_hook(clip)
        return optimizer

    updates, _ = in_slots(toy(), OPTIMIZERS["momentum"], works(), clip_norm=0.1)
    _, _, expected = sequential(toy(), clipped, works())
    assert_same(updates, expected)


def test_an_optimizer_without_a_rule():
    module = toy()
    lbfgs = torch.optim.LBFGS(module.parameters())
    with pytest.raises(CannotStack, match="LBFGS"):
        StackedStep(module, lbfgs, True, StackedOptions(2))


LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=30)
ALIKE = st.builds(lambda steps, count: [steps] * count, st.integers(1, 20), st.integers(1, 30))


@given(LENGTHS | ALIKE, st.integers(1, 8))
def test_packing_covers_every_step_once_and_ends_early(num_steps, num_slots):
    stays = pack(np.array(num_steps), num_slots)
    rows = list(zip(stays.clients, stays.slots, stays.begins, stays.ends, strict=True))
    assert sorted(stays.clients) == list(range(len(num_steps)))
    taken = [(slot, step) for _, slot, begin, end in rows for step in range(begin, end)]
    assert len(set(taken)) == len(taken) == sum(num_steps)
    assert all(end - begin == num_steps[client] for client, _, begin, end in rows)
    # Graham's bound: when the last client begins, every slot is busy
    last = max(num_steps) * (1 - 1 / num_slots)
    assert stays.num_steps == max(stays.ends) <= sum(num_steps) / num_slots + last + 1e-9
    for step in range(stays.num_steps):
        for found, steps in (
            (stays.beginning(step), stays.begins),
            (stays.ending(step), stays.ends - 1),
        ):
            in_slots = sorted((stays.slots[i], i) for i in range(len(rows)) if steps[i] == step)
            assert [i for _, i in in_slots] == found.tolist()
