"""A search over clients is the search over their pooled data; without clients it is the plain one."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import Checkpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from toys import LoaderData, SaveEverywhere, toy_trainer, weights

from fl_lightning import CentralDP, ConfigurationError, FederatedDataModule, Federation
from fl_lightning.core.seeds import torch_generator
from fl_lightning.core.space import Space
from fl_lightning.core.update import GlobalModel
from fl_lightning.nas import (
    BinaryGates,
    Gradient,
    HardGumbel,
    NASBench201,
    Reward,
    SinglePath,
    Softmax,
    Supernet,
)
from fl_lightning.nas.alpha_optimizer import GradientSignal, ServerSearchStep
from fl_lightning.nas.relaxation import EdgeWeights, SearchStep
from fl_lightning.nas.spaces.cells import CellNetwork, CellSpace, Row, Zero
from fl_lightning.nas.spaces.space import Decision
from fl_lightning.nas.sub_networks.evaluation import TrainingExamples, training_accuracies


@dataclass(frozen=True)
class TwoLayers(CellSpace):
    """One edge, a linear layer or its tanh on images of one pixel: a space without batch norm."""

    name: ClassVar[str] = "two_layers"
    operations: ClassVar[tuple[str, ...]] = ("linear", "tanh")
    none: ClassVar[int] = -1

    @property
    def rows(self):
        return (Row("cell", 0, 1),)

    @property
    def decisions(self):
        return (Decision("0→1", self.operations),)

    def operations_of(self, architecture):
        return architecture.choices

    def node_names(self, cell):
        return ("in", "out")

    def text(self, choices):
        return self.operations[choices[0]]

    def parse(self, text):
        return self.architecture([self.operations.index(text)])

    def derive(self, alpha, beta=None):
        return self.architecture(alpha.argmax(1).tolist())

    def network(self, make_edge, *, num_classes, in_channels=3, channels=16, cells=5, affine=True):
        candidates = (
            lambda i, o, s: nn.Conv2d(4, 4, 1),
            lambda i, o, s: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Tanh()),
        )
        edge, head = make_edge(0, candidates, 4, 4, 1), nn.Linear(4, num_classes)
        return CellNetwork({"edge": edge, "flatten": nn.Flatten(), "head": head})


pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


@pytest.fixture(autouse=True)
def _doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def vectors(num=60):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num, 4, 1, 1, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long().flatten())


def images(num=24):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(num, 1, 8, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.arange(num) % 2)


def data(dataset, num_clients, batch_size, **options):
    loader = DataLoader(dataset, batch_size=batch_size)  # a full batch in one order
    source = LoaderData(loader)
    return FederatedDataModule(
        source, num_clients=num_clients, search_fraction=0.5, seed=0, **options
    )


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def adam(params):
    return torch.optim.Adam(params, lr=0.05, betas=(0.5, 0.999), weight_decay=1e-3)


def supernet(space, rule=None, **options):
    seed_everything(0, verbose=False)
    one_pixel = isinstance(space, TwoLayers) or "TwoLayers" in str(space)
    return Supernet(
        space,
        rule,
        num_classes=2,
        in_channels=4 if one_pixel else 1,
        image_size=1 if one_pixel else 8,
        channels=4,
        cells=1,
        optimizer=sgd,
        clip_norm=1e9,
        seed=0,
        **{"architecture_optimizer": adam} | options,
    )


def fitted(module, datamodule, *callbacks, rounds=4, ckpt_path=None, **options):
    trainer = toy_trainer(*callbacks, max_epochs=rounds, **options)
    trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt_path)
    return module


def test_clients_with_one_full_batch_each_take_the_pooled_step():
    central = fitted(supernet(TwoLayers()), data(vectors(), 3, 60))
    clients = fitted(supernet(TwoLayers()), data(vectors(), 3, 60), Federation(local_steps=1))
    assert not torch.allclose(central.alpha, supernet(TwoLayers()).alpha, atol=1e-2)  # it moved
    assert torch.allclose(clients.alpha, central.alpha, atol=1e-9)
    assert torch.allclose(weights(clients), weights(central), atol=1e-9)
    fresh = supernet(TwoLayers(), architecture_state="none")  # optimizers at clients, each round
    fitted(fresh, data(vectors(), 3, 60), Federation(local_steps=1))
    assert not torch.allclose(fresh.alpha, central.alpha, atol=1e-6)


def test_three_clients_whose_mean_sign_is_wrong():
    """Gradients 0.9, -0.1, -0.1: Adam at clients goes up, the pooled step goes down."""
    step = ServerSearchStep(["alpha"], lambda p: torch.optim.Adam(p, lr=3e-4), local_lr=3e-4)
    step.place(Space({"alpha": torch.zeros(1)}), None)
    params = torch.zeros(1)
    step.open(0, GlobalModel(params, torch.empty(0)))
    aggregate = sum(3e-4 * torch.tensor([g]) for g in (0.9, -0.1, -0.1)) / 3
    params -= step.on_server(aggregate)
    step.stepped(params)
    assert params.item() == pytest.approx(-3e-4, rel=1e-6)
    ups = [torch.zeros(1, requires_grad=True) for _ in range(3)]
    for up, gradient in zip(ups, (0.9, -0.1, -0.1), strict=True):
        up.grad = torch.tensor([gradient])
        torch.optim.Adam([up], lr=3e-4).step()
    assert sum(up.item() for up in ups) / 3 == pytest.approx(1e-4, rel=1e-4)


@pytest.mark.parametrize(
    ("rule", "learn"),
    [
        (Softmax(), Gradient()),
        (Softmax(), Gradient("finite")),
        (HardGumbel(), Gradient()),
        (SinglePath(), Reward()),
    ],
    ids=["darts", "second order", "gdas", "enas"],
)
def test_one_client_is_the_central_search(rule, learn):
    """To the rounding of x - (x - y), which is how a client's y arrives; float32 sees no difference."""
    options = {"learn": learn, "same_draws": True, "architecture_state": "clients"}
    central, one = (
        fitted(supernet(NASBench201(), rule, **options), data(images(), 1, 24), *clients, rounds=2)
        for clients in ([], [Federation(local_steps=1)])
    )
    assert torch.allclose(weights(one), weights(central), rtol=0, atol=1e-13)
    assert torch.equal(one.alpha.float(), central.alpha.float())
    assert not torch.equal(one.alpha, supernet(NASBench201(), rule, **options).alpha)


