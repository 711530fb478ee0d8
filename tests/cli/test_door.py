"""The door of the command line: what is said at once, names in place of paths, projects to start from."""

import inspect
import json
import os
import resource
import subprocess
import sys
from argparse import ArgumentError
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest
import typed
import yaml
from jsonargparse import Namespace
from jsonargparse._parameter_resolvers import get_signature_parameters
from jsonargparse.typing import PositiveInt
from lightning.pytorch import LightningDataModule, LightningModule, Trainer

import fl_lightning
from docs.command_help import as_text
from fl_lightning import (
    ConfigurationError,
    FederatedCLI,
    FederatedDataModule,
    Federation,
    ImageClassifier,
)
from fl_lightning.cli import configs, init, main
from fl_lightning.cli.checks import check_values, imported
from fl_lightning.cli.errors import Parser, built_trainer
from fl_lightning.cli.help import COMMANDS, GROUPS
from fl_lightning.cli.names import FILE, check_classes, contents, expanded, names_in, whole
from fl_lightning.core.public_names import PACKAGES, exported, public_paths
from fl_lightning.core.yaml_files import read
from fl_lightning.data import IID, Digits
from fl_lightning.flower.class_paths import own_names
from fl_lightning.server import Median

ROOT = Path(__file__).resolve().parents[2]


def run(*words, folder):
    """Return the code of a command that is typed in a folder, and all that it says."""
    said = [folder / f"said_{stream}" for stream in (1, 2)]
    process = typed.start(words, folder, os.environ, said)
    process.join()
    text = "".join(path.read_text() for path in said)
    for path in said:
        path.unlink()
    return process.exitcode, text


def answer(*words, folder="."):
    """Return what a command says in a fresh process, its code, and whether PyTorch was imported."""
    code = (
        "import sys\nfrom fl_lightning.cli import main\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    *said, torch = (done.stdout + done.stderr).splitlines()
    return "\n".join(said), done.returncode, torch == "True"


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        ([], "usage: fl-lightning COMMAND", 0),
        (["--help"], "usage: fl-lightning COMMAND", 0),
        (["--version"], f"fl-lightning {fl_lightning.__version__}", 0),
        (["configs"], "quickstart", 0),
        (["init"], "usage: fl-lightning init", 0),
        (["fit", "--help"], "usage: fl-lightning fit --config NAME", 0),
        (["predict", "-h"], "The checkpoint whose model is meant", 0),
        (["fit", "--federation.help"], "what most people set", 0),
        (["fit", "--federation.correction.help"], "FedProx", 0),
        (["fit", "--data.partition.help"], "DirichletPerClass", 0),
        (["fit", "--config", "nowhere.yaml"], "neither a file nor a configuration", 2),
        (["fit", "--config", "quikstart"], "Did you mean 'quickstart'?", 2),
        (["fti"], "there is no command 'fti'. Did you mean 'fit'?", 2),
        (["--config", "quickstart"], "the first word must be a command", 2),
        (["compare", "--config", "quickstart"], "use fl-lightning fit", 2),
        (["fit", "--config", "experiments/private"], "use fl-lightning compare", 2),
        (["fit", "--config", "sweeps/quickstart"], "use fl-lightning sweep --search", 2),
        (["fit"], "fit needs a configuration: try --config quickstart", 2),
        (["fit", "--federation.agregator", "Krum"], "Did you mean 'aggregator'?", 2),
        (["sweep", "--search", "quickstart"], "has no space, which names the options", 2),
        (["configs", "copy", "fedprx"], "there is no configuration 'fedprx'", 2),
        (["init", "my-project"], "the folder's name must be the name of a Python package", 2),
        (["init", "mine", "--template", "audio"], "one of images, text, tabular, llm", 2),
    ],
)
def test_what_needs_no_pytorch_is_said_without_it(words, said, code, tmp_path):
    text, returned, has_torch = answer(*words, folder=tmp_path)
    assert said in text
    assert (returned, has_torch) == (code, False)
    assert "Traceback" not in text
    assert not list(tmp_path.iterdir())


def test_the_catalogue_is_what_the_classes_say():
    told = "run python docs/command_help.py"
    assert FILE.read_text(encoding="utf-8") == as_text(), told


def test_help_fits_a_terminal():
    for text in (*contents()["pages"].values(), "\n".join(configs._listed())):
        assert max(map(len, text.splitlines())) <= 80
    assert all(f"\n  {name} " in contents()["pages"][""] for name in COMMANDS)


