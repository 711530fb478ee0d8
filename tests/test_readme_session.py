"""What the README tells a user to type, typed, and what it promises, seen.

Every command is taken out of the README and run with this environment's programs in a folder that
looks like the repository, with small data where the README's own would have to be downloaded.
"""

import csv
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
import typed
from readme import ROOT, commands, first_with, words_of
from small_sets import write_folder, write_pickles

QUICKSTART = first_with("configs/quickstart.yaml")
NAMED = first_with("fl-lightning fit --config quickstart")
INIT = first_with("fl-lightning init my_project --template")
PROJECT = first_with("--config config.yaml")
EXPORT = [command for command in commands() if "fl-lightning export" in command]
CENTRAL = first_with("configs/centralized.yaml")
RESUME = first_with("--ckpt_path last")
TEST = first_with("fl-lightning test")
SPARSE = first_with("configs/sparse_quickstart.yaml")
CIFAR100 = first_with("configs/cifar100.yaml")
IID = first_with("configs/cifar10_images.yaml")
TWO_CLASSES = first_with("classes_per_client 2")
PLOT = first_with("benchmarks.plot_runs")
PER_CLIENT = first_with("benchmarks.per_client")
MEMORY = first_with("benchmarks.memory")
REMEMBERED = first_with("benchmarks.memory --parameters")
CODEC = first_with("benchmarks.codec")
SECURE = first_with("benchmarks.secure")
SPARSE_STEP = first_with("benchmarks.sparse_step")
TURNS = first_with("benchmarks.turns W3")
TURNS_OF_TWO = first_with("benchmarks.turns W1 --devices 2")

A_SMALL_VIT = (
    "--trainer.max_epochs 1 --model.init_args.pretrained false"
    " --model.init_args.network_kwargs '{depth: 1, embed_dim: 48}' --model.init_args.image_size 32"
    " --data.init_args.source.init_args.image_size 32"
)

OF_THE_KIND_BEFORE = "takes many runs; a command before it is of the same kind"
# words of commands, and why they are not typed
WHY_NOT = {
    "pip install": "needs a network",
    "tensorboard": "serves until it is stopped",
    "pytest|ruff|mypy|sphinx|python docs/": "checks the checkout, or writes into it",
    "^fl-lightning init my_project$": "is the command with --template images",
    "^cd my_project": "the next command starts there",
    "--rivals pfl": "makes an environment for each of the other frameworks",
    "configs/algorithms/": "test_algorithm_configs runs every one of them over a small base",
    r"configs/(compressed|low_rank|private|private_examples|secure|encrypted|sparse)\.yaml": (
        "test_configs runs it on small data"
    ),
    "accelerator gpu|benchmarks.gpu": "needs a GPU",
    "benchmarks --write": "takes 12 minutes; test_benchmarks runs its parts",
    "benchmarks.network": "starts a network twice; test_real_network starts one",
    "benchmarks.calibration": "test_calibration_benchmark runs it at a tiny scale",
    "mask_rules|robustness|virtual_time|experiments/compression": OF_THE_KIND_BEFORE,
    "cifar10_sparse": "takes 27 runs and the better part of an hour",
}
NOT_TYPED = {c: why for c in commands() for words, why in WHY_NOT.items() if re.search(words, c)}
# what has to be typed before a command, in this order
BEFORE = {
    PROJECT: [INIT],
    **{command: [QUICKSTART] for command in EXPORT},
    CENTRAL: [QUICKSTART],  # so that the quickstart is version_0
    RESUME: [QUICKSTART],
    TEST: [QUICKSTART],
    TWO_CLASSES: [IID],
    PLOT: [IID, TWO_CLASSES],
}
# words after a command's own, to be quick and need no network; its own words are never changed
SHORTER = {
    SPARSE: "-- --trainer.max_epochs 1 --data.init_args.source.init_args.val_fraction 0.8",
    QUICKSTART: "--trainer.max_epochs 10",
    NAMED: "--trainer.max_epochs 1 --report false --trainer.logger.init_args.save_dir named",
    PROJECT: "--trainer.max_epochs 1 --report false",
    RESUME: "--trainer.max_epochs 10 --report false",
    CENTRAL: "--trainer.max_epochs 5 --report false",
    CIFAR100: f"{A_SMALL_VIT} --report false",
    **dict.fromkeys([IID, TWO_CLASSES], "--report false"),
    PER_CLIENT: "--rounds 1 --models 1",
    CODEC: "--size 100000 --repetitions 2",
    SPARSE_STEP: "--network vit_tiny_patch16_224 --turns 1",
    REMEMBERED: "--parameters 100000",
    TURNS: "--scale 0.01 --rounds 1 --lengths 10",
    SECURE: "--size 1000 --clients 5 --paillier 100 --rivals ''",
}
# Python runs this file when it starts: small files cannot have the checksums of the real ones
ANY_CHECKSUM = """
import os
import torchvision
torchvision.datasets.cifar.check_integrity = lambda path, md5=None: os.path.isfile(path)
"""
# from the very start of Python: what its promises cover, peaks of memory
STARTED_ANEW = (QUICKSTART, MEMORY)


