"""The benchmark of secure sums and encryption at a tiny scale."""

import pytest

pytest.importorskip("tenseal", reason="needs the extra he")

from benchmarks import secure


def test_every_row_is_there(monkeypatch, capsys):
    options = ["--size", "100", "--clients", "5,50", "--paillier", "100"]
    monkeypatch.setattr("sys.argv", ["secure", *options])
    secure.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == secure.SUMS
    sums = [line.split() for line in lines[1:5]]
    assert [row[:5] for row in sums] == [
        ["ours", "5", "0", "4", "4"],
        ["ours", "5", "1", "4", "4"],
        ["ours", "50", "0", "26", "16"],
        ["ours", "50", "10", "26", "16"],
    ]
    assert lines[6] == secure.CIPHERS
    assert [row[2:26].strip() for row in lines[7:]] == [
        "CKKS 8192",
        "CKKS 8192, every tenth",
        "Paillier 2048",
        "Paillier 3072",
    ]
    assert [row.split()[-1] for row in lines[9:]] == ["exact", "exact"]
