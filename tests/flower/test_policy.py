"""What a site allows: class paths, options that are its own, numbers that it does not pay beyond."""

import pytest
import typed
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback
from readme import ROOT

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.class_paths import DEFAULT, FROM_SERVER, checked
from fl_lightning.flower.layers import shared_part
from fl_lightning.flower.policy import Policy, Refused, read_policy
from fl_lightning.flower.site.ledger import PrivacyBudget

SITE = {"name": "hospital_a", "clients": {3: 0, 4: 1}, "socket": "s", "memory": "m"}


def policy(**options):
    return Policy(**{**SITE, **options})


def written(tmp_path, text):
    path = tmp_path / "site.yaml"
    path.write_text(text)
    return path


def model(path, **init_args):
    return {"model": {"class_path": path, "init_args": init_args}}


MODEL = model(
    "fl_lightning.ImageClassifier",
    network="vit_small_patch16_224.dino",
    num_classes=10,
    optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "betas": [0.9, 0.99]}},
)

# class paths


@pytest.mark.parametrize(
    "path", sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.yaml"))
)
def test_what_the_configurations_share_is_allowed(path):
    configuration = yaml.safe_load((ROOT / path).read_text())
    if path == "configs/llm.yaml":  # a model of the hub, which each site chooses itself
        with pytest.raises(Refused, match=r"set it in the site's own.yaml"):
            checked(shared_part(configuration), policy().classes)
        return
    checked(shared_part(configuration), policy().classes)


SCORED = {
    "rule": {"class_path": "fl_lightning.sparsity.MostSensitive"},
    "sensitivity": {"class_path": "fl_lightning.sparsity.SquaredMeanGradient"},
    "cohort": {"class_path": "fl_lightning.UniformCohort", "init_args": {"size": 2}},
    "head": {"class_path": "fl_lightning.sparsity.RidgeHead"},
}


@pytest.mark.parametrize("options", [{}, SCORED, {"mask_file": "/mask.safetensors"}])
def test_a_calibration_is_shared_with_all_its_defaults(options):
    parser = ArgumentParser()
    parser.add_subclass_arguments(Callback, "callback")
    options = {"density": 0.1, **options}
    given = {"class_path": "fl_lightning.MaskCalibration", "init_args": options}
    whole = parser.dump(parser.parse_object({"callback": given}))  # as network run sends it
    shared = {"trainer": {"callbacks": [yaml.safe_load(whole)["callback"], {"class_path": "os.x"}]}}
    own = {"trainer": {"callbacks": [{"class_path": "mine.Callback"}]}}
    [found] = policy().site_configuration(shared, own)["trainer"]["callbacks"]
    assert found["class_path"] == "fl_lightning.MaskCalibration"
    assert found["init_args"]["density"] == 0.1
    given = FROM_SERVER if "mask_file" in options else None
    assert found["init_args"].get("mask_file") == given


@pytest.mark.parametrize(
    "path",
    [
        "torch.hub.load",
        "torch.nn.modules.module.functools.partial",
        "torch.nn.init.normal_",
        "torch.nn.Unknown",
        "torch.nn._reduction.warnings",
        "torch.optim.optimizer.torch.hub.load",
        "torch.optim.swa_utils.update_bn",
        "torchmetrics.text.BERTScore",
        "timm.create_model",
        "timm.models._hub.load_state_dict_from_hf",
        "torchvision.datasets.ImageFolder",
        "subprocess.Popen",
        "builtins.eval",
        "os.system",
        "lightning.pytorch.callbacks.ModelCheckpoint",
        "fl_lightning.__main__.main",
        "fl_lightning.FederatedCLI",
        "fl_lightning.data.HuggingFace",
        "fl_lightning.cli.commands.sys",
        "fl_lightning.client.memory.VectorFile",
        "fl_lightning.sparsity.save_mask",
        "fl_lightning.import_module",
        "fl_lightningx.Net",
        "fl_lightning.",
        "fl_lightning",
        "SGD",
        "",
        " os.system",
        "os.system\n",
    ],
)
def test_a_class_path_that_is_not_allowed_is_refused(path):
    with pytest.raises(Refused, match=r"^model\.class_path: .*(site\.yaml|full path)"):
        checked(model(path), policy().classes)


