"""A one-shot network: off is plain training, one client is a central run, a run that goes on is the same."""

from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch.utils.data import DataLoader, TensorDataset
from toys import LoaderData, toy_trainer, validating_trainer

from fl_lightning import APFL, ConfigurationError, Ditto, FederatedDataModule, Federation
from fl_lightning.core.seeds import torch_generator
from fl_lightning.models import ImageClassifier, Schedule
from fl_lightning.nas import (
    Attentive,
    DeviceClasses,
    MobileNet,
    OneShot,
    RandomPath,
    ResNet,
    Sandwich,
    Shrinking,
    ViT,
)
from fl_lightning.nas.one_shot import _skipped, residual_branches
from fl_lightning.nas.spaces.space import Networks
from fl_lightning.nas.sub_networks.methods import Step, distillation_loss
from fl_lightning.nas.sub_networks.rounds import SubNetworkRounds

MOBILENET = MobileNet(
    kernels=(3, 5),
    expansions=(2, 3),
    depths=(1, 2),
    widths=(8, 8, 8, 16, 32, 32),
    strides=(1, 2, 2),
    squeeze=(False, False, True),
    swish=(False, True, True),
)
FIXED = MobileNet(
    kernels=(3,), expansions=(2,), depths=(1,), widths=(8, 8, 8, 16, 32, 32),
    strides=(1, 2, 2), squeeze=(False, False, True), swish=(False, True, True),
)  # fmt: skip
RESNET = ResNet(
    stem=8, channels=(16, 32), strides=(1, 2), stem_strides=(1, 1), widths=(0.5, 1.0),
    depths=((1, 2), (1, 2)), expansions=(0.5, 1.0),
)  # fmt: skip
VIT = ViT(
    image_side=8, patch=4, features=(16, 24), heads=(1, 2), ratios=(1.0, 2.0), depths=(1, 2),
    head_features=8,
)  # fmt: skip
SPACES = {"mobilenet": MOBILENET, "resnet": RESNET, "vit": VIT}
METHODS = {
    "random": RandomPath(2),
    "shrinking": Shrinking(),
    "sandwich": Sandwich(1),
    "attentive": Attentive(num_candidates=2, num_drawn=1, num_bins=3, pool=20),
}

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


@pytest.fixture
def _doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def weights(module):
    """Return all parameters; batch norm's statistics are not those of plain training."""
    return torch.cat([p.detach().flatten().clone() for p in module.parameters()])