@pytest.mark.parametrize("federation", [[], [1]], ids=["central", "federated"])
def test_the_numbers_of_a_round_are_of_alpha_after_it(federation):
    class Seen(Callback):
        def on_train_epoch_end(self, trainer, module):
            self.entropy = float(trainer.callback_metrics["search/entropy"])

    seen = Seen()
    callbacks = [seen, *(Federation(local_steps=steps) for steps in federation)]
    module = fitted(supernet(TwoLayers()), data(vectors(), 2, 60), *callbacks, rounds=2)
    shares = module.alpha.detach().softmax(1)
    assert seen.entropy == pytest.approx(float(-(shares * shares.log()).sum(1).mean()), abs=1e-6)


class LastHalf(Softmax):
    alpha_from = 0.5


class Starts(Callback):
    """Keeps what a module has at the start of every round, α by default."""

    def __init__(self, read=lambda module: module.alpha.detach().clone()):
        self.read, self.seen = read, []

    def on_train_epoch_start(self, trainer, module):
        self.seen.append(self.read(module))


@pytest.mark.parametrize(
    ("rule", "options", "rounds", "waits", "steps"),
    [
        (Softmax(), {"alpha_from": 0.5}, 4, 2, 1),
        (LastHalf(), {}, 4, 2, 0),
        (LastHalf(), {"alpha_from": 1.0}, 4, 3, 1),
        (BinaryGates(), {"alpha_from": 0.5}, 4, 2, 0),
        (Softmax(), {"alpha_from": 1.0}, 1, 0, 0),  # it moves in the only round of a search
    ],
)
def test_alpha_waits(rule, options, rounds, waits, steps):
    starts = Starts()
    callbacks = [starts, *(Federation(local_steps=steps) for _ in range(steps))]
    module = supernet(TwoLayers(), rule, **options)
    fitted(module, data(vectors(), 3, 60), *callbacks, rounds=rounds)
    assert all(torch.equal(alpha, starts.seen[0]) for alpha in starts.seen[: waits + 1])
    assert not torch.equal(module.alpha, starts.seen[waits])