@pytest.mark.parametrize(
    "path",
    [
        "fl_lightning.ImageClassifier",
        "fl_lightning.models.image_classifier.ImageClassifier",
        "fl_lightning.secure.protocol.session.SparseGraph",
        "torch.nn.modules.linear.Linear",
        "torch.optim.lr_scheduler.CosineAnnealingLR",
        "torchmetrics.Accuracy",
        "torchvision.models.ResNet",
        "timm.models.vision_transformer.VisionTransformer",
        "timm.optim.Lamb",
    ],
)
def test_a_class_that_a_site_needs_is_allowed(path):
    assert checked(model(path), policy().classes) == model(path)


HIDDEN = [
    {"trainer": {"callbacks": [{"class_path": "os.system"}]}},
    {"model": {"init_args": {"network": {"class_path": "os.system"}}}},
    {"model": {"init_args": {"network": "os.system"}}},
    {"model": {"init_args": {"network": "{class_path: os.system}"}}},
    {"model": {"init_args": {"network": '{class_path: "\\x6fs.system"}'}}},
    {"model": {"init_args": {"network": '"\\x6fs.system"'}}},
    {"model": {"init_args": {"network": "- os.system"}}},
    {"model": {"init_args": {"network": "class_path: SGD"}}},
    {"model": "os.system"},
    {"model": {"class_path": {"class_path": "os.system"}}},
    {"model": {"dict_kwargs": {"x": "os.system"}}},
    {"model.class_path": "Popen"},
    {"model": {"init_args.optimizer.class_path": "Popen"}},
    {"model": {"class_path+": "Popen"}},
    {"model": {"class_path": ["Popen"]}},
    {"model": {"class_path": None, "init_args": {"network": "other.yaml"}}},
    {"model": {"init_args": {"checkpoint_path": "~/weights.pt"}}},
    {"model": {"init_args": {"checkpoint_path": "runs/../../secret.pt"}}},
    {"model": {"init_args": {"checkpoint_path": "memory/x.pt"}}},
    {"model": {"init_args": {"files": ["x.safetensors"]}}},
    {"model": {"init_args": {"network_kwargs": {"pretrained_cfg": {"hf_hub_id": "somebody"}}}}},
    {"model": {"init_args": {"pretrained": True, "network": "somebody/model"}}},
    {"model": {"init_args": {"network": "hf-hub:somebody/model"}}},
    {"model": {"init_args": {"network": "a" * 20_000}}},
    {"model": {"init_args": {"network": object()}}},
]


@pytest.mark.parametrize("configuration", HIDDEN, ids=range(len(HIDDEN)))
def test_a_class_path_or_a_place_is_found_wherever_it_hides(configuration):
    with pytest.raises(Refused):
        checked({**MODEL, **configuration}, policy().classes)


def test_a_configuration_that_holds_itself_is_refused():
    configuration = {}
    configuration["model"] = configuration
    with pytest.raises(Refused, match="more than 64 nested levels"):
        checked(configuration, policy().classes)


PROBE = """
import sys
sys.path.insert(0, sys.argv[1])
from fl_lightning.flower.class_paths import checked
from fl_lightning.flower.policy import Policy, Refused
policy = Policy(name="a", clients={0: 0}, socket="s", memory="m", classes=("torch.*", "good.*"))
model = {"class_path": "good.Net"}
for place in ({"class_path": "evil.Net"}, ["evil.Net"], "evil.Net", "{class_path: 'evil.Net'}"):
    try:
        checked({"federation": model, "model": place}, policy.classes)
    except Refused as error:
        print(str(error).split(":")[0])
assert "evil" not in sys.modules
assert "good" not in sys.modules, "an allowed module was imported though another is refused"
"""


def test_a_module_whose_import_would_write_a_file_is_not_imported(tmp_path):
    for module in ("evil", "good"):
        (tmp_path / f"{module}.py").write_text(
            f"open({str(tmp_path / 'written')!r}, 'w').close()\nclass Net: pass\n"
        )
    said, _ = typed.said_by(PROBE, str(tmp_path), folder=tmp_path)
    assert said.count("model") == 4
    assert not (tmp_path / "written").exists()


