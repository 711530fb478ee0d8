"""What cannot be over a network is refused in a sentence before any site is asked."""

from pathlib import Path

import pytest
import typed
from flower.site_processes import (
    OF_RUNS,
    configuration,
    differing,
    over_network,
    simulated,
    three_sites,
)
from flower.test_same_bits import SPARSE_SGD, built

from fl_lightning.cli.network.server import run_server
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.network.folder import make_network
from fl_lightning.flower.server.correspondence import Correspondence

pytestmark = OF_RUNS
MASKS = {"model__init_args__optimizer": SPARSE_SGD}
SUPERNET = {"space": built("nas.NASBench201"), "num_classes": 10, "in_channels": 1, "image_size": 8}
DEVICES = built("client.Devices", speeds=built("client.LogNormalSpeeds", sigma=0.7))


def calibrated(**options):
    given = {"density": None if "mask_file" in options else 0.1, **options}
    return MASKS | {"trainer__callbacks": [built("MaskCalibration", **given)]}


class NobodyAsked:
    """A channel on which nothing may be sent."""

    def sites(self):
        raise AssertionError("a site was looked for")

    def send(self, site, message, ttl):
        raise AssertionError("a site was asked")

    def receive(self, seconds):
        raise AssertionError("a site was waited for")


def one_shot(**options):
    return {"model": built("nas.OneShot", **SUPERNET | {"space": built("nas.ResNet")} | options)}


def encrypted(**options):
    return {"federation__aggregator": built("secure.EncryptedMean", **options)}


def supernet(**options):
    return {"model": built("nas.Supernet", **SUPERNET | options)}


EXAMPLE_DP = built("ExampleDP", clip_norm=1.0, noise_multiplier=1.0)
FLIPS = built("Attackers", fraction=0.3, forge=built("server.SignFlip"))
CHOICE = built("data.PowerOfChoiceCohort", size=2, num_candidates=3)
SECURE = {"federation__aggregator": built("secure.SecureMean")}
LOCAL_DP = {
    "federation__privacy": built("LocalDP", clip_norm=1.0, noise_multiplier=1.0),
    "federation__aggregator": built("Mean", weight_by_examples=False),
}
RIDGE = built("sparsity.RidgeHead")
COUNTED = {"federation__aggregator": built("secure.SecureMean", protocol="count")}
COLLAPSE = [built("nas.StopAtCollapse", eigenvalue=True)]
LEARNS = [built("data.FederatedNormalize")]
REFUSED = {
    "federation.privacy ExampleDP is simulated only, .*: use LocalDP": {
        "federation__privacy": EXAMPLE_DP
    },
    "data.transforms FederatedNormalize learns from all clients' examples, .*: use Normalize": {
        "data__init_args__transforms": LEARNS
    },
    "leave update_weight out": {"data__init_args__update_weight": "y"},
    "for its head LinearHead, .* use RidgeHead": calibrated(head=built("sparsity.LinearHead")),
    "set per_client to false": calibrated(per_client=True),
    "federation.attackers Attackers are simulated only, .*: leave attackers out": {
        "federation__attackers": FLIPS
    },
    "federation.cohort PowerOfChoiceCohort .* set its losses to last_known": {
        "federation__cohort": CHOICE
    },
    "model Supernet counts right answers .*: set best_of of model.learn to 1": supernet(
        learn=built("nas.Reward", best_of=2)
    ),
    "model OneShot has a frozen teacher, .*: set largest of model.method to learns": one_shot(
        method=built("nas.Shrinking", largest="frozen")
    ),
    "model OneShot needs sums of each client's activations, .* hides what single clients send": (
        one_shot() | SECURE
    ),
    "StopAtCollapse measures an eigenvalue on clients' examples, .* set its eigenvalue to false": supernet()
    | {"trainer__callbacks": COLLAPSE},
    "set engine to auto or sequential": {"federation__engine": "slots"},
    "network run --deadline": {"federation__devices": DEVICES},
    "SecureMean can only be simulated with .* use SecureMean with protocol: run": COUNTED,
    ".* or EncryptedMean with CKKS and fraction: 1": encrypted(fraction=0.5),
    "EncryptedMean with CKKS and fraction: 1": encrypted(paillier=built("secure.Paillier")),
    # masks and heads that would show single clients
    "would show the server the mask": calibrated() | LOCAL_DP,
    "show the server the mask found from clients' scores": calibrated() | SECURE,
    "show the server the head fitted to clients' examples": calibrated(mask_file="m", head=RIDGE)
    | SECURE,
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_is_refused_before_a_site_is_asked(said, tmp_path):
    config = configuration(**REFUSED[said])
    correspondence = Correspondence(NobodyAsked())
    with pytest.raises(ConfigurationError, match=said):
        run_server(config, [f"--trainer.default_root_dir={tmp_path}"], correspondence, wanted=3)


NORMALISED = {
    "data__init_args__transforms": [built("data.Normalize", mean=[0.3], std=[0.4])],
    "trainer__max_epochs": 2,
}


OWN = """
from fl_lightning import ImageClassifier
from fl_lightning.core.errors import ConfigurationError

class Own(ImageClassifier):
    def __init__(self, **kwargs):
        raise ConfigurationError("the server has found it")
"""


def test_the_server_finds_classes_of_the_folder_where_the_run_was_started(tmp_path):
    """Sites may lack them, of which the command tells before it asks for anything."""
    code = (
        "from pathlib import Path; from fl_lightning.cli.network.server import server_run; "
        "server_run(None, {'sites': 1, 'folder': 'of_the_run'}, Path('app'))"
    )
    for name in ("app", "of_the_run"):
        Path(name).mkdir()
    Path("of_the_run", "own_module.py").write_text(OWN)
    config = configuration(model={"class_path": "own_module.Own"})
    Path("app", "run.yaml").write_text(config)
    Path("run.py").write_text(code)
    assert "fl-lightning: model: the server has found it" in said_by("python", "run.py")
    Path("own_module.py").write_text(OWN)
    Path("run.yaml").write_text(config)
    network = str(make_network(Path("net"), "localhost:8443", ["a"]).folder)
    words = [*("network", "run", "--folder", network), "--config", "run.yaml"]
    said = said_by("python", "-m", "fl_lightning", *words)
    assert "own_module is a module of this folder: each site must have it installed" in said


def said_by(*words):
    """Return what a command says in this folder."""
    return typed.run(words, Path.cwd())[1]


@pytest.mark.slow
def test_transforms_with_known_numbers_are_those_of_the_simulation(tmp_path):
    config = configuration(**NORMALISED)
    with three_sites(config) as sites:
        network = over_network(sites, config, tmp_path / "network")
    alone = simulated(config, tmp_path / "alone")
    assert differing(network, alone) == []
    plain = simulated(configuration(trainer__max_epochs=2), tmp_path / "plain")
    assert differing(network, plain) != []


@pytest.mark.slow
def test_a_site_whose_transforms_learn_is_named(tmp_path):
    config = configuration()
    with three_sites(config) as sites:
        sites.kill("b")
        sites.own["data"]["init_args"]["transforms"] = LEARNS
        sites.start("b")
        with pytest.raises(ConfigurationError, match="site b: the site cannot run this"):
            over_network(sites, config, tmp_path / "network")
        log = (sites.folder / "b.log").read_text()
    assert "FederatedNormalize learns from all clients' examples" in log
