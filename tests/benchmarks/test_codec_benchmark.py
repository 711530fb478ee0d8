"""The benchmark of the codec at a tiny scale: a row for every payload and every transform."""

from benchmarks import codec


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


def test_times_are_taken_in_turn():
    calls = []
    ours, theirs = codec.in_turn(lambda: calls.append(1), lambda: calls.append(2), repetitions=3)
    assert calls == [1, 2] * 4
    assert len(ours) == len(theirs) == 3
    assert min(ours + theirs) >= 0
