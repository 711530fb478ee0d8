"""The command line as a user types it, mistakes included."""

import contextlib
import io
import json
import re
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from fl_lightning.cli import main
from fl_lightning.cli.commands import resolve
from fl_lightning.cli.export import program_of, trained_module
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation.processes.fork import num_usable_cores
from fl_lightning.models import ImageClassifier

CONFIGS = Path(__file__).parents[2] / "configs"
NETWORK = yaml.safe_load((CONFIGS / "quickstart.yaml").read_text())["model"]["init_args"]
QUICK = ["--config", str(CONFIGS / "quickstart.yaml")]
TESTED = ["--data.init_args.client_test_fraction", "0.1"]  # clients hold out test examples as well
QUIET = ["--trainer.enable_progress_bar", "false", "--report", "false"]
ONE_ROUND = ["--trainer.max_epochs", "1", "--trainer.devices", "1", *QUIET]
SHORT = [*ONE_ROUND, "--federation.local_epochs", "1"]
SMALL = str(Path(__file__).with_name("small_run.yaml"))
LAST = "runs/quickstart/version_0/checkpoints/last.ckpt"


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture(scope="module")
def one_round(tmp_path_factory):
    """A folder with a run of one round, which has been trained once for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("one_round"))
        patch.setattr(sys, "argv", ["fl-lightning"])
        with contextlib.redirect_stdout(io.StringIO()) as said:
            main(["fit", *QUICK, *TESTED, *SHORT])
        Path("said.txt").write_text(said.getvalue())
        return Path.cwd()


@pytest.fixture
def trained(in_an_empty_folder, one_round):
    """A run of one round, of which a test has a copy."""
    shutil.copytree(one_round / "runs", "runs")


def fails(capsys, *args):
    """Run, expect it to fail, and return what it says, which must be a line without traceback."""
    with pytest.raises(SystemExit) as exit_:
        main(list(args))
    said = capsys.readouterr().err
    if isinstance(exit_.value.code, str):
        said = exit_.value.code
    else:
        assert exit_.value.code == 2
    assert "Traceback" not in said
    return said.strip().splitlines()[-1]


MISTAKES = {
    "federation.cohort.init_args.fraction=1.5": r"fraction must be in \(0, 1\], got 1.5",
    "federation.local_epoch=2": r"'local_epoch' is not accepted.*'local_epochs'",
    "federation.local_steps=3": "either local_steps or local_epochs",
    "federation.on_client_failure=ignore": "ignore",
    "federation.min_replies=6": "min_replies is 6, but a round has at most 5 clients",
    "trainer.val_check_interval=100": "trainer.check_val_every_n_epoch",
    "trainer.gradient_clip_val=-1": "gradient_clip_val must be at least 0 and finite",
    "model.init_args.optimizer.init_args.lr=-1": r"optimizer.init_args.lr must be at least 0 and",
    "model.class_path=fl_lightning.NoSuchModel": "has no attribute 'NoSuchModel'",
    "model.init_args.network=vit_tinny": "no 'vit_tinny' in timm",
    "data.init_args.num_clients=5000": "more clients than examples",
    "data.init_args.client_val_fraction=1": r"client_val_fraction must be in \[0, 1\)",
    "data.init_args.partition.init_args.classes_per_client=11": "number of classes, 10, got 11",
    "data.init_args.partition.init_args.classes=3": "'classes' is not acc.*classes_per_client",
    "trainer.strategy=ddp": "set trainer.strategy to federated",
    "trainer.accumulate_grad_batches=0": "accumulate_grad_batches must be at least 1",
    "federation.server_optimizer=torch.optim.LBFGS": "server_optimizer cannot step",
    "model.init_args.num_classes=5": "model.num_classes is 5, but the data have the label 9",
    "model.init_args.in_chans=3": "in_chans is 3, and the images have 1 channels",
    "model.init_args.image_size=16": "image_size is 16, and the images are 8 x 8",
    "federation.updates=[fl_lightning.updates.QSGD, fl_lightning.updates.PowerSGD]": (
        "federation.updates: low rank 2 must get all numbers unrounded: put it before"
    ),
}


@pytest.mark.parametrize("word", MISTAKES)
def test_mistakes_are_told_in_a_sentence(word, capsys):
    said = fails(capsys, "fit", *QUICK, *ONE_ROUND, f"--{word}")
    assert re.search(MISTAKES[word], said), said
    assert len(said) < 600


BROKEN = """
from fl_lightning import ImageClassifier

