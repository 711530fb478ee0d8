"""What a federation offers works with a search, or is refused in a sentence."""

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import CSVLogger
from test_supernet import TwoLayers, data, vectors
from torch.utils.data import DataLoader, TensorDataset
from toys import LoaderData, SaveEverywhere, validating_trainer, weights

from fl_lightning import (
    CentralDP,
    ClientEvaluation,
    ConfigurationError,
    Ditto,
    FederatedDataModule,
    Federation,
    FedProx,
    MaskCalibration,
    Mean,
    Personal,
    Scaffold,
    UniformCohort,
)
from fl_lightning.client import Devices, LogNormalSpeeds
from fl_lightning.data import LabelShards
from fl_lightning.nas import (
    Gradient,
    HardGumbel,
    NASBench201,
    Reward,
    SinglePath,
    Softmax,
    Supernet,
)
from fl_lightning.privacy.example import ExampleDP
from fl_lightning.secure import SecureMean
from fl_lightning.server import FedAdam, FedBuff, Median
from fl_lightning.sparsity import SparseSGDM
from fl_lightning.updates import QSGD, ErrorFeedback, TopK

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:privacy:UserWarning"),
]


def supernet(rule=None, optimizer=None, **options):
    seed_everything(0, verbose=False)
    return Supernet(
        TwoLayers(),
        rule,
        num_classes=2,
        in_channels=4,
        image_size=1,
        optimizer=optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        architecture_optimizer=lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.5, 0.999)),
        seed=0,
        **options,
    )


def singles(num=60):
    x, y = vectors(num).tensors
    return TensorDataset(x.float(), y)


def search(
    module=None, *callbacks, partition=None, rounds=3, trainer=None, ckpt_path=None, **options
):
    """Search over four clients; two steps each by default."""
    module = module or supernet()
    federation = Federation(**{"local_steps": 2, "seed": 4} | options)
    datamodule = data(singles(), 4, 5, partition=partition)
    fitting = validating_trainer(*callbacks, federation, max_epochs=rounds, **trainer or {})
    fitting.fit(module, datamodule=datamodule, ckpt_path=ckpt_path)
    return module


def alpha(module):
    return module.alpha.detach().clone()


@pytest.fixture(scope="module")
def plain():
    return search()


def test_weights_have_a_server_optimizer_and_alpha_its_own():
    """In the first round clients send the same; α does the same with it, w does not."""
    options = {"server_optimizer": lambda p: FedAdam(p, lr=0.01)}
    first, adam = search(rounds=1), search(rounds=1, **options)
    assert torch.equal(alpha(first), alpha(adam))
    assert not torch.allclose(weights(first), weights(adam))
    assert torch.isfinite(weights(adam)).all()


def test_compressed_updates_carry_alpha(plain):
    steps = [ErrorFeedback([TopK(fraction=0.5), QSGD(bits=8)])]
    module = search(updates=steps, download=[QSGD(bits=8, block=256)])
    assert not torch.equal(alpha(module), alpha(plain))
    assert torch.isfinite(weights(module)).all()
    assert (alpha(module) - alpha(supernet())).abs().max() > 0.02
    everything = search(updates=[ErrorFeedback([TopK(fraction=1.0)])])
    assert torch.equal(weights(everything), weights(plain))


def private(noise_multiplier, **options):
    privacy = CentralDP(clip_norm=0.5, noise_multiplier=noise_multiplier, delta=1e-5, **options)
    return {"privacy": privacy, "aggregator": Mean(weight_by_examples=False)}


class Epsilon(SaveEverywhere):
    """Notes what was spent."""

    def __init__(self):
        self.spent = []

    def save(self, trainer, moment):
        self.spent.append(float(trainer.callback_metrics.get("privacy/epsilon", 0.0)))


def test_one_release_covers_weights_and_alpha():
    """α is clipped with w, in one norm, and gets the noise of every coordinate: ε knows no α."""
    watched, unlike = Epsilon(), Epsilon()
    module = search(supernet(), watched, **private(1.0))
    waiting = Softmax()
    waiting.alpha_from = 1.0  # in two rounds of three clients send no gradient of α
    search(supernet(waiting), unlike, **private(1.0))
    assert watched.spent[-1] == unlike.spent[-1] > 0
    silent = search(supernet(), **private(0.0))
    assert not torch.equal(alpha(module), alpha(silent))
    # noise moves no α that waits: one step of Adam, in the second round
    module = search(supernet(waiting), rounds=2, **private(1.0))
    assert (alpha(module) - alpha(supernet())).abs().max() <= 0.05 + 1e-6