def test_a_site_adds_packages_and_exact_paths(tmp_path, monkeypatch):
    (tmp_path / "own_models.py").write_text(
        "import os\nfrom torch import nn\nclass Net(nn.Module): pass\nclass Other: pass\n"
        "def build(): pass\nLinear = nn.Linear\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Refused, match="not allowed at this site"):
        checked(model("own_models.Net"), policy().classes)
    wide = policy(classes=("own_models.*",))
    checked(model("own_models.Net"), wide.classes)
    for name in ("Other", "build", "os", "Linear", "missing"):  # Linear is defined in torch.nn
        with pytest.raises(Refused, match="is no class that a configuration may build"):
            checked(model(f"own_models.{name}"), wide.classes)
    checked(model("own_models.Other"), ("own_models.Other",))


def test_short_names_are_fl_lightnings_own():
    class Krum:  # whoever looks in everything that is imported finds this one too
        pass

    given = {
        "federation": {"aggregator": {"class_path": "Krum"}, "updates": ["TopK"], "engine": "auto"}
    }
    assert checked(given, policy().classes) == {
        "federation": {
            "aggregator": {"class_path": "fl_lightning.server.Krum"},
            "updates": ["fl_lightning.updates.TopK"],
            "engine": "auto",
        }
    }
    assert given["federation"]["updates"] == ["TopK"]
    assert Krum.__name__ == "Krum"
    names = ["blocks.0.*", "größe", "", "null", "vit_small_patch16_224.dino"]
    texts = {"names": names, "table": {0: 1.5, "layers.0": None}, "monitor": "val/accuracy"}
    texts = {"model": {"init_args": texts}}
    assert checked(texts, DEFAULT) == texts  # none of them is a class path


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("num_threads", {"num_threads": 1_000_000}),
        ("trainer.max_epochs", {"trainer": {"max_epochs": 10**12}}),
        ("federation.local_steps", {"federation": {"local_steps": 10**9}}),
    ],
)
def test_a_number_that_is_too_large_is_refused_before_anything_is_built(option, given):
    with pytest.raises(Refused, match=rf"^{option} is 1\S* .*at most \d+"):
        policy().site_configuration(given, {})


# whose options


def test_a_site_sets_its_own_options_and_the_server_the_shared_ones():
    shared = {
        **MODEL,
        "seed_everything": 3,
        "data": {"class_path": "evil.Data"},
        "federation": {"local_epochs": 2},
        "trainer": {
            "max_epochs": 5,
            "gradient_clip_val": 1.0,
            "accelerator": "cpu",
            "logger": {"class_path": "evil.Logger"},
            "callbacks+": ["evil.Callback"],
            "default_root_dir": "/",
        },
        "ckpt_path": "/last.ckpt",
    }
    own = {
        "data": {"class_path": "my_hospital.Data"},
        "trainer": {"accelerator": "gpu", "precision": "bf16-mixed"},
        "model": {"init_args": {"checkpoint_path": "/data/dino.pth"}},
    }
    found = policy().site_configuration(shared, own)
    init_args = {**MODEL["model"]["init_args"], "checkpoint_path": "/data/dino.pth"}
    assert found == {
        "seed_everything": 3,
        "model": {"class_path": "fl_lightning.ImageClassifier", "init_args": init_args},
        "federation": {"local_epochs": 2},
        "data": {"class_path": "my_hospital.Data"},
        "trainer": {
            "max_epochs": 5,
            "gradient_clip_val": 1.0,
            "accelerator": "gpu",
            "precision": "bf16-mixed",
        },
    }


def test_another_class_of_the_site_does_not_get_the_options_of_the_shared_one():
    optimizer = {"class_path": "torch.optim.Adam", "init_args": {"lr": 1.0}}
    found = policy().site_configuration(MODEL, {"model": {"init_args": {"optimizer": optimizer}}})
    assert found["model"]["init_args"]["optimizer"] == optimizer
    with pytest.raises(Refused, match=r"federation\.aggregator\.class_path: 'evil\.Mean'"):
        policy().site_configuration({"federation": {"aggregator": {"class_path": "evil.Mean"}}}, {})
    same = policy().site_configuration(MODEL, {"model": {"class_path": "ImageClassifier"}})
    assert same["model"]["init_args"] == MODEL["model"]["init_args"]


# numbers and names


def test_a_site_pays_no_more_than_it_says():
    budget = PrivacyBudget(epsilon=2.0, per="year")
    site = policy(most_epsilon=budget, fewest_in_secure_sum=4, metrics=("train/*", "seconds"))
    site.check_secure_sum(4)
    with pytest.raises(
        Refused, match=r"is ε 2 at δ 1e-05, per: year at this site, and training would show"
    ):
        site.check_unprotected("training")
    with pytest.raises(Refused, match=r"is 4 at this site, and the sum is over 3 clients"):
        site.check_secure_sum(3)
    assert site.allows_metric("train/loss")
    assert site.allows_metric("seconds")
    assert not site.allows_metric("val/loss")
    policy().check_unprotected("training")
    policy().check_clients((4, 3))
    with pytest.raises(Refused, match=r"clients: \[7\] are not at this site, which has \[3, 4\]"):
        policy().check_clients((3, 7))
    assert policy().allows_metric("anything")


