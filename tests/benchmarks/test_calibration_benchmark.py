"""The benchmark of calibration at a tiny scale."""

from benchmarks import calibration


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
