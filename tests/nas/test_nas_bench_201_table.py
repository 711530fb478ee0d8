"""The benchmark's table: reading, looking up, ranks, correlation; what is wrong with a file."""

import pytest
from readme import ROOT

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.cost.latency_measurement import rank_correlation
from fl_lightning.nas.spaces.darts import DARTS
from fl_lightning.nas.spaces.nas_bench_201 import NASBench201, NASBench201Table

SPACE = NASBench201()
SHARED = ROOT.parent / "shared" / "data" / "nasbench201_test_accuracy.csv"
HEADER = (
    "ImageNetTestAccuracy200Epochs,ArchitectureString,Remark,"
    "CIFAR10TestAccuracy200Epochs,CIFAR100TestAccuracy200Epochs"
)
CELLS = [str(SPACE.architecture([number] * 6)) for number in range(5)]
ROWS = [f"{30 + n},{cell},x,{c10},{60 + n}" for n, (cell, c10) in enumerate(
    zip(CELLS, (10.0, 54.5, 90.0, 90.0, 49.0), strict=True)
)]  # fmt: skip


def written(folder, *lines):
    path = folder / "table.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def table(tmp_path):
    return NASBench201Table.read(written(tmp_path, HEADER, *ROWS))


def test_a_cell_is_looked_up_by_value_or_by_string(table):
    expected = {"cifar10": 54.5, "cifar100": 61.0, "imagenet16_120": 31.0}
    assert table.lookup(CELLS[1]) == table.lookup(SPACE.parse(CELLS[1])) == expected
    assert len(table) == 5


def test_cells_that_the_table_lacks_are_refused(table):
    cell = SPACE.architecture([0, 1, 2, 3, 4, 0])
    with pytest.raises(ConfigurationError, match=r"is not among the 5 cells of .*table\.csv"):
        table.lookup(cell)
    with pytest.raises(ConfigurationError, match="got one of darts"):
        table.lookup(DARTS().architecture([0] * 24))
    with pytest.raises(ConfigurationError, match="not an architecture of nas_bench_201"):
        table.lookup("|conv~0|")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "lacks the columns"),
        ([HEADER.replace("CIFAR100", "cifar100"), *ROWS], "lacks the columns CIFAR100TestAcc"),
        ([HEADER], "has no cells"),
        ([HEADER, *ROWS, ROWS[1]], "line 7: |skip_connect~0|+"),
        ([HEADER, ROWS[0], ROWS[1].replace("54.5", "many")], "line 3: CIFAR10TestAccuracy200Epoc"),
        ([HEADER, ROWS[0].replace(",60", "")], "CIFAR100TestAccuracy200Epochs must be a number"),
        ([HEADER, ROWS[0].replace("10.0", "nan")], "must be a number from 0 to 100, got 'nan'"),
        ([HEADER, ROWS[0].replace("10.0", "101")], "must be a number from 0 to 100, got '101'"),
        ([HEADER, ROWS[0].replace("none~1", "non~1")], "line 2: not an architecture"),
        ([HEADER, "", ROWS[0], "", ROWS[1].replace("54.5", "many")], "line 5: CIFAR10TestAccuracy"),
        ([HEADER, "", ROWS[0], "", ROWS[0]], "line 5: |none~0|"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(tmp_path, lines, said):
    with pytest.raises(ConfigurationError) as refused:
        NASBench201Table.read(written(tmp_path, *lines))
    assert said in str(refused.value)


def test_empty_lines_and_a_field_more_change_nothing(tmp_path, table):
    lines = [HEADER, "", *(f"{row},7" for row in ROWS), "", ""]
    found = NASBench201Table.read(written(tmp_path, *lines))
    assert found.rows == table.rows
    assert [found.lookup(cell) for cell in CELLS] == [table.lookup(cell) for cell in CELLS]


def test_a_file_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"missing.csv of NAS-Bench-201 cannot be read"):
        NASBench201Table.read(tmp_path / "missing.csv")
    (tmp_path / "picture.csv").write_bytes(bytes(range(256)))
    with pytest.raises(ConfigurationError, match=r"picture.csv of NAS-Bench-201 cannot be read"):
        NASBench201Table.read(tmp_path / "picture.csv")


@pytest.fixture(scope="module")
def truth():
    if not SHARED.exists():
        pytest.skip("the benchmark's table is not there")
    return NASBench201Table.read(SHARED)


@pytest.mark.slow
def test_what_is_known_of_correlations(truth):
    def between(one, other):
        return rank_correlation(truth.accuracies[one], truth.accuracies[other])

    assert between("cifar10", "cifar100") == pytest.approx(0.980, abs=6e-4)
    assert between("cifar10", "imagenet16_120") == pytest.approx(0.959, abs=6e-4)
    assert between("cifar100", "imagenet16_120") == pytest.approx(0.964, abs=6e-4)


@pytest.mark.slow
def test_canonical_strings_are_those_of_the_file(truth):
    import csv

    with SHARED.open(newline="") as file:
        for row in csv.DictReader(file):
            ours = SPACE.canonical(SPACE.parse(row["ArchitectureString"]))
            assert ours == row["UniqueString"]