def gradients_of_alpha(module):
    """The gradients of α that a central search takes, by step."""
    seen = []
    taken = module._alpha_gradients
    module._alpha_gradients = lambda *given: (
        seen.append(taken(*given)["alpha"]) or {"alpha": seen[-1]}
    )
    return seen


def test_alpha_moves_in_every_fifth_step():
    module = supernet(TwoLayers(), alpha_every=5)
    seen = gradients_of_alpha(module)
    fitted(module, data(vectors(), 1, 5), rounds=2)  # 30 examples for weights: six steps a round
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("rule", "options", "says"),
    [
        (Softmax(), {"alpha_draws": 2}, "alpha_draws is 2"),
        (BinaryGates(), {"alpha_draws": 2}, "alpha_draws is 2"),
        # what perturbation removes is part of a mixture
        *(
            (rule, {"selection": "perturbation", "learn": learn}, "selection perturbation removes")
            for rule, learn in [
                (HardGumbel(), None),
                (SinglePath(), Reward()),
                (Softmax(), Reward()),
            ]
        ),
    ],
)
def test_options_that_make_no_search_are_refused(rule, options, says):
    with pytest.raises(ConfigurationError, match=says):
        supernet(TwoLayers(), rule, **options)


def whole():
    """Clients' examples without a half for the search."""
    return FederatedDataModule(LoaderData(DataLoader(vectors(), batch_size=60)), num_clients=3)


NOISE = CentralDP(clip_norm=1.0, noise_multiplier=1.0)


@pytest.mark.parametrize(
    ("options", "source", "federation", "says"),
    [
        ({"alpha_every": 5}, lambda: data(vectors(), 3, 5), {"local_steps": 4}, "alpha_every is 5"),
        ({"alpha_every": 2}, lambda: data(vectors(), 1, 60), None, "in an epoch is 1: alpha would"),
        ({}, whole, {"local_steps": 1}, "search_fraction"),
        ({}, whole, None, "search_fraction"),
        # right answers of clients are counted
        (
            {"selection": "perturbation"},
            lambda: data(vectors(), 3, 60),
            {"local_steps": 1, "privacy": NOISE},
            r"right answers of model\.selection perturbation is",
        ),
    ],
)
def test_fits_that_make_no_search_are_refused(options, source, federation, says):
    callbacks = [] if federation is None else [Federation(**federation)]
    with pytest.raises(ConfigurationError, match=says):
        fitted(supernet(TwoLayers(), **options), source(), *callbacks)


def test_several_draws_are_averaged():
    """At τ → ∞ and with all operations running, the mean over draws tends to the sum over operations."""
    found = {}
    for num in (1, 400):
        rule = HardGumbel(1e6, 1e6, others="all")
        module = supernet(TwoLayers(), rule, alpha_draws=num)
        seen = gradients_of_alpha(module)
        fitted(module, data(vectors(), 1, 60), rounds=1)
        found[num] = 1e6 * seen[0]
    module = supernet(TwoLayers(), HardGumbel(1e6, 1e6, others="all"))
    datamodule = data(vectors(), 1, 60)
    datamodule.setup("fit")
    [batch] = list(datamodule.train_dataloader())
    images, labels = batch["search"]
    expected = torch.zeros(1, 2)
    for number in range(2):
        h = torch.zeros(1, 2)
        h[0, number] = 1.0
        h.requires_grad_()
        loss = cross_entropy(module.network(images, EdgeWeights(h)), labels)
        (slope,) = torch.autograd.grad(loss, h)
        expected += 0.5 * 0.5 * (slope - slope.mean())
    assert torch.allclose(found[400], expected, rtol=0.05)
    assert not torch.allclose(found[1], expected, rtol=0.05)


