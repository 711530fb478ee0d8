"""One client's round: against a plain loop, from a clean start every time, failures by name."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from toys import toy, weights

from fl_lightning.client.local_step import PlainStep, loss_of
from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.core.update import GlobalModel

UNREADABLE = [((torch.zeros(2, 5), torch.zeros(2)), 2)]


def batches(seed, num_batches=3, size=5):
    """Return one (batch, size) per local step, as `LocalTrainer.train` takes them."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num_batches):
        x = torch.randn(size, 4, generator=generator)
        made.append([((x, torch.randint(3, (size,), generator=generator)), size)])
    return made


class Halving(torch.optim.SGD):
    """SGD that halves its own learning rate at every step."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["lr"] /= 2


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "one that writes to its options": lambda params: Halving(params, lr=0.4),
    "decay alone": lambda params: torch.optim.SGD(params, lr=1, weight_decay=1),
}


def trainer_of(module, optimizer="sgd", step=None):
    """Return the trainer of a module whose `self.log` is the collector's from now on."""
    collector, make = LogCollector(), OPTIMIZERS.get(optimizer, optimizer)
    made = make(module.parameters())
    object.__setattr__(module, "log", collector.log)
    return LocalTrainer(module, made, step or PlainStep(module, made, collector), collector)


def train(trainer, start, steps, client_id=0, num_examples=1):
    return trainer.train(start, client_id=client_id, num_examples=num_examples, batches=steps)


def stepped(step, sizes, module=None):
    """Return the update of a client whose steps are given: numbers of examples, a list per step."""
    trainer = trainer_of(module or nn.Linear(1, 1), step=lambda batches, index: step())
    return train(trainer, trainer.read(), [[(None, n) for n in some] for some in sizes])


def equal(one, other):
    same = torch.equal(one.delta, other.delta) and torch.equal(one.buffers, other.buffers)
    return same and one.metrics == other.metrics


@pytest.fixture
def module():
    return toy(batch_norm=True)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_equals_a_plain_loop(module, optimizer):
    plain, steps = copy.deepcopy(module), batches(1)
    trainer = trainer_of(module, optimizer)
    start = trainer.read()
    before = start.params.clone(), start.buffers.clone()
    update = train(trainer, start, steps, client_id=4, num_examples=15)
    assert torch.equal(start.params, before[0])
    assert torch.equal(start.buffers, before[1])

    optimizer, losses = OPTIMIZERS[optimizer](plain.parameters()), []
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


@pytest.mark.parametrize(
    ("optimizer", "momentum", "fails"),
    [
        ("sgd", 0.1, False),
        ("adam", 0.1, False),
        ("one that writes to its options", 0.1, False),
        ("sgd", None, False),  # the running mean is divided by the counter of batches, an integer
        ("sgd", 0.1, True),
    ],
)
def test_a_client_does_not_feel_the_one_before(module, optimizer, momentum, fails):
    module.net[1].momentum = momentum
    trainer, before = trainer_of(module, optimizer), weights(module)
    start = trainer.read()
    first = train(trainer, start, batches(1))
    with pytest.raises(ClientFailure) if fails else nullcontext():
        train(trainer, start, [*batches(2, 5), *([UNREADABLE] if fails else [])])
    assert equal(train(trainer, start, batches(1)), first)
    assert not torch.equal(weights(module), before)
    trainer.restore(start)  # every bit
    assert torch.equal(weights(module), before)
    assert module.net[1].num_batches_tracked == 0


def test_a_schedule_between_rounds_is_kept(module):
    optimizer = OPTIMIZERS["sgd"](module.parameters())
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

    start = GlobalModel(torch.tensor([1.0 + 2**-12]), torch.empty(0))
    assert train(trainer_of(module, step=step), start, [[(None, 1)]]).delta.tolist() == [-0.5]


@pytest.mark.parametrize(
    ("losses", "sizes", "mean"),
    [
        ([1.0, 4.0], [[1], [1, 1]], 3.0),  # weighted by batch size
        ([None, 4.0], [[100], [1]], 4.0),  # a step that was skipped is one without loss
        ([None], [[1]], None),
    ],
)
def test_the_loss_is_the_mean_over_examples(losses, sizes, mean):
    left = [None if loss is None else torch.tensor(loss) for loss in losses]
    update = stepped(lambda: left.pop(0), sizes)
    assert update.num_steps == len(losses)
    assert update.metrics == ({} if mean is None else {"train/loss": torch.tensor(mean)})


def unreadable():
    yield from batches(1)
    raise OSError("disk full")


@pytest.mark.parametrize(
    ("steps", "cause", "says"),
    [
        ([UNREADABLE], RuntimeError, "client 7: RuntimeError: "),
        (unreadable(), OSError, "client 7: OSError: disk full"),
        ([], type(None), "client 7: it took no local step"),
    ],
)
def test_a_failure_names_the_client_and_its_cause(module, steps, cause, says):
    trainer = trainer_of(module)
    with pytest.raises(ClientFailure, match=says) as failure:
        train(trainer, trainer.read(), steps, client_id=7)
    assert failure.value.client_id == 7
    assert isinstance(failure.value.__cause__, cause)


@pytest.mark.parametrize(
    ("which", "loss", "says"),
    [
        (None, torch.nan, "client 0: its training loss is nan"),
        (None, torch.inf, "client 0: its training loss is inf"),
        ("weight", 0.0, "its update hold"),
        ("buffer", 0.0, "its buffers hold"),
    ],
)
def test_values_that_are_no_numbers(which, loss, says):
    module = nn.Linear(1, 1)
    module.register_buffer("buffer", torch.zeros(1))

    def step():
        if which:
            getattr(module, which).data.fill_(torch.nan)
        return torch.tensor(loss)

    with pytest.raises(ClientFailure, match=says):
        stepped(step, [[1]], module)


def test_a_skipped_batch_moves_nothing(module):
    module.training_step = lambda batch, index: None
    trainer = trainer_of(module, "decay alone")
    update = train(trainer, trainer.read(), batches(1))
    assert not update.delta.any()
    assert (update.num_steps, update.metrics) == (3, {})


def test_the_step_is_numbered(module):
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


@pytest.mark.parametrize("output", [1.0, {"extra": 1}, {"loss": 1.0}, (torch.zeros(()),), "loss"])
def test_another_output_is_refused_and_no_clients_fault(output, module):
    module.training_step = lambda batch, index: output
    trainer = trainer_of(module)
    with pytest.raises(
        ConfigurationError, match=f"return a loss .*returned {type(output).__name__}"
    ):
        train(trainer, trainer.read(), batches(1))
