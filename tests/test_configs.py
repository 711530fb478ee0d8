"""Every file in configs/ runs for a round, on small data; algorithms and searches have their own tests."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torchvision
import yaml
from peft import PeftModel
from readme import commands
from small_sets import write_folder, write_idx, write_pickles
from test_readme_session import NOT_TYPED
from tiny_llama import LLAMA, ROWS, make_tokenizer
from toys import ACCELERATOR

from fl_lightning import ConfigurationError
from fl_lightning.cli import main
from fl_lightning.cli.commands import parser_of, resolve
from fl_lightning.cli.export import export
from fl_lightning.experiments import Experiment
from fl_lightning.experiments.experiment import plan_runs
from fl_lightning.models import CausalLM
from fl_lightning.sparsity import load_mask

TESTED_ELSEWHERE = ("algorithms", "nas", "sweeps")
CONFIGS = Path(__file__).parents[1] / "configs"
SOURCE = "--data.init_args.source.init_args."
ONE_ROUND = {
    "--trainer.max_epochs": "1",
    "--trainer.check_val_every_n_epoch": "1",
    "--trainer.enable_progress_bar": "false",
    "--report": "false",
    "--trainer.accelerator": ACCELERATOR,
    "--trainer.devices": "1",
}
# a folder of a tokenizer and a file of texts stand in for those of the hub
LLM = {
    "--model.init_args.network": str({**LLAMA, "hidden_size": 16}),
    "--model.init_args.dtype": "float32",
    f"{SOURCE}dataset": "rows.jsonl",
    f"{SOURCE}tokenizer": "tokenizer",
    f"{SOURCE}prompt": "prompt",
    f"{SOURCE}completion": "completion",
    f"{SOURCE}val_fraction": "0.2",
    f"{SOURCE}test_fraction": "0.2",
    "--data.init_args.partition.init_args.attribute": "user",
    "--federation.local_steps": "1",
    "--trainer.precision": "32-true",
}
# what makes a base small enough for a test; diffs are tried over the base that they name
SMALL = {
    "quickstart.yaml": {f"{SOURCE}val_fraction": "0.8"},
    "kmeans.yaml": {},
    "mnist.yaml": {
        "--federation.local_epochs": "1",
        "--data.init_args.num_clients": "20",
        f"{SOURCE}download": "false",
    },
    "cifar10_images.yaml": {
        "--federation.local_epochs": "1",
        f"{SOURCE}root": "images",
    },
    "llm.yaml": LLM,
    "cifar100.yaml": {
        "--model.init_args.pretrained": "false",
        "--model.init_args.network_kwargs": "{embed_dim: 12, depth: 1, num_heads: 3, patch_size: 8}",
        "--model.init_args.image_size": "32",
        f"{SOURCE}download": "false",
        f"{SOURCE}image_size": "32",
        "--data.init_args.num_clients": "20",
        "--trainer.precision": "bf16-mixed",  # what 16-mixed is on a CPU, after a warning
    },
}
DIFFS = {
    "centralized.yaml": "quickstart.yaml",
    "compressed.yaml": "quickstart.yaml",
    "encrypted.yaml": "quickstart.yaml",
    "low_rank.yaml": "quickstart.yaml",
    "noniid.yaml": "cifar100.yaml",
    "private.yaml": "quickstart.yaml",
    "private_examples.yaml": "quickstart.yaml",
    "secure.yaml": "quickstart.yaml",
    "sparse.yaml": "cifar100.yaml",
}

EXPERIMENTS = {  # and how many runs they are
    "sparse_quickstart.yaml": 4,
    "experiments/mask_rules.yaml": 39,
    "experiments/cifar10_sparse.yaml": 27,
    "experiments/niid_bench.yaml": 4,
    "experiments/private.yaml": 9,
    "experiments/compression.yaml": 9,
    "experiments/virtual_time.yaml": 12,
    "experiments/nas_bench_201.yaml": 36,
    "experiments/one_shot.yaml": 12,
}
GRIDS = {"experiments/robustness.yaml": (8, 5)}  # so many runs that the margins have to do


# Lightning's summary of a model in mixed precision counts bytes as if it were not
pytestmark = pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported")


@pytest.fixture(scope="module")
def small_data(tmp_path_factory):
    """Return a folder with small data sets."""
    folder, names = tmp_path_factory.mktemp("sets"), [f"class {i}" for i in range(100)]
    write_pickles(
        *(folder / "data" / "cifar-100-python", {"train": 800, "test": 200}, "fine_labels"),
        *(("meta", "fine_label_names"), names),
    )
    write_idx(folder / "data" / "MNIST" / "raw", num_train=160)
    write_folder(folder / "images", "train", names[:10], 30, size=(32, 32))
    write_folder(folder / "images", "test", names[:10], 4, size=(32, 32))
    make_tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return folder


@pytest.fixture(autouse=True)
def in_a_folder_with_data(small_data, tmp_path, monkeypatch):
    for name in ("data", "images", "tokenizer", "rows.jsonl"):
        (tmp_path / name).symlink_to(small_data / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    monkeypatch.setattr(
        torchvision.datasets.cifar, "check_integrity", lambda path, md5=None: Path(path).is_file()
    )


def run(*files):
    options = {**ONE_ROUND, **SMALL[files[0]]}
    layers = [word for file in files for word in ("--config", str(CONFIGS / file))]
    main(["fit", *layers, *(word for pair in options.items() for word in pair)])


def others(configs):
    """Return those that test_readme_session does not run, and no test of their own."""
    run_there = [command for command in commands() if command not in NOT_TYPED]
    return [
        name
        for name in configs
        if name != "llm.yaml" and not any(f"configs/{name}" in each for each in run_there)
    ]


@pytest.mark.parametrize("config", others(SMALL))
def test_every_base_runs_a_round(config):
    run(config)
    assert list(Path("runs").rglob("last.ckpt"))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks
def test_a_runs_adapter_gives_the_same_logits_in_plain_peft():
    run("llm.yaml")
    [last] = Path("runs").rglob("last.ckpt")
    main(["export", "--ckpt_path", str(last), "--adapter", "adapter", "--state_dict", "all.pt"])
    options = yaml.safe_load((CONFIGS / "llm.yaml").read_text())["model"]["init_args"]
    network = {**LLAMA, "hidden_size": 16}
    plain = PeftModel.from_pretrained(CausalLM(network).network, "adapter").eval()
    trained = CausalLM(network, adapter=options["adapter"])
    trained.load_state_dict(torch.load("all.pt"))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        logits = trained.eval()({"input_ids": tokens})
        assert torch.equal(plain(input_ids=tokens).logits, logits)
        assert not torch.equal(CausalLM(network).eval()({"input_ids": tokens}), logits)
    words = ["--ckpt_path", str(last), "--adapter", "adapter"]
    with pytest.raises(ConfigurationError, match="adapter exists"):
        export(parser_of("export").parse_args(words))


@pytest.mark.filterwarnings("ignore:privacy:UserWarning")  # what ε does not cover
@pytest.mark.filterwarnings("ignore:The number of training batches")  # few data
@pytest.mark.parametrize("config", others(DIFFS))
def test_every_diff_runs_over_its_base(config):
    run(DIFFS[config], config)
    assert list(Path("runs").rglob("best.ckpt"))


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_sparse_training_is_central_as_well():
    run("cifar100.yaml", "centralized.yaml", "sparse.yaml")
    [mask] = Path("runs").rglob("mask_v0.safetensors")
    assert load_mask(mask).density == pytest.approx(0.1, abs=1e-3)
    assert list(Path("runs").rglob("best.ckpt"))


def test_no_config_is_left_out():
    paths = [path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.yaml")]
    names = {path.as_posix() for path in paths if path.parts[0] not in TESTED_ELSEWHERE}
    assert names == {*SMALL, *DIFFS, *EXPERIMENTS, *GRIDS}


def experiment_of(name):
    given = parser_of("compare").parse_args(["--config", str(CONFIGS / name)])
    return Experiment(**{key: given[key] for key in Experiment.__dataclass_fields__})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), GRIDS.items())
def test_every_row_and_column_of_a_grid_is_understood(name, shape, tmp_path):
    experiment = experiment_of(name)
    assert tuple(map(len, experiment.grid.values())) == shape
    first = {axis: dict([next(iter(values.items()))]) for axis, values in experiment.grid.items()}
    for axis, values in experiment.grid.items():
        margin = replace(experiment, grid={**first, axis: values})
        runs = plan_runs(margin, out=tmp_path, options=[], resolve=resolve)
        assert len({run.fingerprint for run in runs}) == len(values)
    assert f"fl-lightning compare --config configs/{name}" in (CONFIGS / name).read_text()


@pytest.mark.parametrize(("name", "num_runs"), EXPERIMENTS.items())
def test_every_run_of_an_experiment_is_understood(name, num_runs, tmp_path):
    """Each configuration is parsed as its command would; a run of one is the README's business."""
    experiment = experiment_of(name)
    runs = plan_runs(experiment, out=tmp_path, options=[], resolve=resolve)
    assert len({run.fingerprint for run in runs}) == len(runs) == num_runs
    assert f"fl-lightning compare --config configs/{name}" in (CONFIGS / name).read_text()


def test_diffs_say_how_to_run_them_and_change_only_what_they_are_about():
    for config, base in DIFFS.items():
        typed = f"--config configs/{base} --config configs/{config}"
        assert typed in (CONFIGS / config).read_text()
    assert yaml.safe_load((CONFIGS / "centralized.yaml").read_text()) == {"federation": None}
    assert list(yaml.safe_load((CONFIGS / "noniid.yaml").read_text())) == ["data"]


def test_the_published_setting_is_the_one_in_the_file():
    config = yaml.safe_load((CONFIGS / "cifar100.yaml").read_text())
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    assert model["network"] == "vit_small_patch16_224.dino"
    assert model["optimizer"]["init_args"] == {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}
    assert model["schedule"] == {"kind": "cosine"}
    assert (data["num_clients"], data["source"]["init_args"]["batch_size"]) == (100, 64)
    assert config["federation"]["cohort"]["init_args"] == {"fraction": 0.1}
    assert config["federation"]["local_steps"] == 4
    assert config["trainer"]["max_epochs"] == 500