class Broken(ImageClassifier):
    def training_step(self, batch, batch_idx):
        return 1 / 0
"""


@pytest.mark.parametrize("devices", ["1", "2"])
def test_a_client_that_fails_is_one_sentence_under_what_its_module_raised(
    devices, capsys, tmp_path, monkeypatch
):
    run = ["fit", "--config", SMALL]
    run += ["--trainer.devices", devices, "--federation.engine", "sequential"]
    said = fails(capsys, *run, "--model.optimizer.lr", "1e30")
    assert re.fullmatch(r"fl-lightning: round 1, client \d: its training loss is (nan|inf).*", said)
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main([*run, "--model", "broken.Broken"])
    assert "ZeroDivisionError: division by zero" in exit_.value.code
    above = [line for line in capsys.readouterr().err.splitlines() if "| WARNING" not in line]
    assert above[0].startswith("Traceback")
    assert above[-1] == "ZeroDivisionError: division by zero"
    assert len(above) < 30


def test_the_resolved_config_is_printed_and_saved(one_round, capsys):
    with pytest.raises(SystemExit):
        main(["fit", *QUICK, "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["federation"]["local_epochs"] == 4
    assert printed["federation"]["min_replies"] == 1
    saved = yaml.safe_load((one_round / "runs/quickstart/version_0/config.yaml").read_text())
    assert saved["federation"]["local_epochs"] == 1


@pytest.mark.parametrize(
    ("network", "of_class"),
    [
        ("ImageClassifier", {}),
        ("nas.OneShot", {"space": "fl_lightning.nas.ResNet"}),
        ("nas.Supernet", {"space": "fl_lightning.nas.NASBench201"}),
    ],
)
def test_an_optimizer_that_yaml_names_has_its_own_defaults(network, of_class, tmp_path, capsys):
    given = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.25}}
    options = of_class | {"num_classes": 10}
    model = {"class_path": f"fl_lightning.{network}", "init_args": options}
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({"model": model}))
    words = [f"--config={tmp_path}/model.yaml", "--data", "Digits", "--model.optimizer.lr", "0.1"]
    assert "class_path: torch.optim.SGD" in fails(capsys, "fit", *words)  # it has none
    options["optimizer"] = given
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({"model": model}))
    resolved = yaml.safe_load(resolve([f"--config={tmp_path}/model.yaml", "--data", "Digits"]))
    options = resolved["model"]["init_args"]["optimizer"]["init_args"]
    [plain] = torch.optim.SGD([torch.zeros(1)], lr=0.25).param_groups
    assert options == {name: value for name, value in plain.items() if name != "params"}


def test_fit_says_where_everything_is(one_round):
    said = (one_round / "said.txt").read_text()
    folder = "runs/quickstart/version_0"
    last, best = (line for line in said.splitlines() if line.startswith("checkpoint: "))
    assert last == f"checkpoint: {folder}/checkpoints/last.ckpt (after round 1)"
    assert re.fullmatch(
        rf"checkpoint: {folder}/checkpoints/best.ckpt \(best val/accuracy, 0\.\d{{4}}, after round 1\)",
        best,
    )
    assert f"logs:       {folder}" in said
    assert "tensorboard --logdir runs" in said
    assert "test/accuracy" in said
    for name in ("checkpoints/last.ckpt", "checkpoints/best.ckpt", "partition.csv", "config.yaml"):
        assert (one_round / folder / name).exists()


@pytest.mark.skipif(num_usable_cores() == 1, reason="one core only")
def test_every_core_takes_part_unless_told_otherwise(caplog):
    for devices in ("auto", "1"):
        main(["fit", "--config", SMALL, "--trainer.devices", devices])
    assert "trainer.devices: 2 processes of one thread each" in caplog.text  # a client each
    several, alone = (
        torch.load(f"lightning_logs/version_{n}/checkpoints/last.ckpt")["state_dict"]
        for n in (0, 1)
    )
    assert all(torch.equal(tensor, several[name]) for name, tensor in alone.items())


def test_two_processes_are_one_run(capsys, caplog):
    two = [*QUICK, *TESTED, *QUIET, "--trainer.devices", "2", "--federation.local_epochs", "1"]
    main(["fit", *two, "--trainer.max_epochs", "1"])
    assert "trainer.strategy: federated, because there are several devices" in caplog.text
    assert "checkpoint: runs/quickstart/version_0/checkpoints/last.ckpt" in capsys.readouterr().out
    main(["fit", *two, "--trainer.max_epochs", "2", "--ckpt_path", "last"])
    assert [path.name for path in Path("runs/quickstart").iterdir()] == ["version_0"]
    folder = Path("runs/quickstart/version_0")
    for name in ("checkpoints/best.ckpt", "partition.csv", "clients_validation.csv", "config.yaml"):
        assert (folder / name).exists()
    assert torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 2
    events = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [0, 1]
    assert len((folder / "clients_test.csv").read_text().splitlines()) == 1 + 20


TRAINS_ONLY = """
from fl_lightning.data import Digits
from lightning.pytorch import LightningDataModule
class TrainsOnly(LightningDataModule):
    def train_dataloader(self):
        digits = Digits(batch_size=16)
        digits.setup("fit")
        return digits.train_dataloader()
