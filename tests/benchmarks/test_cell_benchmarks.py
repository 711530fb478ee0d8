"""The benchmarks of searches in a table run on small images, and print what they found."""

import json
import sys
from itertools import product

import pytest
from small_sets import write_folder

from benchmarks import cell_search, one_shot_rank, supernet_rank, trained_search, zero_cost
from fl_lightning.nas import NASBench201
from fl_lightning.nas.spaces.mobilenet import small_mobilenet
from fl_lightning.nas.spaces.nas_bench_201 import CELL_COLUMN, COLUMNS

SPACE = NASBench201()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of images, and a table in which the number of 3×3 convolutions is the accuracy."""
    root = tmp_path_factory.mktemp("data")
    names = [f"class {i}" for i in range(10)]
    write_folder(root, "train", names, 8, size=(16, 16))
    write_folder(root, "test", names, 1, size=(16, 16))
    table = root / "table.csv"
    with table.open("w") as file:
        print(CELL_COLUMN, *COLUMNS.values(), sep=",", file=file)
        for choices in product(range(5), repeat=6):
            cell = SPACE.architecture(choices)
            share = 10 * cell.options.count("nor_conv_3x3")
            print(cell, share, share, share, sep=",", file=file)
    return ["--root", str(root), "--table", str(table)]


def printed(monkeypatch, capsys, module, words):
    monkeypatch.setattr(sys, "argv", ["benchmark", *words])
    module.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_search_that_trains(files, monkeypatch, capsys):
    words = [*files, "--strategy", "evolution", "--clients", "two_labels", "--networks", "2"]
    [found] = printed(monkeypatch, capsys, trained_search, [*words, "--steps", "20"])
    cell = SPACE.parse(found["cell"])
    assert found["cifar10"] == 10 * cell.options.count("nor_conv_3x3")
    assert 0 <= found["score"] <= 1


def test_searches_of_cells_are_looked_up(files, monkeypatch, capsys):
    monkeypatch.setattr(cell_search, "_ROUNDS", 2)
    monkeypatch.setattr(cell_search, "_STEPS", 1)
    monkeypatch.setattr(cell_search, "_STEPS_OF_AN_EPOCH", 1)
    words = [*files, "--seeds", "0", "--searches", "GDAS", "--clients", "2 labels", "central"]
    monkeypatch.setattr(sys, "argv", ["benchmark", *words])
    cell_search.main()
    *runs, _, _, row = capsys.readouterr().out.splitlines()
    found = [json.loads(line) for line in runs]
    counts = [10 * SPACE.parse(one["cell"]).options.count("nor_conv_3x3") for one in found]
    assert [one["cifar10"] for one in found] == counts
    assert row == f"| GDAS | {counts[0]:.1f} ± 0.0 | {counts[1]:.1f} ± 0.0 |"


def test_the_largest_of_random_cells_are_the_best_where_accuracy_is_size(
    files, monkeypatch, capsys
):
    words = [*files, "--num", "40", "--scores", "l2_norm"]
    monkeypatch.setattr(sys, "argv", ["benchmark", *words])
    zero_cost.main()
    rows = [line.split("|")[1:3] for line in capsys.readouterr().out.splitlines()[2:]]
    mean = {name.strip(): float(value.split("±")[0]) for name, value in rows}
    assert mean["params"] > mean["none"] + 5
    assert mean["3x3 convolutions alone"] == 60


def test_a_supernet_is_ranked(files, monkeypatch, capsys):
    words = [*files, "--num", "12", "--steps", "10", "--rate", "5", "10", "--channels", "4"]
    half, end = printed(monkeypatch, capsys, supernet_rank, words)
    assert (half["steps"], end["steps"], end["cells"]) == (5, 10, 12)
    assert half["params"] == end["params"] > 0.5  # the table prefers large convolutions
    assert -1 <= end["loss"] <= 1


def test_sub_networks_are_ranked(files, monkeypatch, capsys):
    monkeypatch.setattr(one_shot_rank, "SPACE", small_mobilenet())
    words = [*files[:2], "--num", "2", "--steps", "1"]
    [found] = printed(monkeypatch, capsys, one_shot_rank, words)
    assert (found["networks"], found["steps"]) == (2, 1)
    assert -1 <= found["correlation"] <= 1
    assert 0 <= found["largest_alone"] <= 1