def test_every_option_of_the_block_is_in_one_group():
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(contents()["federation"]["options"])


def test_an_option_without_classes_in_the_box_says_what_it_takes():
    pages = contents()["pages"]
    assert "derives from Stage" in pages["--federation.stages.help"]
    assert "any Optimizer of torch.optim" in pages["--federation.server_optimizer.help"]


def test_the_parser_knows_the_types_of_all_exported_classes():
    """Of an annotation that it cannot evaluate it accepts any value."""
    for path in public_paths().values():
        package, _, name = path.rpartition(".")
        found = getattr(import_module(package), name)
        if inspect.isclass(found) and not issubclass(found, Exception):
            for parameter in get_signature_parameters(found, None):
                assert not isinstance(parameter.annotation, str), (path, parameter.name)


def test_a_line_in_a_package_is_all_that_a_new_class_needs(tmp_path):
    """It is exported, has a short name, is allowed at sites, and is listed where its kind is an option."""
    for package in PACKAGES:
        module = import_module(package)
        assert module.__all__ == list(exported(module.__file__))
        for name in module.__all__:
            assert getattr(module, name) is getattr(
                import_module(exported(module.__file__)[name]), name
            )
    assert own_names() == {
        name: path
        for name, path in public_paths().items()
        if inspect.isclass(found := imported(path)) and name != "FederatedCLI"
        if not issubclass(found, LightningDataModule)
    }
    listed = [
        entry["classes"]
        for block in ("federation", "data")
        for entry in contents()[block]["classes"].values()
    ]
    assert {path for classes in listed for path in classes} <= set(public_paths().values())
    assert expanded({"federation": {"aggregator": {"class_path": "AFL"}}}) == {
        "federation": {"aggregator": {"class_path": "fl_lightning.server.AFL"}}
    }
    (tmp_path / "__init__.py").write_text(
        "from fl_lightning.server.robust.krum import Krum as Mine\n"
    )
    assert exported(tmp_path / "__init__.py") == {"Mine": "fl_lightning.server.robust.krum"}


PAGES = [
    ["--help"],
    *([name, "--help"] for name in COMMANDS),
    ["configs"],
    ["fit", "--federation.help"],
]
PAGES += [["fit", "--federation.aggregator.help"], ["fit", "--data.source.help"]]
PAGES += [[*page.split(), "--help"] for page in contents()["pages"] if " " in page]
MISSPELT = [
    ["fit", "--config", "quickstart", "--federation.aggregator", "Krumm"],
    ["fit", "--config", "quickstart", "--federation.aggregator", "fl_lightning.server.Krumm"],
    ["fit", "--config", "quickstart", "--model.init_args.optimizer", "torch.optim.Adamm"],
]