"""


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_two_processes_need_no_loader_but_that_of_training(capsys, tmp_path, monkeypatch):
    (tmp_path / "trains_only.py").write_text(TRAINS_ONLY)
    monkeypatch.syspath_prepend(tmp_path)
    config = yaml.safe_load(Path(SMALL).read_text())
    config["data"]["init_args"]["source"] = {"class_path": "trains_only.TrainsOnly"}
    config["trainer"] |= {"devices": 2, "enable_progress_bar": True, "max_epochs": 1}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config | {"report": True}))
    main(["fit", "--config", "run.yaml"])
    said = capsys.readouterr().out
    assert "report:     " in said
    assert "next:" not in said


@pytest.mark.usefixtures("trained")
def test_validate_and_test_report_global_and_per_client_metrics(capsys, caplog):
    checkpoint = ["--ckpt_path", LAST]
    for command, metric in (("validate", "val/accuracy"), ("test", "test/accuracy")):
        caplog.clear()
        capsys.readouterr()
        main([command, *QUICK, *TESTED, "--trainer.enable_progress_bar", "false", *checkpoint])
        assert metric in capsys.readouterr().out
        assert re.search(rf"clients: {metric} mean .* over 20 clients", caplog.text)
        assert f"{command}: the model after round 1, {checkpoint[1]}" in caplog.text


@pytest.mark.usefixtures("trained")
def test_predict_writes_probabilities(capsys):
    main(["predict", *QUICK, "--trainer.enable_progress_bar", "false", "--ckpt_path", LAST])
    path = Path("runs/quickstart/version_1/predictions.csv")
    assert capsys.readouterr().out.splitlines()[-1] == f"predictions: {path}"
    first, *rows = [line.split(",") for line in path.read_text().splitlines()]
    assert first[:3] == ["loader", "row", "prediction_0"]
    assert [int(row[1]) for row in rows] == list(range(len(rows)))
    assert all(sum(map(float, row[2:])) == pytest.approx(1.0, abs=1e-5) for row in rows)


def test_without_the_federation_block_training_is_central():
    central = ["--config", str(CONFIGS / "centralized.yaml")]
    main(["fit", *QUICK, *central, *ONE_ROUND])
    checkpoint = next(Path("runs/quickstart").rglob("best.ckpt"))
    state = torch.load(checkpoint, weights_only=True)
    assert state["global_step"] == 81  # 1294 examples in batches of 16
    assert "Federation" not in state["callbacks"]


@pytest.mark.usefixtures("trained")
def test_a_checkpoint_of_another_model_partition_or_seed_is_refused(capsys):
    again = ["fit", *QUICK, *TESTED, "--trainer.max_epochs", "2", "--ckpt_path", "last"]
    again += ["--resume_changed", "true"]
    other = "--model.init_args.network_kwargs.embed_dim"
    assert "another model" in fails(capsys, *again, other, "32")
    assert "another partition" in fails(capsys, *again, "--data.init_args.num_clients", "10")
    assert "another seed" in fails(capsys, *again, "--federation.seed", "5")


@pytest.mark.parametrize(
    ("option", "some", "none"),
    [
        ("aggregator", ["Krum", "SecureMean", "Mean"], "FedAdam"),
        ("updates", ["TopK", "ErrorFeedback"], "SparseSGDM"),
    ],
)
def test_help_lists_what_an_option_takes_and_the_options_of_each(option, some, none, capsys):
    main(["fit", *QUICK, f"--federation.{option}.help"])
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in some)
    assert none not in said
    first = re.findall(r"^  (\w+)", said, re.MULTILINE)[0]
    with pytest.raises(SystemExit):
        main(["fit", f"--federation.{option}.help", first])
    assert "usage" in capsys.readouterr().out


def test_json_configs_work_as_well():
    config = yaml.safe_load((CONFIGS / "quickstart.yaml").read_text())
    Path("quick.json").write_text(json.dumps(config))
    main(["fit", "--config", "quick.json", *ONE_ROUND, "--trainer.fast_dev_run", "true"])


def test_an_exported_program_and_its_onnx_give_the_modules_outputs(trained, capsys):
    onnx = pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator

    words = ["export", f"--ckpt_path={LAST}", "--program=model.pt2"]
    assert "has no example_input_array: give --input_shape" in fails(capsys, *words)
    Path("here").write_text("a file")  # which is told before the checkpoint is read
    said = fails(capsys, "export", "--ckpt_path=none.ckpt", "--state_dict=here/model.pt")
    assert "export --state_dict: here/model.pt cannot be written: here is a file" in said
    main([*words, "--onnx=model.onnx", "--state_dict=new/model.pt", "--input_shape=[1,8,8]"])
    module, images = trained_module(Path(LAST)), torch.rand(5, 1, 8, 8)
    with torch.no_grad():
        expected = module(images)
        assert torch.equal(torch.export.load("model.pt2").module()(images), expected)
    evaluator = ReferenceEvaluator(onnx.load("model.onnx"))
    (found,) = evaluator.run(None, {evaluator.input_names[0]: images.numpy()})
    assert torch.from_numpy(found) == pytest.approx(expected, abs=1e-5)
    weights = torch.load("new/model.pt")
    assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())


class OfExamples(LightningModule):
    def __init__(self, network, example=None):
        super().__init__()
        self.forward, self.example_input_array = network.forward, example


IMAGES, CHOSEN = torch.zeros(4, 3), nn.Embedding(5, 2)


A_BATCH = "must be a batch as one tensor, got a"


def test_what_is_no_program_is_told_in_a_sentence():
    for network, example, shape, says in (
        (CHOSEN, None, [4], r"by --input_shape \[4\], inputs of torch.float32 .* leave --input_s"),
        (nn.Unflatten(0, (2, 1)), IMAGES, None, "by example_input_array.* batches of any size"),
        (nn.Linear(2, 1), IMAGES, None, r"shape \[2, 3\]: .* must have same reduction dim"),
        (CHOSEN, (IMAGES, IMAGES), None, f"{A_BATCH} tuple: give --input_shape"),
        (CHOSEN, {"x": IMAGES}, None, f"{A_BATCH} dict: give --input_shape"),
        (CHOSEN, torch.tensor(1.0), None, "as one tensor, got a Tensor without dimensions"),
    ):
        with pytest.raises(ConfigurationError, match=f"^export: .*{says}"):
            program_of(OfExamples(network, example), shape)
    words = torch.tensor([[0, 4], [3, 1], [2, 2]])  # whole numbers, by the module's example
    program = program_of(OfExamples(CHOSEN, torch.tensor([[1, 2]])), None)
    assert torch.equal(program.module()(words), CHOSEN(words))


class Clock(Callback):
    """A clock that goes on by 1 s in a round, 3 s in a validation and 1000 s after the fit."""

    now = 0.0

    def on_train_epoch_end(self, trainer, pl_module):
        Clock.now += 1

    def on_validation_start(self, trainer, pl_module):
        Clock.now += 3

    def on_train_end(self, trainer, pl_module):
        Clock.now += 1000


@pytest.fixture
def estimate(caplog, monkeypatch):
    """Run dry with 2 of 5 clients and the clock above; return the estimate, line by line."""
    clock = SimpleNamespace(thread_time=lambda: Clock.now)
    monkeypatch.setattr("fl_lightning.reports.overview.time", clock)
    monkeypatch.setattr("fl_lightning.reports.overview._DRY_CLIENTS", 2)

    def run(*words):
        callbacks = f"--trainer.callbacks=[{__name__}.Clock]"
        engine = "--federation.engine=sequential"  # none is tried, which takes long without an end
        main(["fit", *QUICK, *SHORT, callbacks, engine, "--dry_run=true", *words])
        assert not list(Path().iterdir())
        return [line for line in caplog.messages if line.startswith("estimate: ")]

    return run


def bytes_of(lines):
    return [float(line.split()[1]) for line in lines]


def network_size():
    network = ImageClassifier(**NETWORK | {"optimizer": None})
    return sum(tensor.numel() for tensor in network.parameters())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        # 1 s for 2 clients, 2.5 s for 5, and 3 s in every third round
        ("max_epochs=40 check_val_every_n_epoch=3", "2:20 for 40 rounds, 3.5 s for each"),
        ("max_epochs=40 max_steps=8", "0:44 for 8 rounds, 5.5 s for each"),
        # a round is one batch: 3 s in every tenth
        (
            "max_epochs=40 check_val_every_n_epoch=null val_check_interval=10",
            "1:52 for 40 rounds, 2.8 s for each",
        ),
    ],
)
def test_a_dry_run_estimates_the_seconds_and_bytes_of_the_whole_fit(estimate, words, says):
    found = estimate(*(f"--trainer.{word}" for word in words.split()))
    rounds = int(re.search(r"for (\d+) rounds", says)[1])
    assert found[0] == f"estimate: {says}"
    # up and down: 5 clients, float32, a header
    megabytes = 2 * [rounds * 5 * 4 * network_size() / 1e6]
    assert bytes_of(found[2:]) == pytest.approx(megabytes, rel=0.005)


def test_a_dry_run_of_a_fit_without_end_estimates_a_round(estimate, monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    says, *sent = estimate("--trainer.max_epochs=-1")
    assert says == "estimate: 5.5 s for each round, whose number has no limit"
    assert [line.split(maxsplit=3)[3] for line in sent] == [
        "from clients in each round",
        "to clients in each round",
    ]
    assert bytes_of(sent) == pytest.approx(2 * [5 * 4 * network_size() / 1e6], rel=0.005)


PRIVATE = "privacy=CentralDP privacy.clip_norm=1.0 privacy.noise_multiplier=1.0 aggregator=null"


@pytest.mark.filterwarnings("ignore:privacy")
@pytest.mark.parametrize(
    "words", [PRIVATE, "min_replies=4", "aggregator=Krum aggregator.num_attackers=1"]
)
def test_a_dry_run_trains_all_clients_where_their_number_has_a_meaning(estimate, words):
    given = [f"--federation.{word}" for word in words.split()]
    assert estimate("--trainer.max_epochs=40", *given)[0] == (
        "estimate: 2:40 for 40 rounds, 4 s for each"
    )


def test_a_dry_run_leaves_the_checkpoints_of_an_earlier_run_alone(estimate, tmp_path_factory):
    saved = tmp_path_factory.mktemp("models") / "best.ckpt"
    saved.write_text("of a run")
    options = {"dirpath": str(saved.parent), "filename": "best", "enable_version_counter": False}
    options |= {"monitor": "val/accuracy", "mode": "max"}
    saver = {"class_path": "ModelCheckpoint", "init_args": options}
    estimate(f"--trainer.callbacks+={json.dumps(saver)}")
    assert [path.name for path in saved.parent.iterdir()] == ["best.ckpt"]
    assert saved.read_text() == "of a run"


class Stop(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupted_dry_run_names_no_checkpoint(capsys):
    stop = f"--trainer.callbacks=[{__name__}.Stop]"
    with pytest.raises(SystemExit):
        main(["fit", *QUICK, *SHORT, stop, "--trainer.max_epochs=3", "--dry_run=true"])
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "stopped by Ctrl-C before the first checkpoint: start again with the same command" in said
    )
