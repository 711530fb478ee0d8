"""One client's round: against a plain loop, from a clean start every time, failures by name."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from toys import ToyModule, weights

from fl_lightning.client.local_step import PlainStep, loss_of
from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.core.update import ClientUpdate, GlobalModel


def batches(seed, num_batches=3, size=5):
    """Return one (batch, size) per local step, as `LocalTrainer.train` takes them."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num_batches):
        x = torch.randn(size, 4, generator=generator)
        made.append([((x, torch.randint(3, (size,), generator=generator)), size)])
    return made


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params):
    return torch.optim.Adam(params, lr=0.01)


def trainer_of(module, make_optimizer=sgd):
    """Return the trainer of a module whose `self.log` is the collector's from now on."""
    collector, optimizer = LogCollector(), make_optimizer(module.parameters())
    object.__setattr__(module, "log", collector.log)
    step = PlainStep(module, optimizer, collector)
    return LocalTrainer(module, optimizer, step, collector)


def train(trainer, start, steps, client_id=0, num_examples=1) -> ClientUpdate:
    return trainer.train(start, client_id=client_id, num_examples=num_examples, batches=steps)


def equal(one, other):
    same = torch.equal(one.delta, other.delta) and torch.equal(one.buffers, other.buffers)
    return same and one.metrics == other.metrics