def images(num=48, labels=None):
    x = torch.randn(num, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    return TensorDataset(x, torch.arange(num) % 4 if labels is None else labels)


class Source(LoaderData):
    """With evaluation data of its own."""

    def __init__(self, loader, held=None):
        super().__init__(loader)
        self.held = held or images(16)

    def val_dataloader(self):
        return DataLoader(self.held, batch_size=16)

    test_dataloader = val_dataloader


def data(num_clients, batch_size=8, *, shuffle=False, held=None, **options):
    source = Source(DataLoader(images(), batch_size=batch_size, shuffle=shuffle), held)
    return FederatedDataModule(source, num_clients=num_clients, seed=0, **options)


def one_shot(space=MOBILENET, method=None, **options):
    seed_everything(0, verbose=False)
    options.setdefault("optimizer", partial(torch.optim.SGD, lr=0.05, momentum=0.9))
    return OneShot(space, method, num_classes=4, in_channels=1, image_size=8, seed=0, **options)


def fitted(module, datamodule, *callbacks, rounds=2, **options):
    trainer = validating_trainer(*callbacks, max_epochs=rounds, **options)
    trainer.fit(module, datamodule=datamodule)
    return module


def step(space, limit=None, seed=0, round_=0, num_rounds=4):
    """A step on a network with known logits: the sum of its choices, and 0."""

    def logits(architecture):
        return torch.tensor([[float(sum(architecture.choices)), 0.0]], requires_grad=True)

    return Step(
        limit=limit or space.largest,
        round_=round_,
        num_rounds=num_rounds,
        generator=torch_generator(seed, "test"),
        seed=0,
        networks=Networks(space, 8, {"num_classes": 4, "in_channels": 1}),
        logits=logits,
        labels_loss=lambda logits: torch.nn.functional.cross_entropy(logits, torch.tensor([0])),
        whole=logits,
        frozen=lambda architecture: 2 * logits(architecture),
    )


# Methods.


def test_a_sandwich_is_labels_for_the_largest_and_distillation_for_the_others():
    one = step(RESNET)
    teacher, student = one.logits(RESNET.largest), one.logits(RESNET.smallest)
    expected = one.labels_loss(teacher) + distillation_loss(student, teacher)
    assert torch.equal(Sandwich(0).loss(one), expected / 2)


def test_a_random_path_is_the_mean_over_what_is_drawn():
    generator = torch_generator(0, "test")
    one = step(RESNET)
    losses = [one.labels_loss(one.logits(RESNET.sample(generator))) for _ in range(3)]
    assert torch.allclose(RandomPath(3).loss(step(RESNET)), sum(losses) / 3)


@pytest.mark.parametrize("largest", ["learns", "shared", "frozen"])
def test_shrinking_begins_with_the_largest_alone(largest):
    order = ("depth", "width", "expansion")
    method = Shrinking((2, 1, 1, 1), order, distillation=0.5, largest=largest)
    early = step(RESNET, round_=1)
    assert torch.equal(method.loss(early), early.labels_loss(early.logits(RESNET.largest)))
    late = step(RESNET, round_=2)
    drawn = method.sample(RESNET, method.kept(RESNET, 2), torch_generator(0, "test"))
    student, teacher = late.logits(drawn), late.logits(RESNET.largest)
    if largest == "frozen":
        teacher = late.frozen(RESNET.largest)
    assert drawn != RESNET.largest
    expected = late.labels_loss(student) + 0.5 * distillation_loss(student, teacher)
    if largest == "learns":
        expected = (expected + late.labels_loss(teacher)) / 2
    assert torch.equal(method.loss(late), expected)


def test_shrinking_divides_the_run_into_equal_phases():
    assert Shrinking().starts(RESNET, 8) == [0, 2, 4, 6]
    assert Shrinking().starts(RESNET, 6) == [0, 2, 3, 5]
    assert Shrinking().phase(RESNET, 0, 1) == 0


def test_rates_run_the_schedule_anew_in_every_phase():
    method = Shrinking((2, 1, 1, 1), rates=(1.0, 0.5, 0.25, 0.125))
    cosine = Schedule("cosine")
    found = [method.factor(cosine, RESNET, round_, 6) for round_ in range(6)]
    assert found == pytest.approx([1.0, 0.5, 0.5, 0.25, 0.125, 0.0625])
    plain = Shrinking((2, 1, 1, 1))
    assert [plain.factor(cosine, RESNET, n, 6) for n in range(6)] == [
        cosine.factor(n, 6) for n in range(6)
    ]


def test_rates_of_a_run_without_end_need_a_schedule_without_end():
    method = Shrinking((2, 1, 1, 1), rates=(1.0, 0.5, 0.25, 0.125))
    assert method.factor(Schedule(), RESNET, 90, -1) == 0.125
    with pytest.raises(ConfigurationError, match="needs to know the last round"):
        method.factor(Schedule("cosine"), RESNET, 90, -1)


class Teachers(Callback):
    def __init__(self):
        self.found, self.weights = [], []

    def on_train_batch_start(self, trainer, module, *args):
        rounds = next(c for c in trainer.callbacks if isinstance(c, SubNetworkRounds))
        self.found.append(rounds.teacher)
        self.weights.append({n: t.clone() for n, t in module.network.named_parameters()})


def test_a_frozen_teacher_is_the_largest_at_the_end_of_its_phase():
    seen, method = Teachers(), Shrinking((2, 1, 1, 1), largest="frozen")
    fitted(one_shot(RESNET, method), data(3), Federation(local_steps=2), seen, rounds=4)
    per_round = len(seen.found) // 4
    assert seen.found[: 2 * per_round] == [None] * (2 * per_round)
    for teacher in seen.found[2 * per_round :]:
        for name, tensor in seen.weights[2 * per_round].items():
            assert torch.equal(teacher[name], tensor)


@pytest.mark.parametrize("space", ["mobilenet", "resnet"])
def test_blocks_start_as_shortcuts_if_the_last_scale_is_zero(space):
    net = one_shot(SPACES[space], zero_gamma=True).eval()
    blocks = [m for m in net.modules() if hasattr(m, "residual_branches")]
    adding = [block for block in blocks if block.residual_branches()]
    assert adding
    for block in adding:
        assert not block.bn3(torch.randn(2, block.bn3.num_features, 3, 3)).any()


def test_drop_connect_keeps_the_mean_and_spares_the_first_stages():
    branches = residual_branches(one_shot(MOBILENET).network)
    # of 5 blocks the first has a shortcut, and of every stage the second
    assert [share for _, share in branches] == pytest.approx([0, 2 / 5, 4 / 5])
    torch.manual_seed(0)
    ones = torch.ones(20_000, 2, 1, 1)
    dropped = _skipped(0.2, None, None, ones)
    assert set(dropped.unique().tolist()) == {0.0, 1.25}
    assert torch.equal(dropped[:, 0], dropped[:, 1])  # of whole examples
    assert dropped.mean().item() == pytest.approx(1, abs=0.02)
    assert _skipped(0.0, None, None, ones) is ones


def test_weight_decay_spares_biases_and_norms():
    sgd = partial(torch.optim.SGD, lr=0.5, weight_decay=0.1)
    net = one_shot(decay_weights_only=True, optimizer=sgd)
    fitted(net, data(1), rounds=1)
    groups = net.trainer.optimizers[0].param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(p.ndim > 1 for p in groups[0]["params"])
    assert all(p.ndim == 1 for p in groups[1]["params"])
    assert sum(len(g["params"]) for g in groups) == len(list(net.network.parameters()))


@pytest.mark.parametrize(
    ("method", "space"),
    list(zip(METHODS.values(), [*SPACES.values(), RESNET], strict=True)),
    ids=METHODS,
)
def test_nothing_beyond_the_limit_is_run(method, space):
    seen = []
    for seed in range(5):
        one = step(
            space, limit=space.architecture([1, *[0] * (len(space.decisions) - 1)]), seed=seed
        )
        logits = one.logits
        note = lambda network, logits=logits: (seen.append(network), logits(network))[1]
        object.__setattr__(one, "logits", note)
        object.__setattr__(one, "whole", note)
        object.__setattr__(one, "round_", 3)
        method.loss(one)
    assert seen
    for network in seen:
        pairs = zip(network.choices, one.limit.choices, strict=True)
        assert all(size <= most for size, most in pairs)


# Training.


@pytest.mark.parametrize("clients", [0, 3], ids=["central", "federated"])
def test_with_one_size_it_is_plain_training_bit_for_bit(clients):
    def trained(module):
        federation = [Federation(local_steps=3)] if clients else []
        return fitted(module, data(clients or 1), *federation)

    ours = trained(one_shot(FIXED, RandomPath()))
    seed_everything(0, verbose=False)
    plain = ImageClassifier(
        FIXED.build(FIXED.largest, num_classes=4, in_channels=1),
        num_classes=4,
        in_chans=1,
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    )
    start = weights(plain).clone()
    trained(plain)
    assert torch.equal(weights(ours), weights(plain))
    assert not torch.equal(weights(plain), start)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.usefixtures("_doubles")
def test_one_client_is_the_central_run(method):
    """To rounding: what a client sends is where it began minus where it ended."""
    options = {"method": method, "same_draws": True, "optimizer": partial(torch.optim.SGD, lr=0.05)}
    central, start = fitted(one_shot(**options), data(1, 48)), weights(one_shot())
    one = fitted(one_shot(**options), data(1, 48), Federation(local_steps=1))
    torch.testing.assert_close(weights(one), weights(central), rtol=0, atol=1e-13)
    assert not torch.allclose(weights(one), start, atol=1e-4)


@pytest.mark.parametrize("space", [MOBILENET, VIT], ids=["mobilenet", "vit"])
def test_spaces_train_and_show_three_sizes(space):
    trainer = validating_trainer(Federation(local_steps=1), max_epochs=1)
    trainer.fit(one_shot(space), datamodule=data(3))
    shown = {"val/loss", "val/accuracy", "val/smallest_accuracy", "val/middle_accuracy"}
    assert shown <= trainer.callback_metrics.keys()


def test_clients_draw_for_themselves_unless_told_otherwise():
    runs = [
        weights(fitted(one_shot(same_draws=same), data(3), Federation(local_steps=2), rounds=1))
        for same in (False, True)
    ]
    assert not torch.equal(*runs)


@pytest.mark.parametrize("federated", [False, True], ids=["central", "federated"])
def test_a_run_that_goes_on_ends_in_the_same_bits(tmp_path, federated):
    def run(rounds, path=None):
        module = one_shot(method=Shrinking((1, 1, 1, 1), largest="frozen"))
        clients = [Federation(local_steps=2)] if federated else []
        trainer = validating_trainer(*clients, max_epochs=rounds)
        trainer.fit(module, datamodule=data(3), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"{rounds}.ckpt")
        return weights(module)

    whole, _ = run(4), run(2)
    assert torch.equal(run(4, tmp_path / "2.ckpt"), whole)


def test_evaluation_data_change_nothing():
    found = []
    for labels in (torch.arange(16) % 4, (torch.arange(16) + 1) % 4):
        held = images(16, labels)
        found.append(fitted(one_shot(), data(3, held=held), Federation(local_steps=1)))
    for name, tensor in found[0].state_dict().items():
        assert torch.equal(tensor, found[1].state_dict()[name]), name


def test_dropout_is_for_the_largest_alone():
    module = one_shot(drop_rate=0.999)
    x = images(4).tensors[0]
    with torch.no_grad(), module._dropout():
        dropped = module(x)
    bias = module.network.head[-1].bias
    assert (dropped == bias).float().mean() > 0.9
    with torch.no_grad():
        assert not (module(x) == bias).any()


# Refusals.


def made(*given, **options):
    return lambda: OneShot(RESNET, *given, **{"num_classes": 4, **options})


def run(source, *callbacks, **options):
    """Fit a network for images of 8 pixels, or of another size."""
    return lambda: fitted(one_shot(**options), source(), *callbacks)


FEDERATED = Federation(local_steps=1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            made(num_classes=1, label_smoothing=1.0),
            r"num_classes must be at least 2, got 1\nlabel_smoothing must be",
        ),
        (made(Shrinking((1, 2))), "rounds must have 4 numbers of at least 0"),
        (lambda: RandomPath(0), "num_drawn must be at least 1, got 0"),
        (
            made(Shrinking((0, 1, 1, 1), largest="frozen")),
            "largest: frozen needs a largest network",
        ),
        (
            lambda: one_shot(VIT, zero_gamma=True),
            "zero_gamma applies to residual branches, and no block of vit",
        ),
        (
            run(lambda: data(1), capability=DeviceClasses([1.0])),
            "capability is a budget of each client, and this run has no clients",
        ),
        (
            run(lambda: data(2, search_fraction=0.5), FEDERATED),
            r"data\.search_fraction sets some apart: set it to 0",
        ),
        *(
            (
                lambda clients=clients: fitted(made(in_channels=1)(), data(2), *clients),
                "image_size is 32, and the images are 8 x 8",
            )
            for clients in ([], [Federation(local_steps=1)])
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, says):
    with pytest.raises(ConfigurationError, match=says):
        make()


def test_phases_of_equal_length_need_a_number_of_rounds():
    """Without one all phases would begin in the first round, with an untrained frozen teacher."""
    assert Shrinking().phase(RESNET, round_=0, num_rounds=0) == 3
    trainer = toy_trainer(max_epochs=-1, max_steps=1)
    module = made(Shrinking(largest="frozen"))()
    with pytest.raises(ConfigurationError, match=r"equal length, and trainer\.max_epochs is -1"):
        trainer.fit(module, datamodule=data(1))


@pytest.mark.parametrize("personal", [Ditto(pull=0.1), APFL()], ids=["ditto", "apfl"])
def test_models_of_clients_have_no_statistics_that_are_recalibrated(personal):
    federation = {"local_steps": 1, "personal": personal}
    with pytest.raises(
        ConfigurationError, match=f"{type(personal).__name__} gives each client a mo"
    ):
        fitted(one_shot(RESNET), data(2), Federation(**federation))
    fitted(one_shot(VIT), data(2), Federation(**federation))