def test_a_warm_up_of_all_operations_is_that_of_darts():
    options = {"warm_up": "all", "alpha_from": 1.0, "alpha_held": True}
    found = {}
    for rule in (HardGumbel(), Softmax()):
        starts = Starts(lambda module: weights(module.network).clone())
        fitted(supernet(NASBench201(), rule, **options), data(images(), 1, 24), starts, rounds=3)
        found[type(rule)] = starts.seen
    gdas, darts = found.values()
    assert torch.equal(gdas[2], darts[2])  # two rounds of warm-up
    assert not torch.equal(gdas[1], gdas[2])


@pytest.mark.parametrize(("rounds", "says"), [(9, False), (30, True)])
def test_a_held_alpha_has_not_decided_if_its_gradients_are_noise(caplog, rounds, says):
    caplog.set_level("INFO")
    module = supernet(TwoLayers(), alpha_held=True)
    generator = torch.Generator().manual_seed(1)
    noise = lambda *given: {"alpha": torch.randn(1, 2, generator=generator)}
    module._alpha_gradients = noise
    fitted(module, data(vectors(), 1, 60), rounds=rounds)
    assert ("alpha has not decided: its mean gradient is" in caplog.text) == says


@pytest.mark.parametrize("steps", [0, 1], ids=["central", "federated"])
def test_held_alpha_adds_up_gradients_at_equal_weights(steps):
    """With SGD for α, α ends at its start minus the rate times the sum of gradients at α = 0."""
    callbacks = [Federation(local_steps=steps) for _ in range(steps)]
    module = supernet(TwoLayers(), alpha_held=True)
    module._architecture_optimizer = lambda p: torch.optim.SGD(p, lr=0.5)
    start = module.alpha.detach().clone()
    datamodule = data(vectors(), 1, 60)
    fitted(module, datamodule, *callbacks)
    plain = supernet(TwoLayers())
    optimizer = sgd(plain.network.parameters())
    [batch] = list(datamodule.train_dataloader())
    total, equal = torch.zeros(1, 2), EdgeWeights(torch.full((1, 2), 0.5))
    for _ in range(4):
        alpha = torch.zeros(1, 2, requires_grad=True)
        images, labels = batch["search"]
        loss = cross_entropy(plain.network(images, EdgeWeights(alpha.softmax(1))), labels)
        total += torch.autograd.grad(loss, alpha)[0]
        images, labels = batch["train"]
        optimizer.zero_grad()
        cross_entropy(plain.network(images, equal), labels).backward()
        optimizer.step()
    assert torch.allclose(module.alpha.detach(), start - 0.5 * total, rtol=0, atol=1e-12)
    assert torch.allclose(weights(module.network), weights(plain.network), rtol=0, atol=1e-12)


def test_the_signal_of_gradients_is_that_of_the_mean():
    generator = torch.Generator().manual_seed(0)
    gradients = 0.3 + torch.randn(500, 2, 3, generator=generator)
    signal = GradientSignal()
    for gradient in gradients[:200]:
        signal.add(gradient)
    resumed = GradientSignal()
    resumed.load_state_dict(signal.state_dict())
    for gradient in gradients[200:]:
        resumed.add(gradient)
    spread = gradients.var(0).sum().sqrt()
    errors = float(gradients.mean(0).norm() / (spread / 500**0.5))
    assert resumed.standard_errors == pytest.approx(errors, rel=1e-12)
    assert resumed.to_noise == pytest.approx(0.3, abs=0.03)


def test_an_undecided_alpha_is_not_announced_as_found(caplog):
    caplog.set_level("INFO")
    fitted(supernet(TwoLayers()), data(vectors(), 1, 60), rounds=1)
    assert "alpha has not decided: its entropy is 0.69" in caplog.text
    assert "architecture:" not in caplog.text
    caplog.clear()
    fitted(supernet(TwoLayers()), data(vectors(), 1, 60), rounds=30)
    assert "architecture:" in caplog.text


def test_a_search_that_had_the_steps_it_needs_is_not_told_to_take_fewer(caplog):
    """Gradients agree, and the rate is too low: not the number of steps is wrong."""
    caplog.set_level("INFO")
    slow = partial(torch.optim.SGD, lr=1e-4)
    module = supernet(TwoLayers(), architecture_optimizer=slow)
    fitted(module, data(vectors(), 1, 60), rounds=20)
    assert (3 / module.signal.to_noise) ** 2 < 20
    assert "Search longer, with a higher rate of alpha" in caplog.text


