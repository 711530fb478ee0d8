"""The benchmark's table: reading, looking up, ranks, correlation; what is wrong with a file."""

import numpy as np
import pytest
from readme import ROOT

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.cost.latency_measurement import rank_correlation
from fl_lightning.nas.spaces.darts import DARTS
from fl_lightning.nas.spaces.nas_bench_201 import NASBench201, NASBench201Table

SPACE = NASBench201()
SHARED = ROOT.parent / "shared" / "data" / "nasbench201_test_accuracy.csv"
DATA_SETS = ("cifar10", "cifar100", "imagenet16_120")
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
    with pytest.raises(ConfigurationError, match=r"missing.csv, cannot be read"):
        NASBench201Table.read(tmp_path / "missing.csv")
    (tmp_path / "picture.csv").write_bytes(bytes(range(256)))
    with pytest.raises(ConfigurationError, match=r"picture.csv, cannot be read"):
        NASBench201Table.read(tmp_path / "picture.csv")


@pytest.fixture(scope="module")
def truth():
    if not SHARED.exists():
        pytest.skip("the benchmark's table is not there")
    return NASBench201Table.read(SHARED)


def cell(*operations):
    """Of c(onvolution) 3, c 1, s(kip), p(ool), n(one) on 0→1, 0→2, 1→2, 0→3, 1→3, 2→3."""
    short = {"n": 0, "s": 1, "1": 2, "3": 3, "p": 4}
    return SPACE.architecture([short[operation] for operation in operations])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operations", "accuracies", "ranks"),
    [
        ("333s31", (94.373, 73.22, 46.71), (1, None, None)),
        ("333s13", (94.373, 73.09, 46.33), (1, None, None)),
        ("333s33", (94.363, 73.513, 46.344), (3, 1, 26)),
        ("113s33", (93.987, 72.88, 47.311), (44, 11, 1)),
        ("333333", (93.76, 71.11, 41.44), (167, 164, 2834)),
        ("111111", (89.37, 65.71, 35.48), (9601, None, None)),
        ("pppppp", (49.02, 10.20, 9.35), (15278, None, None)),
        ("ssssss", (54.30, 15.61, 16.32), (15231, None, None)),
        ("nnnnnn", (10.00, 1.00, 0.83), (None, None, None)),
    ],
)
def test_what_is_known_of_single_cells(truth, operations, accuracies, ranks):
    found = cell(*operations)
    assert tuple(truth.lookup(found).values()) == pytest.approx(accuracies, abs=0.0051)
    for name, rank in zip(DATA_SETS, ranks, strict=True):
        column = truth.accuracies[name]
        assert rank is None or 1 + (column > column[truth.rows[found]]).sum() == rank


@pytest.mark.slow
def test_what_is_known_of_all_cells(truth):
    assert len(truth) == 15_625
    columns = [truth.accuracies[name] for name in DATA_SETS]
    assert [column.mean() for column in columns] == pytest.approx(
        [87.063, 61.406, 33.586], abs=6e-4
    )
    medians = [np.median(column) for column in columns]
    assert medians == pytest.approx([90.745, 65.287, 36.389], abs=6e-4)
    assert [(columns[0] >= bound).sum() for bound in (94, 93.5)] == [42, 411]
    skips = np.array([cell.choices.count(1) for cell in truth.rows])
    by_skips = [columns[0][skips == number].mean() for number in range(7)]
    expected = [85.96, 87.56, 87.95, 86.60, 82.73, 74.96, 54.30]
    assert by_skips == pytest.approx(expected, abs=6e-3)


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