def cpu_seconds(words, folder):
    """Return the time of a processor that a command takes, what it says, and its code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "fl_lightning", *words],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, done.stdout + done.stderr, done.returncode


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_help_of_every_command_takes_no_time_and_fits_a_terminal(words, tmp_path):
    took = []
    while not took or (min(took) > 0.3 and len(took) < 3):  # a busy machine has slower moments
        seconds, said, code = cpu_seconds(words, tmp_path)
        took.append(seconds)
    assert min(took) <= 0.3
    assert max(map(len, said.splitlines())) <= 80
    assert (code, len(said.splitlines()) > 2) == (0, True), said


@pytest.mark.parametrize("words", MISSPELT, ids=" ".join)
def test_a_misspelt_class_is_found_before_pytorch_is_imported(words, tmp_path):
    seconds, said, code = cpu_seconds(words, tmp_path)
    meant = {
        "Krumm": "Did you mean fl_lightning.server.Krum?",
        "Adamm": "Did you mean torch.optim.Adam?",
    }
    assert meant[words[-1].rpartition(".")[2]] in " ".join(said.split())
    assert (code, seconds <= 1.0) == (2, True), said


def test_a_misspelt_class_of_a_single_file_is_told_what_was_meant(tmp_path, monkeypatch, capsys):
    (tmp_path / "port_of_mine.py").write_text("class LitAutoEncoder: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit):
        main(["fit", "--config=quickstart", "--model=port_of_mine.LitAutoEncodr"])
    said = " ".join(capsys.readouterr().err.split())
    assert "Did you mean port_of_mine.LitAutoEncoder?" in said


class OwnData(LightningDataModule):
    """Its option has a name that the federated data module has too."""

    def __init__(self, partition: LightningDataModule | None = None):
        super().__init__()


def test_a_short_name_for_an_option_of_somebody_elses_is_none_of_ours(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script.py"])
    words = [f"--data={__name__}.OwnData", "--data.partition=LabelShards"]
    with pytest.raises(SystemExit):
        FederatedCLI(ImageClassifier, run=False, args=words)
    said = " ".join(capsys.readouterr().err.split())
    assert "data.init_args.partition must be a LightningDataModule" in said
    assert ("a class that OwnData accepts" in said, "Did you mean" in said) == (True, False)


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (
            {"model": {"class_path": "ImageClasifier", "init_args": {"num_classes": 10}}},
            "whole path here, my_module.ImageClasifier. Did you mean fl_lightning.ImageClassifier?",
        ),
        (
            {
                "trainer": {
                    "callbacks+": [
                        {"class_path": "fl_lightning.BackdoorSuccess", "init_args": {"trigger": 5}}
                    ]
                }
            },
            "init_args.trigger must be a mapping with target: write trigger: {target: …}",
        ),
        (
            {
                "federation": {
                    "aggregator": {"class_path": "Bucketing", "init_args": {"rule": "Mean"}}
                }
            },
            (
                "must be a RobustRule, got Mean. Give a class by class_path, and its options by init_args. "
                "Did you mean fl_lightning.server.Median?"
            ),
        ),
    ],
)
def test_a_wrong_value_is_told_with_what_to_write(layer, says, tmp_path, capsys, monkeypatch):
    (tmp_path / "layer.yaml").write_text(yaml.safe_dump(layer))
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    words = ["--config", str(ROOT / "configs" / "quickstart.yaml"), "--config"]
    words.append(str(tmp_path / "layer.yaml"))
    with pytest.raises(SystemExit) as end:
        main(["fit", *words, "--trainer.max_epochs", "1"])
    assert (end.value.code, says in " ".join(capsys.readouterr().err.split())) == (2, True)


def test_a_number_of_devices_is_refused_with_the_allowed_ones():
    options = {"accelerator": "cpu", "devices": 0}
    with pytest.raises(ConfigurationError, match=r"^trainer.devices must be auto, -1 for all"):
        built_trainer(lambda: Trainer(**options), options)


@pytest.fixture(scope="module")
def of_a_run():
    """A parser with the blocks of a run."""
    parser = Parser(allow_abbrev=False)
    parser.add_argument("--federation", type=Federation | None, default=None)
    parser.add_subclass_arguments(LightningDataModule, "data", required=False)
    parser.add_lightning_class_args(Trainer, "trainer")
    parser.add_argument("--num_threads", type=PositiveInt | None, default=None)
    parser.add_argument("--batch_size", type=PositiveInt, default=1)
    parser.add_argument("--lr", type=float | None, default=None)
    return parser


COHORT = "--federation.cohort=fl_lightning.UniformCohort"
BUCKETING = "--federation.aggregator=fl_lightning.server.Bucketing"
DATA_MODULE = "--data=fl_lightning.FederatedDataModule"
CLASS = "Give a class by class_path, and its options by init_args."


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--num_threads=many"], "num_threads must be a whole number above 0 or null, got many"),
        (["--batch_size=many"], "batch_size must be a whole number above 0, got many"),
        (["--trainer=3"], "trainer must be a mapping of options, got 3"),
        (["--lr=x"], "lr must be a number or null, got x"),
        (["--lrr=1"], "lrr: 'lrr' is not accepted, got 1. Did you mean 'lr'?"),
        (
            ["--trainer.max_epoch=1"],
            "trainer.max_epoch: 'trainer.max_epoch' is not accepted, got 1. Did you mean",
        ),
        (
            ["--federation.updates=['TopK(0.1)']"],
            (
                "federation.updates[0] must be a Transform or an ErrorFeedback, got TopK(0.1). "
                f"{CLASS} Did you mean fl_lightning.updates.TopK?"
            ),
        ),
        (
            ["--federation.engine=fast"],
            "federation.engine must be one of 'auto', 'sequential', 'slots', got fast",
        ),
        (
            [COHORT, "--federation.cohort.fraction=abc"],
            "federation.cohort.init_args.fraction must be a number or null, got abc",
        ),
        (
            [COHORT, "--federation.cohort.fractoin=0.5"],
            (
                "federation.cohort.init_args.fractoin: 'fractoin' is not accepted by UniformCohort. "
                "Did you mean 'fraction'?"
            ),
        ),
        (
            [BUCKETING, "--federation.aggregator.rule=Krumm"],
            (
                f"federation.aggregator.init_args.rule must be a RobustRule, got Krumm. {CLASS} "
                "Did you mean fl_lightning.server.Krum? --federation.aggregator.help lists the classes."
            ),
        ),
        ([BUCKETING], "federation.aggregator.init_args.rule is required by Bucketing"),
        (
            ["--federation.cohort.fraction=0.5"],
            (
                "federation.cohort.fraction: got 0.5, but cohort has no class yet: give cohort a class first. "
                "--federation.cohort.help lists the classes."
            ),
        ),
        (
            ["--federation.cohort={class_path: fl_lightning.UniformCohort, init_args: null}"],
            "federation.cohort.init_args must be a mapping of options, got null",
        ),
        (
            ["--federation.cohort=[{class_path: fl_lightning.UniformCohort}]"],
            "federation.cohort must be a Cohort or null, got a list: give one, without brackets.",
        ),
        (
            ["--federation.updates={class_path: fl_lightning.updates.QSGD, init_args: {bits: 4}}"],
            (
                "federation.updates must be a list (each entry a Transform or an ErrorFeedback) or null, "
                "got fl_lightning.updates.QSGD: write it in brackets."
            ),
        ),
        (
            ["--federation.cohort=fl_lightning.ImageClassifier"],
            f"federation.cohort must be a Cohort or null, got fl_lightning.ImageClassifier. {CLASS}",
        ),
        (
            [DATA_MODULE, "--data.source=Digit"],
            (
                f"data.init_args.source must be a LightningDataModule, got Digit. {CLASS} Did you mean "
                "fl_lightning.data.Digits? --data.source.help lists the classes."
            ),
        ),
        (
            [DATA_MODULE, "--data.partition=Dirichlet"],
            (
                "Did you mean fl_lightning.data.DirichletPerClass or fl_lightning.data.DirichletPerClient "
                "or fl_lightning.data.DirichletSizes?"
            ),
        ),
        (
            ["--trainer.callbacks=[lightning.pytorch.callbacks.Timer, EarlyStoping]"],
            "trainer.callbacks[1] must be a Callback, got EarlyStoping. ",
        ),
        (
            [
                "--trainer.callbacks=[lightning.pytorch.callbacks.Timer, "
                + "{class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {montor: loss}}]"
            ],
            "trainer.callbacks[1].init_args.montor: 'montor' is not accepted by EarlyStopping. Did you",
        ),
        (
            ["--trainer={default_root_dir: 3}"],
            "trainer.default_root_dir must be text or a path or null, got 3",
        ),
        (["--batch_size=0"], "batch_size must be a whole number above 0, got 0"),
        (
            ["--trainer.callbacks=EarlyStoping"],
            "Did you mean lightning.pytorch.callbacks.EarlyStopping?",
        ),
    ],
)
def test_what_the_parser_says_is_told_in_a_sentence(words, says, of_a_run, capsys):
    with pytest.raises(SystemExit) as end:
        of_a_run.parse_args(words)
    said = capsys.readouterr().err
    assert (end.value.code, len(said.splitlines())) == (2, 1)
    assert says in said


def test_a_block_of_the_trainer_without_options_is_refused():
    """It is null if all lines below its name are comments."""
    with pytest.raises(ConfigurationError, match=r"trainer must be a mapping .*, got null"):
        check_values(Namespace(trainer=None))


def test_a_parser_of_somebody_elses_raises_the_sentence():
    parser = Parser(exit_on_error=False)
    parser.add_argument("--federation", type=Federation | None, default=None)
    with pytest.raises(ArgumentError) as refused:
        parser.parse_args([COHORT, "--federation.cohort.fraction=abc"])
    assert str(refused.value) == (
        "federation.cohort.init_args.fraction must be a number or null, got abc"
    )


def test_names_of_classes_of_other_modules_are_left_to_the_parser():
    """A module of a user that the command line imports may define them."""
    check_classes(["fit", "--model", "mine.Net", "--federation.aggregator", "MyKrum"], [])
    with pytest.raises(
        ConfigurationError, match=r"federation.aggregator .* fl_lightning.server.Krum\?"
    ):
        check_classes(["fit", "--federation.aggregator", "MyKrum"], [])
    in_file = {
        "trainer": {"callbacks": ["lightning.pytorch.callbacks.EarlyStoping"], "logger": "no.Such"}
    }
    with pytest.raises(
        ConfigurationError, match=r"^trainer.callbacks\[0\]: .* mean .*EarlyStopping\?"
    ):
        check_classes([], [in_file])


@pytest.mark.parametrize(
    ("source", "name", "says"),
    [
        ("class Model: ...", "Modle", r"mean mine_too.Model\?"),
        ("class Model: ...", "Model", None),
        ("Model = globals()['dict']", "Modle", None),
        ("from others import *", "Modle", None),
    ],
)
def test_a_misspelt_class_of_the_users_is_found_without_an_import(
    source, name, says, tmp_path, monkeypatch
):
    """Unless the source may define names that it does not spell out; a text may look like a class."""
    (tmp_path / "mine_too.py").write_text(f"raise SystemExit\n{source}")
    monkeypatch.syspath_prepend(tmp_path)
    names_in.cache_clear()
    check_classes([], [{"trainer": {"default_root_dir": f"mine_too.{name}"}}])
    refused = pytest.raises(ConfigurationError, match=says) if says else nullcontext()
    with refused:
        check_classes([], [{"model": {"class_path": f"mine_too.{name}"}}])


def test_a_misspelt_callback_without_its_module_is_found_at_once():
    with pytest.raises(
        ConfigurationError, match=r"^trainer.callbacks\[1\] must .* mean .*ModelCheckpoint\?"
    ):
        check_classes([], [{"trainer": {"callbacks": ["Timer", {"class_path": "ModelChekpoint"}]}}])
    options = {"class_path": "EarlyStopping", "init_args": {"monitor": "EarlyStoping"}}
    check_classes([], [{"trainer": {"callbacks": [options, "ClientEvaluation"]}}])


ENDLESS = {
    "cycle": ("trainer: &a {x: *a}", "trainer.x refers to itself"),
    "list": ("trainer: &u [*u]", "trainer[0] refers to itself"),
    "deep": ("trainer: " + "[" * 3000 + "]" * 3000, "nested deeper than 64"),
    "steps": ("- " * 3000 + "x", "nested deeper than 64"),
    "digits": ("num_threads: " + "9" * 400, "num_threads must have at most 40 digits, got 400"),
    "hexadecimal digits": ("num_threads: 0x" + "af" * 30, "num_threads must have at most 40 digits, got 61"),
    "thousands": ("num_threads: " + "9" * 6000, "at most 40 digits"),
    "bomb": ("\n".join(["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]), "more than"),
    "twice": ("trainer:\n  max_epochs: 1\n  devices: 1\n  max_epochs: 2\n", "trainer.max_epochs is set in line 2 and again in line 4: keep one of them"),
    "twice in a line": ("federation: {updates: [Sign, {class_path: TopK, class_path: Sign}]}", "federation.updates[1].class_path is set in line 1 and again: keep"),
    "tab": ("trainer:\n\tmax_epochs: 1", "is not valid YAML"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENDLESS)
def test_yaml_without_an_end_is_refused(kind, tmp_path):
    text, says = ENDLESS[kind]
    (tmp_path / "run.yaml").write_text(text)
    said, code, has_torch = answer("fit", "--config", "run.yaml", folder=tmp_path)
    assert says in " ".join(said.split()), said
    assert (code, has_torch, "Traceback" in said) == (2, False, False)


@pytest.mark.parametrize(
    ("words", "place", "given"),
    [
        (["cohort.fraction=null", "cohort.size=3"], "cohort", (None, 3)),
        (["cohort.size=3", "cohort.fraction=null"], "cohort", (None, 3)),
        (["local_epochs=null", "local_steps=3"], "", (None, 3)),
        (["privacy.epsilon=2", "privacy.noise_multiplier=null"], "privacy", (None, 2.0)),
    ],
)
def test_an_option_is_replaced_by_its_alternative_in_either_order(words, place, given):
    """A null passes through the parsers of the classes around the option."""
    block = {
        "local_epochs": 2,
        "cohort": {"class_path": "fl_lightning.UniformCohort", "init_args": {"fraction": 0.25}},
        "privacy": {
            "class_path": "fl_lightning.CentralDP",
            "init_args": {"clip_norm": 1.0, "noise_multiplier": 1.0},
        },
    }
    parser = Parser(exit_on_error=False)
    parser.add_argument("--federation", type=Federation | None, default=None)
    typed_words = [f"--federation.{word}" for word in words]
    block = parser.parse_args(["--federation", str(block), *typed_words]).federation
    found = block[place].init_args if place else block
    pair = ("fraction", "size", "local_epochs", "local_steps", "noise_multiplier", "epsilon")
    names = [name for name in pair if any(f"{name}=" in word for word in words)]
    assert tuple(found[name] for name in names) == given


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le"])
def test_files_that_are_no_utf_8_are_refused(encoding, tmp_path):
    (tmp_path / "run.yaml").write_bytes("trainer: {default_root_dir: Läufe}".encode(encoding))
    said, code, _ = answer("fit", "--config", "run.yaml", folder=tmp_path)
    assert ("save it as UTF-8" in " ".join(said.split()), code) == (True, 2), said


@pytest.mark.parametrize(
    "words", [["--trainer=&a {x: *a}"], ["--num_threads", "9" * 400], ["--trainer", "[" * 3000]]
)
def test_words_without_an_end_are_refused(words, tmp_path):
    said, code, _ = answer("fit", "--config", "quickstart", *words, folder=tmp_path)
    assert (code, "Traceback" in said) == (2, False), said
    assert any(what in said for what in ("refers to itself", "at most 40 digits", "nested deeper"))


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbftrainer: {max_epochs: 3}")
    assert read(tmp_path / "run.yaml") == {"trainer": {"max_epochs": 3}}


def test_short_names_in_words_and_files_are_those_that_are_meant():
    words = ["fit", "--federation.cohort", "PoissonCohort", "--trainer.callbacks", "IID"]
    assert whole(words)[2] == "fl_lightning.PoissonCohort"
    assert whole(words)[4] == "IID"  # no option of ours
    assert whole(["--federation.updates+=TopK"]) == [
        "--federation.updates+=fl_lightning.updates.TopK"
    ]
    inside = {"updates": ["Sign", {"class_path": "TopK", "init_args": {"fraction": 0.1}}]}
    assert expanded({"federation": inside})["federation"]["updates"] == [
        {"class_path": "fl_lightning.updates.Sign"},
        {"class_path": "fl_lightning.updates.TopK", "init_args": {"fraction": 0.1}},
    ]
    for others in (
        {"federation": None, "model": "Mean"},
        {"data": {"class_path": "my.Data", "init_args": {"partition": "IID", "source": "MNIST"}}},
        {"model": {"class_path": "Median"}},
    ):
        assert expanded(others) == others
    assert whole(["fit", "--data.partition", "IID"]) == [
        "fit",
        "--data.partition",
        "IID",
    ]


def test_a_run_with_short_names_is_the_run_with_whole_ones(tmp_path, capsys):
    short = tmp_path / "short.yaml"
    short.write_text(
        yaml.safe_dump(
            {
                "data": {"class_path": "fl_lightning.FederatedDataModule"}
                | {"init_args": {"source": "Digits", "num_clients": 4, "partition": "IID"}},
                "federation": {"aggregator": "Krum", "updates": ["Sign"]},
            }
        )
    )
    with pytest.raises(SystemExit):
        main(["fit", f"--config={short}", "--federation.cohort=PoissonCohort", "--print_config"])
    found = yaml.safe_load(capsys.readouterr().out)
    assert found["federation"]["aggregator"]["class_path"] == public_paths()["Krum"]
    assert found["federation"]["cohort"]["class_path"] == public_paths()["PoissonCohort"]
    assert found["federation"]["updates"][0]["class_path"] == public_paths()["Sign"]
    assert found["data"]["init_args"]["source"]["class_path"] == public_paths()["Digits"]
    assert found["data"]["init_args"]["partition"]["class_path"] == public_paths()["IID"]


def test_configurations_by_name_are_the_files(tmp_path, monkeypatch):
    assert sorted(configs.names()) == sorted(
        path.relative_to(ROOT / "configs").with_suffix("").as_posix()
        for path in (ROOT / "configs").rglob("*.yaml")
    )
    monkeypatch.chdir(tmp_path)
    assert configs.with_paths(["fit", "-c", "quickstart", "--config=kmeans"]) == [
        *("fit", "-c", str(ROOT / "configs" / "quickstart.yaml")),
        f"--config={ROOT / 'configs' / 'kmeans.yaml'}",
    ]
    Path("at_home.yaml").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        configs.with_paths(["--config=~/at_home.yaml", "-c", "-"])[0] == "--config=~/at_home.yaml"
    )
    Path("quickstart").write_text("one's own")
    assert configs.with_paths(["--config", "quickstart"]) == ["--config", "quickstart"]


def test_a_copied_configuration_is_the_one_in_the_box(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "fl-lightning fit --config fedprox.yaml" in configs.run(["copy", "algorithms/fedprox"])
    box = ROOT / "configs" / "algorithms" / "fedprox.yaml"
    assert Path("fedprox.yaml").read_text() == box.read_text()
    with pytest.raises(ConfigurationError, match="exists"):
        configs.run(["copy", "algorithms/fedprox"])
    configs.run(["copy", "experiments/private", "mine.yaml"])
    (base,) = yaml.safe_load(Path("mine.yaml").read_text())["configs"]
    assert Path(base).samefile(ROOT / "configs" / "quickstart.yaml")


@pytest.mark.parametrize("template", init.TEMPLATES)
def test_a_project_trains_and_its_own_test_passes(template, tmp_path):
    code, said = run(
        "python", "-m", "fl_lightning", "init", "mine", "--template", template, folder=tmp_path
    )
    assert (code, "cd mine" in said) == (0, True)
    assert "my_project" not in "".join(
        path.read_text() for path in (tmp_path / "mine").rglob("*") if path.is_file()
    )
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--isolated"]
    assert subprocess.run(ruff, check=False, cwd=tmp_path / "mine").returncode == 0
    fit = ("python", "-m", "fl_lightning", "fit", "--config", "config.yaml")
    code, said = run(*fit, "--trainer.max_epochs", "2", folder=tmp_path / "mine")
    assert code == 0, said
    assert "runs/mine/version_0" in said
    code, said = run("python", "-m", "pytest", "-q", folder=tmp_path / "mine")
    assert code == 0, said
    assert "2 passed" in said


def test_nothing_is_made_over_a_folder_that_is_there(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigurationError, match="exists"):
        init.make(tmp_path / "mine", "images")
    assert not list((tmp_path / "mine").iterdir())


SCRIPT = """
from fl_lightning import FederatedCLI
from fl_lightning.data import Digits
from fl_lightning.models import ImageClassifier