def test_perturbation_needs_no_alpha_that_decides():
    tiny = partial(torch.optim.Adam, lr=1e-6)
    for selection, is_refused in (("alpha", True), ("perturbation", False)):
        module = supernet(TwoLayers(), selection=selection, architecture_optimizer=tiny)
        refused = pytest.raises(ConfigurationError, match="alpha cannot decide in this search")
        with refused if is_refused else nullcontext():
            fitted(module, data(vectors(), 1, 60), rounds=12)


def test_a_rate_of_zero_is_refused():
    with pytest.raises(ConfigurationError, match="lr must be above 0"):
        ServerSearchStep(["alpha"], lambda p: torch.optim.Adam(p, lr=0.0), local_lr=0.0)


def taught(module):
    """Set weights by which one operation is the identity and the other forgets its input, and α the wrong way."""
    linear, forgets = module.network.edge.operations[-2:]
    with torch.no_grad():
        for bias in (linear.bias, forgets[0].bias, module.network.head.bias):
            bias.zero_()
        linear.weight.copy_(torch.eye(4)[..., None, None])
        forgets[0].weight.zero_()
        module.network.head.weight.copy_(torch.tensor([[-9.0, 0, 0, 0], [9.0, 0, 0, 0]]))
        module.alpha[:] = 0
        module.alpha[:, -1] = 1  # the wrong one is more probable
    return module


def searched(module, num_clients, *callbacks, **options):
    x, _ = vectors().tensors
    examples = TensorDataset(x, (x[:, 0] > 0).long().flatten())  # only the identity can be right
    if num_clients > 1:
        callbacks = [*callbacks, Federation(local_steps=1)]
    return fitted(module, data(examples, num_clients, 60), *callbacks, **{"rounds": 1} | options)


BY_ACCURACY = [{"learn": Reward(best_of=20)}, {"selection": "perturbation"}]


def to_teach(options):
    rule = SinglePath() if "learn" in options else Softmax()
    return taught(supernet(TwoLayers(), rule, **options))


@pytest.mark.parametrize(
    ("options", "num_clients", "devices"),
    [(BY_ACCURACY[0], 3, 1), (BY_ACCURACY[1], 1, 1), (BY_ACCURACY[1], 3, 2)],
)
def test_accuracy_selects_against_alpha(options, num_clients, devices):
    module = searched(to_teach(options), num_clients, devices=devices)
    assert module.alpha.argmax() == 1
    assert str(module.architecture) == "linear"


@pytest.mark.parametrize(("options", "num_clients"), [(BY_ACCURACY[0], 1), (BY_ACCURACY[1], 3)])
def test_accuracy_selects_when_a_killed_search_had_no_round_left(options, num_clients, tmp_path):
    searched(to_teach(options), num_clients, SaveEverywhere(tmp_path))
    saved = tmp_path / "0-end.ckpt"
    module = searched(to_teach(options), num_clients, ckpt_path=saved)
    assert module.alpha.argmax() == 1
    assert str(module.architecture) == "linear"


@pytest.mark.parametrize(("options", "num_clients"), [(BY_ACCURACY[0], 1), (BY_ACCURACY[1], 3)])
def test_the_last_checkpoint_of_a_search_has_the_choice(options, num_clients, tmp_path):
    """Else `fl-lightning test` would measure the cell of the largest α, and clients' metrics are of the choice too."""
    chosen, path = [], tmp_path / "last.ckpt"

    class Saves(Checkpoint):
        def on_train_batch_end(self, trainer, module, *_):
            chosen.append(module.chosen)

        def on_train_epoch_end(self, trainer, module):
            trainer.save_checkpoint(path)

        def on_train_end(self, trainer, module):
            chosen.append(str(module.chosen))

    saves = {"enable_checkpointing": True}
    searched(to_teach(options), num_clients, Saves(), **saves)
    module = to_teach(options)
    module.load_state_dict(torch.load(path, weights_only=False)["state_dict"])
    assert str(module.architecture) == "linear"
    searched(module, num_clients, Saves(), rounds=2, ckpt_path=path, **saves)
    assert chosen == [None, "linear", None, "linear"]  # a longer search chooses anew


