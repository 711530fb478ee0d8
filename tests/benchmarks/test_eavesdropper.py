"""A plain message gives its image away, a masked one nothing: the benchmark on a few clients."""

from statistics import mean

import pytest
import torch

pytest.importorskip("cryptography", reason="needs the extra secure")

from benchmarks import eavesdropper
from benchmarks.eavesdropper import BATCH, CLIENTS, Victims, taps


@pytest.fixture(scope="module")
def alone():
    return Victims(CLIENTS, 1)


def read_all(alone, name):
    tap = taps(alone.space)[name]
    reads = [alone.read_one(tap(alone.deltas, client), client) for client in range(CLIENTS)]
    return list(zip(*reads, strict=True))


def test_a_plain_message_is_the_image_and_low_rank_is_no_protection(alone):
    for name in ("unprotected", "CentralDP"):
        divided, direction, labels = read_all(alone, name)
        assert min(each.correlation for each in (*divided, *direction)) > 0.99
        assert min(each.decibels for each in divided) > 60
        assert all(labels)
    _, direction, labels = read_all(alone, "rank 2 in 8 bits")  # of one example it is of rank one
    assert min(each.correlation for each in direction) > 0.7
    assert all(labels)


def test_a_masked_message_or_one_with_noise_tells_nothing(alone):
    for name in ("secure sum, a message", "LocalDP, ε = 10"):
        divided, direction, labels = read_all(alone, name)
        for attacked in (divided, direction):  # of 20 images with 62 free pixels: 0.028 std error
            assert abs(mean(each.correlation for each in attacked)) < 0.15
        assert sum(labels) < CLIENTS / 2 or name.startswith("LocalDP")


def test_images_of_several_examples_are_found_by_a_search():
    together = Victims(1, BATCH)
    seen = taps(together.space)["unprotected"](together.deltas, 0)
    assert together.search(seen, 0, steps=150).correlation > 0.9
    noise = torch.randn(seen.shape, generator=torch.Generator().manual_seed(0))
    assert together.search(noise, 0, steps=20).correlation < 0.5


def test_the_table_and_the_picture(tmp_path, monkeypatch, capsys):
    out = tmp_path / "seen.png"
    options = ["--searches", "1", "--steps", "1", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["eavesdropper", *options])
    eavesdropper.main()
    header, *rows = capsys.readouterr().out.splitlines()
    assert header == eavesdropper.HEADER
    names = [row[2:26].strip() for row in rows]
    assert names == list(taps(Victims(1, 1).space))
    assert out.stat().st_size > 10_000