def test_a_file_says_what_a_site_allows(tmp_path):
    text = """
name: hospital_a
clients: [12, 3]
socket: site.sock
memory: /var/memory
most_epsilon: 8
metrics: ["val/*"]
classes: [my_project.*]
"""
    found = read_policy(written(tmp_path, text))
    assert found.clients == {12: 0, 3: 1}
    assert found.socket == tmp_path.resolve() / "site.sock"
    assert str(found.memory) == "/var/memory"
    assert found.most_epsilon == PrivacyBudget(epsilon=8, delta=1e-5, per="ever")
    assert found.metrics == ("val/*",)
    assert found.classes == (*DEFAULT, "my_project.*")
    assert found.most_bytes == policy().most_bytes


GOOD = "name: a\nclients: [1]\nsocket: s\nmemory: m\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: a\n", "clients, socket, memory is missing"),
        (GOOD + "most_epsilom: 3\n", "'most_epsilom' is not known. Did you mean 'most_epsilon'"),
        (GOOD + "name: b\n", "name is set in line 1 and again in line 5"),
        (GOOD + "most_bytes: 1e9\n", "most_bytes must be a whole number, at least 1"),
        (GOOD + "most_epsilon: -1\n", "epsilon must be a number above 0 and below inf, got -1"),
        (
            GOOD + "most_epsilon: {epsilon: 1, delta: 1}\n",
            "delta must be a number above 0 and below 1",
        ),
        (
            GOOD + "most_epsilon: {epsilon: 1, per: run}\n",
            "per must be one of day, week, month, year",
        ),
        (GOOD + "most_epsilon: {delta: 1}\n", "or a mapping with epsilon, delta, per"),
        (GOOD + "most_cost: 1\n", "most_cost must be a mapping from flops, params, activations"),
        (GOOD + "most_cost: {seconds: 1}\n", "to numbers above 0, got {'seconds': 1}"),
        (GOOD + "most_cost: {flops: 0}\n", "to numbers above 0, got {'flops': 0}"),
        (GOOD + "log_unprotected: 1\n", "log_unprotected must be true or false, got 1"),
        (
            GOOD + "most_epsilon: 1\nseeded_noise: true\n",
            "seeded_noise: true and most_epsilon exclude",
        ),
        (GOOD + "fewest_in_secure_sum: 1\n", "at least 2, got 1"),
        (GOOD + "metrics: loss\n", "metrics must be a list, in Python a tuple, got 'loss'"),
        (GOOD + "classes: ['*']\n", "like my_project.Net"),
        (GOOD.replace("name: a", "name: ../a"), "name must be 1 to 63 letters"),
        (GOOD.replace("[1]", "[1, 1]"), "clients must be different"),
        (GOOD.replace("[1]", "[[1]]"), "all integers ≥ 0"),
        (GOOD.replace("[1]", "{1: 0, 2: 0}"), "different positions"),
        (GOOD.replace("[1]", "[]"), "a non-empty list"),
        (GOOD.replace("[1]", "3"), "clients must be a non-empty list of client ids"),
        (GOOD.replace("socket: s", "socket: 3"), "socket must be a path"),
        (GOOD.replace("socket: s", f"socket: /{'s' * 103}"), "socket: .* has 104 bytes"),
        (GOOD + "metrics: ['']\n", "must be a non-empty text, got ''"),
        ("- a", "it contains no options"),
        ("a: [", "is not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]", "is not valid YAML"),
        ("? [a]\n: 1", "is not valid YAML|is not known"),
    ],
)
def test_a_file_that_says_nonsense_is_refused_in_a_sentence(tmp_path, text, said):
    path = written(tmp_path, text)
    with pytest.raises(ConfigurationError, match=said) as refused:
        read_policy(path)
    assert str(refused.value).startswith(str(path))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_too_large_or_of_several_faults_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="network init"):
        read_policy(tmp_path / "none.yaml")
    path = written(tmp_path, GOOD + "most_bytes: 0\nmost_steps: 0\n")
    with pytest.raises(ConfigurationError, match=r"(?s)most_bytes.*most_steps"):  # all at once
        read_policy(path)
    with pytest.raises(ConfigurationError, match="is larger than 1000000 bytes"):
        read_policy(written(tmp_path, "#" * 1_000_001))