class Sum(nn.Module):
    """The edges of a node, which see the same input."""

    def __init__(self, edges):
        super().__init__()
        self.edges = nn.ModuleList(edges)

    def forward(self, x):
        return sum(edge(x) for edge in self.edges)


@dataclass(frozen=True)
class Fork(TwoLayers):
    """Two edges into a node, of which a network keeps one."""

    name: ClassVar[str] = "fork"
    operations: ClassVar[tuple[str, ...]] = ("none", "linear", "tanh")
    none: ClassVar[int] = 0

    @property
    def rows(self):
        return Row("cell", 0, 2), Row("cell", 1, 2)

    @property
    def decisions(self):
        return Decision("edge", ("first", "second")), Decision("operation", self.operations[1:])

    def operations_of(self, architecture):
        edge, operation = architecture.choices
        return tuple((1 + operation) * (row == edge) for row in range(2))

    def text(self, choices):
        return f"{self.operations[1 + choices[1]]}~{choices[0]}"

    def derive(self, alpha, beta=None):
        best, operation = alpha.softmax(1)[:, 1:].max(1)
        return self.architecture([int(best.argmax()), int(operation[best.argmax()])])

    def network(self, make_edge, *, num_classes, in_channels=3, channels=16, cells=5, affine=True):
        linear = lambda i, o, s: nn.Conv2d(4, 4, 1)
        candidates = (
            lambda i, o, s: Zero(1),
            linear,
            lambda i, o, s: nn.Sequential(linear(i, o, s), nn.Tanh()),
        )
        edges = (make_edge(row, candidates, 4, 4, 1) for row in range(2))
        node = Sum(edge for edge in edges if edge is not None)
        head = nn.Linear(4, num_classes)
        return CellNetwork({"edge": node, "flatten": nn.Flatten(), "head": head})


def test_perturbation_selects_edges_where_a_space_keeps_some():
    module = supernet(Fork(), selection="perturbation")
    useless, useful = module.network.edge.edges
    module.network.edge.operations = useful.operations
    taught(module)
    del module.network.edge.operations
    with torch.no_grad():
        for operation in useless.operations.parameters():
            operation.zero_()
        module.alpha[0, 1] = 5.0  # α prefers the useless edge
    module = searched(module, 3)
    assert str(module.space.derive(module.alpha)) == "linear~0"
    assert str(module.architecture) == "linear~1"


def test_perturbation_keeps_the_edge_with_the_largest_alpha_if_none_is_missed():
    module = supernet(Fork(), selection="perturbation")
    with torch.no_grad():
        module.network.head.weight.zero_()
        module.alpha[1, 2] = 5.0
    module.network.head.requires_grad_(False)
    assert str(searched(module, 3).architecture) == "tanh~1"


def test_perturbation_keeps_what_a_plain_loop_keeps():
    """A loop over pairs of an edge and an operation; with three batches of statistics over clients."""

    class Repeats(Callback):
        def on_train_end(self, trainer, module):
            alpha, space = module.alpha.detach(), module.space
            h = module.mixed(module.point, SearchStep()).operations.detach().clone()
            order = torch.randperm(6, generator=torch_generator(0, "perturbation"))
            for row in order.tolist():
                accuracies = []
                for operation in range(5):
                    without = h.clone()
                    without[row, operation] = 0.0
                    examples = TrainingExamples.of(trainer, max_examples=None, seed=0)
                    [value] = training_accuracies(
                        trainer, module.network, [EdgeWeights(without)], examples
                    )
                    accuracies.append(value)
                tied = [o for o in range(5) if accuracies[o] == min(accuracies)]
                kept = max(tied, key=lambda o: alpha[row, o])
                h[row] = torch.eye(5)[kept]
            self.found = space.architecture(h.argmax(1).tolist())

    repeats = Repeats()
    options = {"selection": "perturbation", "recalibration_examples": None}
    module = supernet(NASBench201(), **options)
    callbacks = [Federation(local_steps=1), repeats]
    module = fitted(module, data(images(), 3, 24), *callbacks, rounds=2)
    assert module.chosen == repeats.found
    assert module.chosen != module.space.derive(module.alpha.detach())