def toy(**options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ToyModule(**options)


@pytest.fixture
def module():
    return toy(batch_norm=True)


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_equals_a_plain_loop(module, make_optimizer):
    plain, steps = copy.deepcopy(module), batches(1)
    trainer = trainer_of(module, make_optimizer)
    start = trainer.read()
    update = train(trainer, start, steps, client_id=4, num_examples=15)

    optimizer, losses = make_optimizer(plain.parameters()), []
    for [((x, y), _)] in steps:
        optimizer.zero_grad()
        loss = F.cross_entropy(plain.net(x), y)
        plain.net(x)  # ToyModule's second pass, for its accuracy, moves batch norm
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    end = torch.cat([p.detach().flatten() for p in plain.parameters()])
    buffers = torch.cat([b.flatten() for b in plain.buffers() if b.is_floating_point()])

    assert torch.equal(update.delta, start.params - end)
    assert torch.equal(update.buffers, buffers)
    assert (update.client_id, update.num_examples, update.num_steps) == (4, 15, 3)
    assert float(update.metrics["train/loss"]) == pytest.approx(sum(losses) / 3)
    assert set(update.metrics) == {"train/loss", "train/accuracy"}


def test_the_global_model_stays_as_it_is(module):
    trainer = trainer_of(module)
    start = trainer.read()
    before = start.params.clone(), start.buffers.clone()
    train(trainer, start, batches(1))
    assert torch.equal(start.params, before[0])
    assert torch.equal(start.buffers, before[1])


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_a_client_does_not_feel_the_one_before(module, make_optimizer):
    alone = trainer_of(copy.deepcopy(module), make_optimizer)
    shared = trainer_of(module, make_optimizer)
    start = shared.read()
    train(shared, start, batches(1, num_batches=5))
    assert equal(train(shared, start, batches(2)), train(alone, start, batches(2)))


def test_restore_brings_back_every_bit(module):
    trainer = trainer_of(module)
    start, before = trainer.read(), weights(module)
    train(trainer, start, batches(1))
    assert not torch.equal(weights(module), before)
    trainer.restore(start)
    assert torch.equal(weights(module), before)
    assert module.net[1].num_batches_tracked == 0


def test_integer_buffers_matter_to_a_cumulative_batch_norm(module):
    """With momentum None the running mean is divided by the counter of batches."""
    module.net[1].momentum = None
    trainer = trainer_of(module)
    start = trainer.read()
    first = train(trainer, start, batches(1))
    train(trainer, start, batches(2))
    assert equal(train(trainer, start, batches(1)), first)


class Halving(torch.optim.SGD):
    """SGD that halves its own learning rate at every step."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["lr"] /= 2


def test_options_that_the_optimizer_wrote_are_wound_back(module):
    trainer = trainer_of(module, lambda params: Halving(params, lr=0.4))
    start = trainer.read()
    first = train(trainer, start, batches(1))
    assert equal(train(trainer, start, batches(1)), first)


def test_a_schedule_between_rounds_is_kept(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.4)
    trainer = trainer_of(module, lambda _: optimizer)
    start = trainer.read()
    train(trainer, start, batches(1))
    optimizer.param_groups[0]["lr"] = 0.0
    trainer.start_round()
    assert not train(trainer, start, batches(1)).delta.any()


def test_frozen_parameters_are_no_part_of_the_update(module):
    module.net[0].requires_grad_(False)
    trainer = trainer_of(module)
    assert train(trainer, trainer.read(), batches(1)).delta.shape == (8 + 8 + 24 + 3,)


def test_a_half_precision_delta_is_the_clients_own_movement():
    """The start is rounded to bfloat16; that rounding is no movement of the client's."""
    module = nn.Linear(1, 1, bias=False).bfloat16()

    def step(_batches, _index):
        with torch.no_grad():
            module.weight += 0.5
        return torch.zeros(())

    trainer = LocalTrainer(module, sgd(module.parameters()), step)
    start = GlobalModel(torch.tensor([1.0 + 2**-12]), torch.empty(0))
    assert train(trainer, start, [[(None, 1)]]).delta.tolist() == [-0.5]


class TestMetrics:
    @staticmethod
    def losses_of(values, sizes):
        module, given = nn.Linear(1, 1), iter(values)

        def step(_batches, _index):
            return next(given)

        trainer = LocalTrainer(module, sgd(module.parameters()), step)
        steps = [[(None, n) for n in step_sizes] for step_sizes in sizes]
        return train(trainer, trainer.read(), steps)

    def test_the_loss_is_weighted_by_batch_size(self):
        update = self.losses_of([torch.tensor(1.0), torch.tensor(4.0)], [[1], [1, 1]])
        assert float(update.metrics["train/loss"]) == 3.0

    def test_skipped_steps_count_as_steps_without_loss(self):
        update = self.losses_of([None, torch.tensor(4.0)], [[100], [1]])
        assert (update.num_steps, float(update.metrics["train/loss"])) == (2, 4.0)
        assert self.losses_of([None], [[1]]).metrics == {}


class TestFailures:
    def test_an_exception_is_the_cause(self, module):
        trainer = trainer_of(module)
        with pytest.raises(ClientFailure, match="client 7: RuntimeError: ") as failure:
            train(trainer, trainer.read(), [[((torch.zeros(2, 5), torch.zeros(2)), 2)]], 7)
        assert failure.value.client_id == 7
        assert isinstance(failure.value.__cause__, RuntimeError)

    def test_batches_that_cannot_be_made_fail_too(self, module):
        def unreadable():
            yield from batches(1)
            raise OSError("disk full")

        trainer = trainer_of(module)
        with pytest.raises(ClientFailure, match="client 3: OSError: disk full") as failure:
            train(trainer, trainer.read(), unreadable(), client_id=3)
        assert isinstance(failure.value.__cause__, OSError)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_loss_that_is_no_number(self, value):
        with pytest.raises(ClientFailure, match=f"client 0: its training loss is {value}"):
            TestMetrics.losses_of([torch.tensor(1.0), torch.tensor(value)], [[1], [1]])

    @pytest.mark.parametrize(("which", "message"), [("weight", "update"), ("buffer", "buffers")])
    def test_values_that_are_no_numbers(self, which, message):
        module = nn.Linear(1, 1)
        module.register_buffer("buffer", torch.zeros(1))

        def step(_batches, _index):
            getattr(module, which).data.fill_(float("nan"))
            return torch.zeros(())

        trainer = LocalTrainer(module, sgd(module.parameters()), step)
        with pytest.raises(ClientFailure, match=f"its {message} hold"):
            train(trainer, trainer.read(), [[(None, 1)]])

    def test_no_step_at_all(self, module):
        trainer = trainer_of(module)
        with pytest.raises(ClientFailure, match="client 5: it took no local step"):
            train(trainer, trainer.read(), [], client_id=5)

    def test_a_mistake_in_the_settings_is_no_clients_fault(self, module):
        module.training_step = lambda batch, index: "loss"
        trainer = trainer_of(module)
        with pytest.raises(ConfigurationError, match="training_step must return a loss tensor"):
            train(trainer, trainer.read(), batches(1))

    def test_the_next_client_is_as_if_nothing_had_happened(self, module):
        trainer = trainer_of(module)
        start = trainer.read()
        first = train(trainer, start, batches(1))
        broken = [*batches(2, 2), [((torch.zeros(2, 5), torch.zeros(2)), 2)]]
        with pytest.raises(ClientFailure):
            train(trainer, start, broken)
        assert equal(train(trainer, start, batches(1)), first)


class TestPlainStep:
    def test_a_skipped_batch_moves_nothing(self, module):
        module.training_step = lambda batch, index: None
        trainer = trainer_of(module, lambda params: torch.optim.SGD(params, lr=1, weight_decay=1))
        update = train(trainer, trainer.read(), batches(1))
        assert not update.delta.any()
        assert (update.num_steps, update.metrics) == (3, {})

    def test_the_step_is_numbered(self, module):
        seen = module.seen = []  # a list of the module's, also if a closure holds it
        module.training_step = lambda batch, index: seen.append(index)
        trainer = trainer_of(module)
        for _ in range(2):
            train(trainer, trainer.read(), batches(1))
            assert seen == [0, 1, 2]  # every client sees the list of the round's start
            trainer.keeps_lists = True
        trainer.restore(trainer.read())
        trainer.show_lists()
        assert seen == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: {"loss": loss, "extra": 1}])
def test_loss_of_what_lightning_allows(wrap):
    loss = torch.tensor(2.0)
    assert loss_of(wrap(loss)) is loss
    assert loss_of(None) is None


@pytest.mark.parametrize("output", [1.0, {"extra": 1}, {"loss": 1.0}, (torch.zeros(()),)])
def test_another_output_is_refused(output):
    with pytest.raises(ConfigurationError, match=f"it returned {type(output).__name__}"):
        loss_of(output)