def test_secure_sums_search_to_rounding(plain):
    pytest.importorskip("cryptography")
    module = search(aggregator=SecureMean(clip=4.0, max_examples=64))
    assert torch.allclose(alpha(module), alpha(plain), atol=1e-3)
    assert torch.allclose(weights(module), weights(plain), atol=1e-4)


@pytest.mark.parametrize(
    ("options", "said", "protected"),
    [
        ({"architecture_state": "clients"}, "architecture_state", "secure"),
        ({"learn": Reward(), "rule": SinglePath()}, "Reward", "private"),
    ],
    ids=["state at clients", "reward"],
)
def test_what_travels_beside_protected_updates_is_refused(protected, options, said):
    federation = private(1.0)
    if protected == "secure":
        pytest.importorskip("cryptography")
        federation = {"aggregator": SecureMean(clip=4.0, max_examples=64)}
    with pytest.raises(ConfigurationError, match=said):
        search(supernet(**options), **federation)


KINDS = {
    "darts": lambda: supernet(),
    "second order": lambda: supernet(learn=Gradient("finite")),
    "gdas": lambda: supernet(HardGumbel()),
    "enas": lambda: supernet(SinglePath(), learn=Reward()),
    "state at clients": lambda: supernet(architecture_state="clients"),
}


@pytest.mark.parametrize(
    ("kind", "moments"),
    [
        ("darts", ("0-trained", "0-end", "1-trained")),
        ("second order", ("1-trained",)),
        ("gdas", ("0-end",)),
        ("enas", ("0-trained", "0-end")),
        ("state at clients", ("0-trained", "0-end")),
    ],
)
def test_a_search_taken_up_anywhere_ends_in_the_same_bits(kind, moments, tmp_path):
    options = {"cohort": UniformCohort(size=3)}
    whole = search(KINDS[kind](), SaveEverywhere(tmp_path), **options)
    for moment in moments:
        again = search(KINDS[kind](), ckpt_path=tmp_path / f"{moment}.ckpt", **options)
        assert torch.equal(weights(again), weights(whole)), moment


@pytest.mark.parametrize("kind", ["gdas", "state at clients"])
def test_two_processes_are_one(kind):
    exact = {"aggregator": Mean(exact=True)}
    one = search(KINDS[kind](), **exact)
    two = search(KINDS[kind](), trainer={"devices": 2}, **exact)
    assert torch.equal(weights(two), weights(one))


def sparse(params):
    return SparseSGDM(params, lr=0.1, momentum=0.9)


MASK = MaskCalibration(density=0.5, include=["network.edge.*"], head_name="network.head")
NO_MASK = "keeps to no mask: operations would compete .* search without MaskCalibration"
EXAMPLES = {"privacy": ExampleDP(clip_norm=1.0, noise_multiplier=1.0, delta=1e-5)}


@pytest.mark.parametrize(
    ("options", "callbacks", "federation", "says"),
    [
        ({}, [MASK], {}, NO_MASK),
        ({"optimizer": sparse}, [MASK], {}, NO_MASK),
        ({"optimizer": sparse}, [], {}, r"^model\.optimizer is SparseSGDM, and a search"),
        ({}, [], {"personal": Personal(parameters=["alpha"])}, "alpha, which is personal"),
        ({}, [], EXAMPLES, "use the privacy of clients"),
    ],
)
def test_what_does_not_go_with_a_search_is_refused(options, callbacks, federation, says):
    with pytest.raises(ConfigurationError, match=says):
        search(supernet(**options), *callbacks, **federation)


def test_clients_evaluate_the_present_architecture(tmp_path):
    source = FederatedDataModule(
        LoaderData(DataLoader(singles(), batch_size=5)),
        num_clients=4,
        search_fraction=0.4,
        client_val_fraction=0.2,
        seed=0,
    )
    logger = CSVLogger(tmp_path, name="run")
    trainer = validating_trainer(
        ClientEvaluation(), Federation(local_steps=1), max_epochs=1, logger=logger
    )
    trainer.fit(supernet(), datamodule=source)
    [file] = tmp_path.rglob("clients_validation.csv")
    head, *rows = file.read_text().splitlines()
    assert "val/accuracy" in head
    assert len(rows) == 4


def test_clients_keep_an_alpha_each():
    module = supernet(architecture_state="clients")
    search(module, personal=Personal(parameters=["alpha", "kept_state"]))
    assert torch.equal(alpha(module), alpha(supernet()))  # the global model has the first one
    assert not torch.equal(weights(module), weights(supernet()))