class Said(NamedTuple):
    text: str
    seconds: float


def make_clone(folder):
    """Make a folder that looks like the repository, and has data, but takes the runs."""
    for name in ("configs", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.png"))
    names = [f"class {i:02}" for i in range(100)]
    for part, num_images in (("train", 40), ("test", 10)):
        write_folder(
            folder / "cifar10", part, names[:10], num_images, size=(32, 32), extension="jpg"
        )
    files = {"train": 2000, "test": 100}
    meta = ("meta", "fine_label_names")
    write_pickles(folder / "data" / "cifar-100-python", files, "fine_labels", meta, names)
    (folder / "any_checksum").mkdir()
    (folder / "any_checksum" / "sitecustomize.py").write_text(ANY_CHECKSUM)


def environment(command, folder):
    """Where this environment's programs come first, and libraries are compiled once for all."""
    programs = str(Path(sys.executable).parent)
    variables = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONDONTWRITEBYTECODE": "",
    }
    if "configs/cifar100.yaml" in command:
        variables["PYTHONPATH"] = str(folder / "any_checksum")
    return {**os.environ, **variables}


def run(command, folder):
    """Run a command in the folder, as ``uv run`` would."""
    words = words_of(command) + shlex.split(SHORTER.get(command, ""))
    folder = folder / "my_project" if command == PROJECT else folder
    way = run_anew if command in STARTED_ANEW else run_forked
    began = time.monotonic()
    code, out, err = way(words, folder, environment(command, folder))
    assert code == 0, err[-2000:]
    return Said(out + err, time.monotonic() - began)


def run_anew(words, folder, variables):
    done = subprocess.run(
        words, check=False, cwd=folder, env=variables, text=True, capture_output=True, timeout=300
    )
    return done.returncode, done.stdout, done.stderr


def run_forked(words, folder, variables):
    said = [folder / "out.txt", folder / "err.txt"]
    process = typed.start(words, folder, variables, said)
    process.join(300)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode, *(path.read_text() for path in said)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clone")
    make_clone(folder)
    return folder


@pytest.fixture(scope="module")
def type_in(folder):
    """A function that types a command of the README, once, after those that it needs."""

    @functools.cache
    def type_in(command):
        for earlier in BEFORE.get(command, []):
            type_in(earlier)
        return run(command, folder)

    return type_in


# test_compare compares toys, test_masks counts the bytes of what a mask lets move, and the command before
# takes turns in one process
SLOW = (SPARSE, TURNS_OF_TWO)
TYPED = [
    pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c
    for c in commands()
    if c not in NOT_TYPED
]


@pytest.mark.parametrize("command", TYPED, ids=str)
def test_every_command_of_the_readme_runs(command, type_in):
    """A new command runs here too; if it cannot as it stands, the tables above are the place."""
    type_in(command)


def test_commands_that_are_not_typed_are_still_in_the_readme():
    for words in WHY_NOT:
        assert any(re.search(words, command) for command in commands()), words


def accuracy(said):
    return float(re.search(r"test/accuracy +([0-9.]+)", said.text).group(1))