if __name__ == "__main__":
    FederatedCLI(ImageClassifier, Digits)
"""


MODEL = {"network": "lenet", "num_classes": 10, "in_chans": 1, "image_size": 32}
SOURCE = {"class_path": "fl_lightning.data.Digits", "init_args": {"image_size": 32}}
DATA = {"num_clients": 4, "partition": "IID", "source": SOURCE}
BLOCKS = {"model": MODEL, "data": DATA, "federation": {"local_steps": 1, "aggregator": "Median"}}
BLOCKS["trainer"] = {"max_epochs": 1, "devices": 1, "logger": False, "enable_progress_bar": False}


def as_words(blocks):
    return [
        f"--{block}.{name}={json.dumps(value) if isinstance(value, (bool, dict)) else value}"
        for block, options in blocks.items()
        for name, value in options.items()
    ]


class WithAnOption(FederatedCLI):
    """As Lightning's tutorials add one."""

    def add_arguments_to_parser(self, parser):
        parser.add_argument("--mine", default=3)
        parser.link_arguments("data.num_clients", "model.num_classes")

    def before_instantiate_classes(self):
        self.seen = self.config.mine


class TestAScriptMayBuild:
    """What LightningCLI builds without running a command, and the fit that follows."""

    @pytest.fixture(autouse=True)
    def _without_words(self, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["script.py"])

    @staticmethod
    def built(folder, blocks, *, cli=FederatedCLI, model=ImageClassifier, **options):
        root = {"default_root_dir": str(folder)}
        blocks = {**blocks, "trainer": {**blocks["trainer"], **root}}
        args = blocks if options.pop("as_dict", False) else as_words(blocks)
        built = cli(model, Digits, run=False, args=args, **options)
        assert isinstance(built.model, ImageClassifier)
        assert built.datamodule.num_clients == 4
        assert isinstance(built.datamodule.partition, IID)
        (federation,) = [c for c in built.trainer.callbacks if isinstance(c, Federation)]
        assert isinstance(federation.aggregator, Median)
        return built

    @pytest.mark.parametrize("as_dict", [False, True])
    def test_a_trainer_that_fits(self, tmp_path, as_dict):
        cli = self.built(tmp_path, BLOCKS, as_dict=as_dict)
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
        assert cli.trainer.callback_metrics["round/cohort_size"] == 4

    def test_any_subclass(self, tmp_path):
        model = {"class_path": "fl_lightning.ImageClassifier", "init_args": MODEL}
        options = {"model": LightningModule, "as_dict": True}
        modes = {"subclass_mode_model": True, "subclass_mode_data": True}
        self.built(tmp_path, {**BLOCKS, "model": model}, **options, **modes)

    def test_with_options_of_its_own(self, tmp_path):
        model = {name: value for name, value in MODEL.items() if name != "num_classes"}
        cli = self.built(tmp_path, {**BLOCKS, "model": model}, cli=WithAnOption)
        assert (cli.seen, cli.config.model.num_classes) == (3, 4)

    def test_options_of_classes_in_the_environment(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PL_TRAINER__MAX_EPOCHS", "7")
        monkeypatch.setenv("PL_FEDERATION", "{local_steps: 3, aggregator: Median}")
        blocks = {name: BLOCKS[name] for name in ("model", "data")}
        blocks["trainer"] = {"logger": False}
        cli = self.built(tmp_path, blocks, parser_kwargs={"default_env": True})
        assert (cli.trainer.max_epochs, cli.config_init.federation.local_steps) == (7, 3)

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("trainer: &a {x: *a}", "refers to itself"),
            ("data: &u [*u]", "refers to itself"),
            ("- " * 3000 + "x", "nested deeper than 64 levels"),
            (
                "model:\n  network: lenet\n  network: mlp",
                "model.network is set in line 2 and again",
            ),
        ],
    )
    def test_from_no_file_without_an_end(self, tmp_path, text, says):
        (tmp_path / "run.yaml").write_text(text)
        with pytest.raises(ConfigurationError, match=says):
            FederatedCLI(
                ImageClassifier, Digits, run=False, args=[f"--config={tmp_path / 'run.yaml'}"]
            )

    def test_from_a_file_with_references(self, tmp_path):
        pytest.importorskip("omegaconf")
        source = {**SOURCE, "init_args": {"image_size": "${model.image_size}"}}
        data = {**DATA, "source": source, "num_clients": "${federation.min_replies}"}
        federation = {**BLOCKS["federation"], "min_replies": 4}
        file = tmp_path / "run.yaml"
        file.write_text(json.dumps({**BLOCKS, "data": data, "federation": federation}))
        cli = FederatedCLI(
            ImageClassifier,
            Digits,
            run=False,
            args=[f"--config={file}"],
            parser_kwargs={"parser_mode": "omegaconf"},
        )
        assert (cli.datamodule.num_clients, cli.datamodule.source.image_size) == (4, 32)


