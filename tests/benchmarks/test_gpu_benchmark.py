"""The benchmark for a GPU, without one: what fails is told, and the rest goes on."""

import json

from benchmarks import gpu


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
