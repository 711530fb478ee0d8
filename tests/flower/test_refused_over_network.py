"""What cannot be over a network is refused in a sentence before any site is asked."""

import os
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
ONE_SHOT = SUPERNET | {"space": built("nas.ResNet")}
TEACHER = built("nas.Shrinking", largest="frozen")
DEVICES = built("client.Devices", speeds=built("client.LogNormalSpeeds", sigma=0.7))


def calibrated(**options):
    return MASKS | {"trainer__callbacks": [built("MaskCalibration", density=0.1, **options)]}


class NobodyAsked:
    """A channel on which nothing may be sent."""

    def sites(self):
        raise AssertionError("a site was looked for")

    def send(self, site, message, ttl):
        raise AssertionError("a site was asked")

    def receive(self, seconds):
        raise AssertionError("a site was waited for")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"federation__privacy": built("ExampleDP", clip_norm=1.0, noise_multiplier=1.0)},
            "federation.privacy ExampleDP is simulated only, .*: use LocalDP",
        ),
        (
            {"data__init_args__transforms": [built("data.FederatedNormalize")]},
            "data.transforms FederatedNormalize learns from all clients' examples, .*: use Normalize",
        ),
        ({"data__init_args__update_weight": "y"}, "leave update_weight out"),
        (calibrated(head=built("sparsity.LinearHead")), "head LinearHead .* use RidgeHead"),
        (calibrated(per_client=True), "set per_client to false"),
        (
            {
                "federation__attackers": built(
                    "Attackers", fraction=0.3, forge=built("server.SignFlip")
                )
            },
            "federation.attackers Attackers are simulated only, .*: leave attackers out",
        ),
        (
            {"federation__cohort": built("data.PowerOfChoiceCohort", size=2, num_candidates=3)},
            "federation.cohort PowerOfChoiceCohort .* set its losses to last_known",
        ),
        (
            {"model": built("nas.Supernet", **SUPERNET, learn=built("nas.Reward", best_of=2))},
            "model Supernet counts right answers .*: set best_of of model.learn to 1",
        ),
        (
            {"model": built("nas.OneShot", **ONE_SHOT, method=TEACHER)},
            "model OneShot has a frozen teacher, .*: set largest of model.method to learns",
        ),
        (
            {
                "model": built("nas.OneShot", **ONE_SHOT),
                "federation__aggregator": built("secure.SecureMean"),
            },
            "model OneShot: sums of clients' activations, .* would reach the server in clear",
        ),
        (
            {
                "model": built("nas.Supernet", **SUPERNET),
                "trainer__callbacks": [built("nas.StopAtCollapse", eigenvalue=True)],
            },
            "StopAtCollapse reads clients' examples, .* set its eigenvalue to false",
        ),
        ({"federation__engine": "slots"}, "set engine to auto or sequential"),
        ({"federation__devices": DEVICES}, "network run --deadline"),
        (
            {"federation__aggregator": built("secure.SecureMean", protocol="count")},
            "SecureMean is only simulated with .* use SecureMean with protocol: run",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_a_site_is_asked(options, said, tmp_path):
    config = configuration(**options)
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
    process = typed.start(words, Path.cwd(), os.environ, said := [Path("out"), Path("err")])
    process.join(120)
    return said[0].read_text()


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
        learning = [built("data.FederatedNormalize")]
        sites.own["data"]["init_args"]["transforms"] = learning
        sites.start("b")
        with pytest.raises(ConfigurationError, match="site b: the site cannot run this"):
            over_network(sites, config, tmp_path / "network")
        log = (sites.folder / "b.log").read_text()
    assert "FederatedNormalize learns from all clients' examples" in log