class Parses(FederatedCLI):
    def fit(self, *args, **kwargs):
        pass

    after_fit = None


def test_options_of_a_subcommand_that_is_not_named_are_accepted(tmp_path, monkeypatch):
    """Its parser is not built, but it exists: its description, and its block in a file of defaults."""
    words = [f"--model.{name}={value}" for name, value in MODEL.items()]
    defaults = tmp_path / "defaults.yaml"
    defaults.write_text("fit: {trainer: {logger: false}}\ntest: {trainer: {max_epochs: 2}}")
    options = {"test": {"description": "Tests."}, "default_config_files": [str(defaults)]}
    data = ["--data.num_clients=4", f"--data.source={SOURCE['class_path']}"]
    args = ["fit", *words, *data, "--data.source.image_size=32"]
    monkeypatch.setattr(sys, "argv", ["script", *args])
    cli = Parses(ImageClassifier, FederatedDataModule, parser_kwargs=options)
    assert (cli.subcommand, cli.config.fit.trainer.logger) == ("fit", False)
    assert [*Parses.subcommands()] == ["fit", "validate", "test", "predict"]


def test_a_script_of_ones_own_has_the_same_command_line(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    model = ("--model.network=lenet", "--model.num_classes=10", "--model.in_chans=1")
    fit = ("python", "-m", "script", "fit", *model, "--model.image_size=32")
    data = (
        "--data.num_clients=4",
        "--data.source.image_size=32",
        "--data.partition=fl_lightning.data.LabelShards",
    )
    shards = "--data.partition.classes_per_client=5"
    rounds = ("--trainer.max_epochs=1", "--trainer.devices=1", "--federation.local_steps=1")
    code, said = run(*fit, *data, shards, *rounds, folder=tmp_path)
    assert code == 0, said
    assert "checkpoint:" in said
    code, said = run(*fit, "--data.num_clint=4", folder=tmp_path)
    assert (code, "Did you mean 'data.num_clients'?" in said) == (2, True)
