"""Benchmarks at a tiny scale: they run, and their tables say what they should."""

import json
from statistics import mean, median

import pytest
import torch
from torch import nn

from benchmarks import calibration, codec, gpu
from benchmarks.search import results, retrained
from benchmarks.sparse_step import RUN, bytes_of_state, clustered_mask, compare
from fl_lightning.sparsity.optimizers.sparse_optimizers import SparseSGDM


def test_the_table(monkeypatch, capsys):
    tiny = [calibration.Workload("LeNet", calibration.WORKLOADS[0].network, 4)]
    monkeypatch.setattr(calibration, "WORKLOADS", tiny)
    monkeypatch.setattr(calibration, "VIT_S_ENTRIES", 1000)
    monkeypatch.setattr("sys.argv", ["calibration", "--turns", "1"])
    calibration.main()
    header, row, last = capsys.readouterr().out.splitlines()
    assert len(header) == len(row)
    assert row.startswith("LeNet")
    assert last.startswith("1,000 entries: chosen in")


def test_every_payload_and_every_transform_has_its_row(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["codec", "--size", "1000", "--repetitions", "1"])
    codec.main()
    formats, ways = capsys.readouterr().out.split("\n\n")
    for table, header, expected in (
        (formats, codec.HEADER, codec.payloads(100)),
        (ways, codec.WAY, codec.transforms(100)),
    ):
        first, *rows = table.splitlines()
        assert first == header
        assert [row[2:46].strip() for row in rows] == [name for name, _ in expected]
    calls = []
    ours, theirs = codec.in_turn(lambda: calls.append(1), lambda: calls.append(2), repetitions=3)
    assert calls == [1, 2] * 4
    assert len(ours) == len(theirs) == 3


def test_a_failure_is_a_line_of_its_own(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    with gpu.failures_of("W0"):
        raise ValueError("no such\nworkload")
    gpu.note("W1", s=0.123456)
    first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["FAILED", "W0", "error=ValueError:", "no", "such", "workload"]
    assert second.split() == ["W1", "s=0.1235"]
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert lines[1] == {"what": "W1", "s": 0.123456}


def test_a_pair_of_steps_is_timed_without_streams_on_a_cpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(gpu, "IS_GPU", False)
    monkeypatch.setattr(gpu, "seconds_of", lambda run, *_: run() and 1.0)
    gpu.streams()
    words = capsys.readouterr().out.split()
    assert words.count("ms_of_a_pair=20") == 2
    assert "FAILED" not in words


def test_bytes_of_state():
    params = [nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(10, 10))]
    for param in params:
        param.grad = torch.ones_like(param)
    dense = torch.optim.SGD(params, momentum=0.9)
    sparse = SparseSGDM(params, momentum=0.9, masks=[torch.arange(1000) < 50, None])
    ratio = compare(sparse.step, dense.step, turns=3)
    assert ratio.milliseconds > 0
    assert bytes_of_state(dense) == (4400, 4400)
    assert bytes_of_state(sparse) == (4 * 150, 4 * 150 + 8 * 50)


def test_clustered_masks_have_whole_runs():
    mask = clustered_mask(torch.zeros(300, 64), 0.1)
    runs = mask.view(-1, RUN)
    assert torch.equal(runs.any(1), runs.all(1))
    assert mask.float().mean() == pytest.approx(0.1, abs=0.06)


CELL = "|none~0|+|nor_conv_3x3~0|none~1|+|nor_conv_3x3~0|skip_connect~1|nor_conv_3x3~2|"
NOTHING = "|none~0|+|none~0|none~1|+|none~0|none~1|none~2|"


def test_a_cell_learns_by_its_seed_and_an_empty_one_does_not():
    first, again, other = (retrained(CELL, seed, epochs=2, channels=4) for seed in (0, 0, 1))
    assert min(first, other) > 0.5
    assert first == again != other
    assert retrained(NOTHING, 0, epochs=1, channels=4) < 0.2


@pytest.mark.slow
def test_the_quickstarts_cells_beat_random_ones():
    found = list(results([0, 1, 2], num_random=10, epochs=3, options=[]))
    assert mean(r.found for r in found) > mean(median(r.random) for r in found)
    assert all(r.seconds / 2 < 150 for r in found)