class ByBatch(Supernet):
    """Evaluates all networks by the statistics of their batches."""

    def recalibrate(self):
        self._sums = {}


def test_a_clients_own_cell_is_not_evaluated_by_statistics_of_the_global_one():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(60, 3, 8, 8, generator=generator)
    examples = TensorDataset(images, (images.mean((1, 2, 3)) > 0).long())

    class Images(LoaderData):
        def val_dataloader(self):
            return DataLoader(examples, batch_size=30)

    found = []
    for kind in (Supernet, ByBatch):
        source = FederatedDataModule(
            Images(DataLoader(examples, batch_size=5)),
            num_clients=2,
            search_fraction=0.4,
            client_val_fraction=0.3,
            seed=0,
        )
        seed_everything(0, verbose=False)
        module = kind(
            NASBench201(),
            num_classes=2,
            image_size=8,
            channels=4,
            cells=1,
            architecture_optimizer=lambda p: torch.optim.Adam(p, lr=1.0),
            architecture_state="clients",
            seed=0,
        )
        evaluation = ClientEvaluation()
        personal = Personal(parameters=["alpha", "kept_state"])
        federation = Federation(local_steps=2, seed=4, personal=personal)
        trainer = validating_trainer(evaluation, federation, max_epochs=1)
        trainer.fit(module, datamodule=source)
        found.append(evaluation.per_client)
    for client, values in found[0].items():
        assert values["personal/val/loss"] == found[1][client]["personal/val/loss"]
        assert values["val/loss"] != found[1][client]["val/loss"]


@pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported")
def test_bfloat16_searches(plain):
    module = search(supernet(learn=Gradient("finite")), trainer={"precision": "bf16-mixed"})
    assert module.alpha.dtype == torch.float32
    assert torch.allclose(alpha(module), alpha(plain), atol=0.1)
    assert not torch.equal(alpha(module), alpha(supernet()))


def test_a_cell_searches_in_bfloat16():
    module = Supernet(
        NASBench201(), num_classes=2, in_channels=1, image_size=8, channels=4, cells=1, seed=0
    )
    x = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    examples = TensorDataset(x, torch.arange(16) % 2)
    trainer = validating_trainer(Federation(local_steps=1), max_epochs=1, precision="bf16-mixed")
    trainer.fit(module, datamodule=data(examples, 2, 4))
    assert torch.isfinite(weights(module)).all()


class Poisoned(LoaderData):
    """Validation and test sets whose labels are turned around, or not."""

    def __init__(self, turned):
        super().__init__(DataLoader(singles(), batch_size=5, shuffle=True))
        x, y = singles().tensors
        self.held = TensorDataset(x, 1 - y if turned else y)

    def val_dataloader(self):
        return DataLoader(self.held, batch_size=60)

    test_dataloader = val_dataloader


@pytest.mark.parametrize("over", ["clients", "central"])
def test_labels_of_evaluation_data_have_no_say(over):
    found = {}
    for turned in (False, True):
        federations = [Federation(local_steps=2, seed=4)] if over == "clients" else []
        source = FederatedDataModule(Poisoned(turned), num_clients=4, search_fraction=0.5, seed=0)
        trainer, module = validating_trainer(*federations, max_epochs=2), supernet(HardGumbel())
        trainer.fit(module, datamodule=source)
        [result] = trainer.test(module, datamodule=source, verbose=False)
        found[turned] = alpha(module), weights(module), result["test/loss"]
    for true, turned in zip(found[False][:2], found[True][:2], strict=True):
        assert torch.equal(true, turned)
    assert found[False][2] != found[True][2]  # they were evaluated, though


ALGORITHMS = {
    "one class a client": lambda: {"partition": LabelShards(classes_per_client=1)},
    "fedbuff": lambda: {
        "asynchronous": FedBuff(buffer_size=2, concurrency=3),
        "devices": Devices(speeds=LogNormalSpeeds(median=1.0, sigma=0.7)),
        "aggregator": Mean(weight_by_examples=False),
    },
    "ditto": lambda: {"personal": Ditto(pull=0.1)},
    "median": lambda: {"aggregator": Median()},
    "scaffold": lambda: {"correction": Scaffold()},
    "fedprox": lambda: {"correction": FedProx(mu=0.1)},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_other_algorithms_search(name):
    module = search(**ALGORITHMS[name]())
    assert torch.isfinite(weights(module)).all()
    assert (alpha(module) - alpha(supernet())).abs().max() > 0.01
