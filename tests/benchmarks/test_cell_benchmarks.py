"""The benchmarks of searches in a table run on small images, and print what they found."""

import json
import sys
from itertools import product

import pytest
from small_sets import write_folder

from benchmarks import supernet_rank, trained_search
from fl_lightning.nas import NASBench201
from fl_lightning.nas.spaces.nas_bench_201_table import CELL_COLUMN, COLUMNS

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


@pytest.mark.parametrize(
    ("strategy", "clients"), [("random", "two_labels"), ("evolution", "central")]
)
def test_a_search_that_trains(files, monkeypatch, capsys, strategy, clients):
    words = [*files, "--strategy", strategy, "--clients", clients, "--networks", "2"]
    [found] = printed(monkeypatch, capsys, trained_search, [*words, "--steps", "20"])
    cell = SPACE.parse(found["cell"])
    assert found["cifar10"] == 10 * cell.options.count("nor_conv_3x3")
    assert 0 <= found["score"] <= 1


def test_a_supernet_is_ranked(files, monkeypatch, capsys):
    words = [*files, "--num", "12", "--steps", "10", "--rate", "5", "10", "--channels", "4"]
    half, end = printed(monkeypatch, capsys, supernet_rank, words)
    assert (half["steps"], end["steps"], end["cells"]) == (5, 10, 12)
    assert half["params"] == end["params"] > 0.5  # the table prefers large convolutions
    assert -1 <= end["loss"] <= 1
