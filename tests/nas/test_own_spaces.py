"""Spaces of modules of one's own: the shared network runs each architecture as its own network would."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import seed_everything
from nas.test_supernet import TwoLayers, data, images, sgd, supernet, vectors
from readme import ROOT
from torch import nn
from toys import SHORT_FIT, toy_trainer

from fl_lightning import ConfigurationError, Federation
from fl_lightning.cli import main
from fl_lightning.nas import (
    BinaryGates,
    ElasticBatchNorm2d,
    ElasticConv2d,
    ElasticDepthwise,
    ElasticLinear,
    HardGumbel,
    InputChoice,
    LayerChoice,
    LayerSpace,
    ModuleSpace,
    Network,
    OneShot,
    PartialChannels,
    RandomPath,
    Repeat,
    Reward,
    Sandwich,
    SinglePath,
    Softmax,
    Supernet,
    ValueChoice,
)
from fl_lightning.nas.cost.count import count
from fl_lightning.nas.relaxation import SearchStep
from fl_lightning.nas.search.problem import Constraint, Problem
from fl_lightning.nas.search.strategies import Evolution
from fl_lightning.nas.spaces.named import described_space, description

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


class Block(nn.Module):
    def __init__(self, width, number):
        super().__init__()
        kernel = ValueChoice([3, 5], label=f"block {number} kernel")
        self.conv, self.norm = ElasticDepthwise(width, kernel), ElasticBatchNorm2d(width)

    def forward(self, x):
        return x + self.norm(self.conv(x)).relu()


class Sized(nn.Module):
    """Every kind of choice; the width is half of another and stands in several layers."""

    def __init__(self, num_classes, in_channels):
        super().__init__()
        width = ValueChoice([4, 8], label="width")
        self.stem = ElasticConv2d(in_channels, width, 3, padding=1)
        self.blocks = Repeat(
            (Block(width, n) for n in range(9)), ValueChoice([1, 3], label="depth")
        )
        self.body = LayerChoice(
            {"conv": lambda: ElasticConv2d(width, width * 2, 1), "twice": lambda: Twice()},
            label="body",
        )
        self.input = InputChoice(2, label="input")
        self.head = ElasticLinear(width * 2, num_classes)

    def forward(self, x):
        x = self.body(self.blocks(self.stem(x)))
        return self.head(self.input([x.mean((2, 3)), x.amax((2, 3))]))


class Twice(nn.Module):
    def forward(self, x):
        return torch.cat([x, -x], 1)


class Layers(nn.Module):
    """Of two and of three layers, on images of one channel."""

    def __init__(self, num_classes, in_channels, channels):
        super().__init__()
        self.first = LayerChoice(
            {"3": lambda: nn.Conv2d(in_channels, channels, 3, padding=1),
             "1": lambda: nn.Conv2d(in_channels, channels, 1)}, label="first"
        )  # fmt: skip
        self.second = LayerChoice(
            {
                "skip": nn.Identity,
                "tanh": nn.Tanh,
                "conv": lambda: nn.Conv2d(channels, channels, 1),
            },
            label="second",
        )
        self.last = InputChoice(2, label="last")
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x):
        x = self.first(x)
        return self.head(self.last([x, self.second(x)]).mean((2, 3)))


class TwoLayersOwn(nn.Module):
    """`TwoLayers`, as somebody writes it."""

    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.edge = LayerChoice(
            {"linear": lambda: nn.Conv2d(4, 4, 1),
             "tanh": lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Tanh())}, label="edge"
        )  # fmt: skip
        self.head = nn.Linear(4, num_classes)

    def forward(self, x):
        return self.head(self.edge(x).flatten(1))


@pytest.fixture
def _doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


SIZED = ModuleSpace(Sized)
LAYERS = LayerSpace(Layers)


def test_every_architecture_of_the_shared_network_is_its_own_network():
    torch.manual_seed(0)
    network = SIZED.supernet(num_classes=3, in_channels=2).double()
    x = torch.randn(4, 2, 9, 9, dtype=torch.float64)
    every = list(SIZED.enumerate())
    assert len(every) == 2 * 2 * 2 * (2 + 2**3)  # kernels of blocks that do not run have no effect
    for architecture in every:
        plain = SIZED.extract(network, architecture)
        torch.testing.assert_close(network(x, architecture), plain(x), rtol=1e-12, atol=1e-12)
        held = sum(int(mask.sum()) for n, mask in SIZED.held(network, architecture).items()
                   if "conv.weight" not in n and "matrices" not in n)  # fmt: skip
        assert held == sum(p.numel() for n, p in plain.named_parameters() if "conv.weight" not in n)
        shape = {"in_channels": 2, "num_classes": 3}
        counted = count(SIZED.build(architecture, **shape), torch.zeros(1, 2, 9, 9))
        assert SIZED.cost(architecture, side=9, **shape) == counted
        assert SIZED.parse(str(architecture)) == architecture
    assert torch.equal(network(x), network(x, SIZED.largest))


def test_a_space_is_written_and_read():
    assert str(SIZED.smallest) == (
        "width=4|depth=1|block 0 kernel=3|block 1 kernel=3|block 2 kernel=3|body=conv|input=input 0"
    )
    for space in (SIZED, LAYERS):
        again = described_space(description(space))
        assert again.decisions == space.decisions
    with pytest.raises(
        ConfigurationError, match="character 7 is '5'; expected the option of width: 4, 8"
    ):
        SIZED.parse("width=5|depth=1")


def test_a_search_keeps_to_constraints_over_a_space_of_ones_own():
    costs = lambda one: {"params": SIZED.cost(one, side=8).params}
    limit = SIZED.cost(SIZED.largest, side=8).params / 2
    constraint = Constraint.parse(f"params<={limit}", ["params"])
    problem = Problem(SIZED, lambda one: costs(one)["params"], costs, (constraint,))
    best = Evolution(population=8).search(problem, budget=40).best
    every = [costs(one)["params"] for one in SIZED.enumerate()]
    assert best.score == max(number for number in every if number <= limit)


@pytest.mark.usefixtures("_doubles")
@pytest.mark.parametrize("rule", [HardGumbel(), BinaryGates()], ids=lambda r: type(r).__name__)
def test_a_space_of_ones_own_trains_as_the_built_in_one_bit_for_bit(rule):
    def trained(space):
        module = supernet(space, rule, same_draws=True)
        trainer = toy_trainer(Federation(local_steps=2), max_epochs=2)
        trainer.fit(module, datamodule=data(vectors(), 3, 10))
        return [p.detach() for p in module.parameters()]

    ours, own = trained(TwoLayers()), trained(LayerSpace(TwoLayersOwn))
    assert all(torch.equal(*pair) for pair in zip(ours, own, strict=True))


@pytest.mark.usefixtures("_doubles")
@pytest.mark.parametrize(
    ("rule", "learn", "federated"),
    [
        (Softmax(), None, True),
        (HardGumbel(), None, False),
        (BinaryGates(), None, True),
        (SinglePath(), Reward(), False),
    ],
    ids=lambda part: type(part).__name__,
)
def test_layers_are_searched_by_every_rule(rule, learn, federated):
    seed_everything(0, verbose=False)
    shape = {"num_classes": 2, "in_channels": 1, "image_size": 8, "channels": 4}
    module = Supernet(LAYERS, rule, learn=learn, optimizer=sgd, architecture_optimizer=sgd, **shape)
    start = module.alpha.detach().clone()
    callbacks = [Federation(local_steps=2)] if federated else []
    trainer = toy_trainer(*callbacks, max_epochs=1)
    trainer.fit(module, datamodule=data(images(), 3 if federated else 1, 4))
    moved = module.alpha.detach() != start
    assert moved[1].any() or learn  # the first reward is its own baseline
    assert not moved[0, 2]  # there are two layers to choose from, and three in another row
    assert not moved[2, 2]
    built = Network(LAYERS, str(module.architecture), num_classes=2, in_channels=1, channels=4)
    counted = module.costs["params"].of(module.architecture.choices)
    assert sum(p.numel() for p in built.parameters()) == counted


def test_a_mixture_is_weighted_by_the_softmax_over_the_layers_that_there_are():
    module = Supernet(LAYERS, num_classes=2, in_channels=1, channels=4, seed=0)
    x = torch.randn(2, 1, 8, 8)
    mixed = module.network(x, module.mixed(module.alphas, SearchStep()))
    parts = [
        module.shares[0, a] * module.shares[1, b] * module.shares[2, c]
        for a, b, c in ((a, b, c) for a in range(2) for b in range(3) for c in range(2))
    ]
    assert sum(parts).item() == pytest.approx(1.0, abs=1e-6)
    net, shares = module.network.module, module.shares
    first = sum(p * op(x) for p, op in zip(shares[0], net.first.edge.operations, strict=False))
    second = sum(p * op(first) for p, op in zip(shares[1], net.second.edge.operations, strict=True))
    expected = net.head((shares[2, 0] * first + shares[2, 1] * second).mean((2, 3)))
    torch.testing.assert_close(mixed, expected)


@pytest.mark.parametrize(("method", "federated"), [(RandomPath(), False), (Sandwich(1), True)])
def test_all_sizes_train_together(method, federated):
    seed_everything(0, verbose=False)
    module = OneShot(SIZED, method, num_classes=2, in_channels=1, image_size=8, seed=0)
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    callbacks = [Federation(local_steps=2)] if federated else []
    trainer = toy_trainer(*callbacks, max_epochs=1)
    set_ = data(images(), 3, 4)
    set_.search_fraction = 0.0
    trainer.fit(module.double(), datamodule=set_)
    moved = {name for name, p in module.named_parameters() if not torch.equal(p, start[name])}
    assert "network.module.stem.weight" in moved


class TwoLabels(nn.Module):
    def __init__(self, num_classes, in_channels):
        super().__init__()
        ValueChoice([1, 2], label="width")
        ValueChoice([1, 3], label="width")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LayerSpace(Sized).rows, "train a OneShot over a ModuleSpace"),
        (
            lambda: ModuleSpace(nn.Linear).decisions,
            "must have the arguments num_classes and in_channels",
        ),
        (lambda: ModuleSpace("nowhere.Net").decisions, "there is no class 'nowhere.Net'"),
        (
            lambda: ModuleSpace(TwoLabels).decisions,
            "choices with the same label must have the same options",
        ),
        (
            lambda: LayerChoice({"one": nn.Identity}, label="l"),
            "LayerChoice l: give at least two layers",
        ),
        (
            lambda: Supernet(LAYERS, PartialChannels(), num_classes=2, in_channels=1),
            "PartialChannels needs layers with fewer channels",
        ),
    ],
)
def test_what_makes_no_space_is_refused(make, says):
    with pytest.raises(ConfigurationError, match=says):
        make()


PAGE = (ROOT / "docs" / "own_spaces.md").read_text()


@pytest.mark.usefixtures("in_an_empty_folder")
def test_what_the_page_shows_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_network", raising=False)
    Path("configs").symlink_to(ROOT / "configs")
    network, snippet = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    Path("my_network.py").write_text(network)
    exec(compile(snippet, "page", "exec"), {})  # noqa: S102 - our own words
    said = re.findall(r"print\(.*# (.*)$", snippet, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said
    for command in re.findall(r"^uv run fl-lightning (.*)$", PAGE, re.MULTILINE):
        short = [*SHORT_FIT, "--federation.local_steps=1"] if command.startswith("fit") else []
        main([*shlex.split(command), *short])
    assert Path("runs/nas_quickstart/version_0/retrain.yaml").exists()
    assert "my_network.Sizes" in Path("best.yaml").read_text()