def classes_of_clients(run_folder):
    with (run_folder / "partition.csv").open() as file:
        return [int(row["num_classes"]) for row in csv.DictReader(file)]


def test_the_quickstart_keeps_its_promises(type_in, folder):
    said = type_in(QUICKSTART)
    assert accuracy(said) >= 0.7  # after fewer rounds than its own
    assert said.seconds < 180  # start and test included, on a busy machine
    assert "tensorboard --logdir runs" in said.text
    assert re.search(r"round 10/10: val/accuracy .*train/loss", said.text)
    assert re.search(
        r"val/accuracy( +[0-9.]+){4}\n", said.text
    )  # model, mean, spread, worst decile
    log = (folder / "runs/quickstart/version_0/run.log").read_text()
    assert re.search(r"clients: val/accuracy mean .* worst decile .* over 20 clients", log)
    assert classes_of_clients(folder / "runs/quickstart/version_0") == [5] * 20


def test_the_saved_model_is_tested_to_the_same_accuracy(type_in, folder):
    assert accuracy(type_in(TEST)) >= 0.7
    logs = [path.read_text() for path in (folder / "runs").rglob("run.log")]
    told = "no test examples (data.client_test_fraction is 0)"
    assert any(log.count(" test --config ") and told in log for log in logs)


def test_resuming_a_finished_run_trains_no_more(type_in):
    assert accuracy(type_in(RESUME)) == accuracy(type_in(QUICKSTART))


def test_the_same_files_train_centrally(type_in):
    said = type_in(CENTRAL)
    assert accuracy(said) >= 0.8
    assert "round 1" not in said.text


@pytest.mark.slow
def test_a_tenth_of_the_entries_is_a_tenth_of_the_bytes(type_in, folder):
    said = type_in(SPARSE)
    assert "| dense " in said.text
    with (folder / "runs/sparse_quickstart/results.csv").open() as file:
        dense, *sparse = [float(row["bytes up"]) for row in csv.DictReader(file)]
    assert sparse
    assert all(num_bytes <= 0.105 * dense for num_bytes in sparse)


def test_layered_files_give_cifar100_clients_of_five_classes(type_in, folder):
    said = type_in(CIFAR100)
    assert "round 1/1: " in said.text
    assert classes_of_clients(folder / "runs/cifar100/version_0") == [5] * 100


def test_both_runs_on_images_learn_from_the_clients_that_they_name(type_in, folder):
    for command in (IID, TWO_CLASSES):
        assert "round 10/10: " in type_in(command).text
        assert accuracy(type_in(command)) >= 0.2  # twice what guessing gives
    assert min(classes_of_clients(folder / "runs/cifar10_images/version_0")) > 5
    assert classes_of_clients(folder / "runs/cifar10_images/version_1") == [2] * 10


def test_the_figure_shows_both_runs_in_both_panels(type_in, folder):
    type_in(PLOT)
    pixels = matplotlib.image.imread(folder / "benchmarks/figures/cifar10.png")[..., :3]
    for panel in np.array_split(pixels, 2, axis=1):
        for color in ("tab:blue", "tab:orange"):
            is_color = np.isclose(panel, matplotlib.colors.to_rgb(color), atol=0.01).all(axis=2)
            assert is_color.sum() > 500  # more than in the legend


def test_what_a_hundred_clients_remember_is_measured(type_in):
    text = type_in(REMEMBERED).text
    told = re.search(
        r"remember 100,000 numbers each \(0.04 GB\): peak memory (\d+) MB, a round", text
    )
    assert int(told.group(1)) > 100


def test_ten_thousand_clients_cost_no_more_memory_than_ten(type_in):
    text = type_in(MEMORY).text
    added = re.search(r"10,000 clients \d+ MB, ([+-]\d+) MB", text).group(1)
    assert int(added) <= 200
    million = re.search(r"1,000,000 clients: \d+ MB, ([+-]\d+) MB; set-up ([\d.]+) s", text)
    assert int(million.group(1)) <= 2000
    assert float(million.group(2)) <= 20
