"""The commands and snippets of the pages on architecture search run."""

import re
import shlex
import shutil
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import yaml
from readme import ROOT
from small_sets import write_folder
from toys import SHORT_FIT

from fl_lightning.cli import main
from fl_lightning.nas import NASBench201
from fl_lightning.nas.spaces.nas_bench_201 import CELL_COLUMN, COLUMNS

PAGES = [
    "architecture_search",
    "networks_of_all_sizes",
    "search_without_training",
    "search_results",
]
DOC = "\n".join((ROOT / "docs" / f"{page}.md").read_text() for page in PAGES)
# comparisons take hours and data of the user's: test_configs plans them
BLOCKS = [
    re.findall(r"^uv run fl-lightning (?!compare)(.*)$", block, re.MULTILINE)
    for block in re.findall(r"```bash\n(.*?)```", DOC, re.DOTALL)
]
STORIES = [block for block in BLOCKS if any(not command.startswith("fit ") for command in block)]
STORIES += [block for block in BLOCKS if block not in STORIES and "transfer.yaml" in str(block)]
FIT = [command for block in BLOCKS if block not in STORIES for command in block]
QUICKSTART = FIT[0]
SHORT = (*SHORT_FIT, "--trainer.limit_val_batches=1", "--data.init_args.num_clients=5")

pytestmark = [
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]


# what makes other commands short, whatever the machine does meanwhile
QUICK = {
    "search": "--budget 3",
    "latency": "--rounds 2 --calibration 3 --held_out 3",
}


def type_in(command):
    name = command.split()[0]
    if name != "fit":
        command = command.replace("latency_ms<=0.4", "latency_ms<=1e6")
        main([*shlex.split(command), *QUICK[name].split()])
        return
    of_epochs = ("space/mobilenet.yaml", "space/resnet", "space/vit", "configs/quickstart.yaml")
    if "--federation null" in command:
        small = ["--trainer.limit_train_batches=1"]
    elif any(name in command for name in of_epochs):
        small = ["--federation.local_epochs=1"]
    else:  # alpha of proxyless moves in every fifth step
        small = [f"--federation.local_steps={5 if 'proxyless' in command else 1}"]
    if "configs/nas/" in command and "transfer.yaml" not in command:
        examples = 128 if "one_shot" in command else 16
        small += [f"--model.init_args.recalibration_examples={examples}"]
    if "enas.yaml" in command:
        small += ["--model.init_args.learn.init_args.best_of=3"]
    main([*shlex.split(command), *SHORT, *small])


@pytest.fixture(autouse=True)
def _clone(in_an_empty_folder):
    Path("configs").symlink_to(ROOT / "configs")


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """The folder `runs` that the first command leaves."""
    folder = tmp_path_factory.mktemp("quickstart")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["fl-lightning"])
        Path("configs").symlink_to(ROOT / "configs")
        type_in(QUICKSTART)
    return folder / "runs"


def is_slow(command):
    return "space/darts" in command or "cifar10" in command


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=[pytest.mark.slow] * is_slow(c)) for c in FIT]
)
def test_commands_run(command, quickstart):
    if "version_0/retrain.yaml" in command:
        shutil.copytree(quickstart, "runs")
    if "cifar10" in command:
        names = [f"class {i}" for i in range(10)]
        write_folder(Path("cifar10"), "train", names, 6, size=(32, 32))
        write_folder(Path("cifar10"), "test", names, 1, size=(32, 32))
    type_in(command)
    assert list(Path("runs").rglob("*.ckpt"))


@pytest.mark.parametrize(
    "story", [pytest.param(s, marks=[pytest.mark.slow] * ("latency" in str(s))) for s in STORIES]
)
def test_stories_run(story):
    if "table.csv" in str(story):
        write_table(Path("table.csv"))
    for command in story:
        type_in(command)
        assert is_written(command), command
    if "transfer.yaml" in story[-1] and "nas_quickstart" in story[-1]:
        config = yaml.safe_load(Path("runs/nas_quickstart/version_2/config.yaml").read_text())
        assert config["data"]["init_args"]["source"]["init_args"]["classes"] == [5, 6, 7, 8, 9]
        files = (f"runs/nas_quickstart/version_{n}/checkpoints/last.ckpt" for n in (1, 2))
        before, after = (torch.load(file, weights_only=True)["state_dict"] for file in files)
        stem = next(name for name in after if "stem" in name)
        assert 0 < (after[stem] - before[stem]).abs().max() < 0.2  # it went on from there


def is_written(command):
    """Whether a command has left what it says, or what it leaves where it says nothing."""
    if command.startswith("fit "):
        return list(Path("runs").rglob("*.ckpt"))
    words = shlex.split(command)
    named = [
        words[number + 1]
        for number, word in enumerate(words)
        if word in ("--out", "--export", "--sweep")
    ]
    return all(Path(name).exists() for name in named or ["runs/search/best.yaml"])


def write_table(path):
    """Write all cells, whose accuracy is the number of their convolutions."""
    space = NASBench201()
    cells = [str(space.architecture(choices)) for choices in product(range(5), repeat=6)]
    rows = [",".join([cell, *[str(10 + cell.count("conv"))] * 3]) for cell in cells]
    path.write_text("\n".join([",".join([CELL_COLUMN, *COLUMNS.values()]), *rows]))


def test_the_run_leaves_what_the_table_says(quickstart):
    shutil.copytree(quickstart, "runs")
    table = re.findall(r"^\| (`cell.*?|`[a-z]+\.yaml`.*?) \|", DOC, re.MULTILINE)[:4]
    names = [name for row in table for name in re.findall(r"`([a-z./]+)`", row)]
    assert len(names) >= 5
    assert all((Path("runs/nas_quickstart/version_0") / name).exists() for name in names)
    retrain = yaml.safe_load(Path("runs/nas_quickstart/version_0/retrain.yaml").read_text())
    assert retrain["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.1
    block, _ = re.findall(r"```yaml\n(.*?)```", DOC, re.DOTALL)
    Path("transfer.yaml").write_text(block)
    options = (
        "--data.init_args.source.init_args.classes '[0,1,2,3,4]' --data.init_args.search_fraction 0"
    )
    type_in(f"fit --config configs/nas/quickstart.yaml --config transfer.yaml {options}")


def test_python_runs(capsys):
    [block] = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
    exec(compile(block, "page", "exec"), {})  # noqa: S102 - our own words
    said = re.findall(r"print\(.*# (.*)$", block, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said


def test_every_config_is_in_the_tables():
    for path in (ROOT / "configs" / "nas").rglob("*.yaml"):
        assert path.name in DOC, path


def test_the_capability_is_what_a_model_takes():
    _, block = re.findall(r"```yaml\n(.*?)```", DOC, re.DOTALL)
    layer = {"model": {"init_args": yaml.safe_load(block)}}
    Path("capability.yaml").write_text(yaml.safe_dump(layer))
    type_in("fit --config configs/nas/one_shot_quickstart.yaml --config capability.yaml")


def test_commands_are_all_run():
    written = re.findall(r"^uv run fl-lightning (?!compare)(.*)$", DOC, re.MULTILINE)
    assert sorted(written) == sorted([*FIT, *(c for story in STORIES for c in story)])
