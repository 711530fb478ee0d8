"""What an experiment's keys mean, and what comes of numbers, without training anything."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.experiments import Experiment, Variant
from fl_lightning.experiments.compare import _curves, comparison_panels
from fl_lightning.experiments.experiment import PlannedRun, plan_runs
from fl_lightning.experiments.results import (
    RunResult,
    curves_table,
    head_and_rows,
    over_axes,
    read_result,
    results_cells,
    runs_table,
    spreads,
)
from fl_lightning.experiments.runs import save_state
from fl_lightning.reports.charts import draw
from fl_lightning.reports.history import RoundLine, append

BASE = {"trainer": {}}


def plan(tmp_path, text="", **keys):
    """The runs of an experiment where every configuration is this text."""
    return plan_runs(
        Experiment(base=BASE, **keys), out=tmp_path, options=[], resolve=lambda words: text
    )


SEEDS = "different whole numbers"
REFUSED = [
    ({}, "either variants or grid"),
    ({"variants": {"a": {}}, "grid": {"x": {"a": {}}}}, "either variants or grid"),
    ({"variants": {"a": {}}, "report": []}, "at least one metric"),
    *(
        ({"variants": {"a": {}}, "seeds": seeds}, SEEDS)
        for seeds in ([0, 0], "0,-1", "0,b", True, [0, True], [1.5])
    ),
    ({"variants": {"a b": {}, "a/b": {}}}, "differ as folders.*a_b"),
    ({"variants": {"first": {}}}, "none named 'first'"),
    ({"grid": {"variant": {"a": {}}, "seed": {"b": {}}}}, "of the results, got seed, variant"),
    (
        {"grid": {"bytes up": {"a": {}}, "best round": {"b": {}}}},
        "results, got best round, bytes up",
    ),
]


def test_what_cannot_be_compared_is_refused_and_seeds_have_every_spelling():
    for keys, says in REFUSED:
        with pytest.raises(ConfigurationError, match=says):
            Experiment(**{"base": BASE, **keys})
    for seeds, expected in ((3, [3]), ("0,2", [0, 2]), ([1, 0], [1, 0])):
        assert Experiment(base=BASE, variants={"a": None}, seeds=seeds).all_seeds == expected


def test_a_grid_is_every_combination():
    grid = {"attack": {"none": None, "flip": {"f": 1}}, "rate": {0.1: {"r": 1}, 0.3: {"r": 3}}}
    experiment = Experiment(base=BASE, grid=grid)
    variants = experiment.all_variants
    assert [v.name for v in variants] == ["none / 0.1", "none / 0.3", "flip / 0.1", "flip / 0.3"]
    assert variants[3].difference == ({"f": 1}, {"r": 3})
    assert variants[3].coordinates == {"attack": "flip", "rate": "0.3"}
    assert experiment.axes == {"attack": ["none", "flip"], "rate": ["0.1", "0.3"]}


def test_the_runs_before_come_first_and_their_change_changes_what_starts_from_them(tmp_path):
    def fingerprints(first):
        def resolve(words):
            return "".join(Path(word).read_text() for word in words if word.endswith(".yaml"))

        variants = {"from it": {"from": "<first>"}, "apart": {"x": 1}}
        experiment = Experiment(base=BASE, first=first, variants=variants, seeds=[4, 5])
        runs = plan_runs(experiment, out=tmp_path, options=[], resolve=resolve)
        names = [run.name.partition(",")[0] for run in runs]
        assert names == ["first", "first", "from it", "apart", "from it", "apart"]
        assert [run.before for run in runs] == [None, None, runs[0], None, runs[1], None]
        return [run.fingerprint for run in runs]

    one, same, other = fingerprints({"y": 1}), fingerprints({"y": 1}), fingerprints({"y": 2})
    assert one == same
    assert len(set(one)) == len(one)
    assert [a == b for a, b in zip(one, other, strict=True)] == [*(False,) * 3, True, False, True]


def test_a_checkpoint_of_no_run_or_of_oneself_is_refused(tmp_path):
    with pytest.raises(
        ConfigurationError,
        match="'a': its configuration has <first>, the checkpoint of a first run, but",
    ):
        plan(tmp_path, "path: <first>", variants={"a": {}})
    with pytest.raises(ConfigurationError, match=r"first: .* the path of its own checkpoint"):
        plan(tmp_path, "path: <first>", variants={"a": {}}, first={})


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9))
def test_mean_and_spread_are_those_of_numpy(values):
    runs = [result("a", seed, value) for seed, value in enumerate(values)]
    runs += [result("b", 0, 1.0), RunResult(Variant("b", ()), 1, {}, {"seconds": 2.0})]
    mean, std, num = spreads(runs)
    assert mean["test/accuracy"]["a"] == pytest.approx(np.mean(values), abs=1e-9)
    assert std["test/accuracy"]["a"] == pytest.approx(np.std(values, ddof=1), abs=1e-9)
    assert num.to_dict() == {"a": len(values), "b": 2}
    assert math.isnan(mean["test/accuracy"]["b"]), "one of its runs has none"


def result(name, seed, accuracy, coordinates=None, **more):
    columns = {"test/accuracy": accuracy, "seconds": 10.0, **more}
    return RunResult(Variant(name, (), coordinates or {}), seed, {}, columns)


def test_the_table_has_mean_spread_and_number_of_runs():
    results = [
        result("dense", 0, 0.5, **{"bytes up": 2e6}),
        result("sparse", 0, 0.25, **{"bytes up": 2e5}),
        result("dense", 1, 0.7, **{"bytes up": 2e6}),
    ]
    head, rows = head_and_rows(results_cells(results))
    assert head == ["variant", "test/accuracy", "seconds", "bytes up", "runs"]
    assert rows[0] == ["dense", "0.600 ± 0.141", "10", "2 MB", "2"]
    assert rows[1] == ["sparse", "0.250", "10", "200 kB", "1"]


def test_bytes_sent_once_have_a_column_of_their_own(tmp_path):
    run = PlannedRun(Variant("sparse", ()), 0, "text", tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"fingerprint": run.fingerprint, "seconds": 1}))
    for number in (1, 2, 3):
        logged = {"val/accuracy": 0.5, "round/total_bytes_up": 1e6}
        if number != 2:  # calibrated twice
            logged["calibration/total_bytes_up"] = 2e6
        append(tmp_path, RoundLine(number, logged))
    report = {"report": ["val/accuracy"], "monitor": "val/accuracy"}
    found = read_result(run, Experiment(base=BASE, variants={"sparse": None}, **report))
    assert found.columns["bytes up"] == 3e6
    assert found.columns["calibration bytes up"] == 4e6
    assert "head bytes up" not in found.columns
    assert results_cells([found])["calibration bytes up"].tolist() == ["4 MB"]


@pytest.mark.parametrize(
    ("monitored", "best"),
    [
        ((math.inf, 30.0, 20.0), 3),
        ((math.nan, 20.0, 30.0), 2),
        ((math.nan, math.inf, -math.inf), None),
    ],
)
def test_the_best_round_is_one_of_a_finite_value(tmp_path, monitored, best):
    run = PlannedRun(Variant("a", ()), 0, "text", tmp_path)
    save_state(run, {"seconds": 1})
    for number, value in enumerate(monitored, start=1):
        append(tmp_path, RoundLine(number, {"val/perplexity": value, "val/accuracy": number / 4}))
    report = {"report": ["val/accuracy"], "monitor": "val/perplexity", "mode": "min"}
    columns = read_result(run, Experiment(base=BASE, variants={"a": None}, **report)).columns
    assert columns.get("best round") == best
    assert columns.get("val/accuracy (best round)") == (None if best is None else best / 4)


@pytest.mark.parametrize("second", ["cell", ""])
def test_the_matrix_has_a_row_for_each_name_of_the_first_axis(second):
    axes = {"attack": ["none", "flip"], second: ["mean", "median"]}
    results = [
        result(f"{a} / {d}", 0, value, {"attack": a, second: d})
        for a, d, value in (("none", "mean", 0.9), ("flip", "mean", 0.1), ("none", "median", 0.8))
    ]
    grid = over_axes(results, results_cells(results)["test/accuracy"], axes)
    head, rows = head_and_rows(grid.fillna("-"), "attack")
    assert head == ["attack", "mean", "median"]
    assert rows == [["none", "0.900", "0.800"], ["flip", "0.100", "-"]]  # one run is missing


def test_the_csv_files_keep_every_digit(tmp_path):
    run = result("a / b", 3, math.pi / 10, {"x": "a", "y": "b"})
    runs_table([run]).to_csv(tmp_path / "r.csv", index=False)
    (row,) = csv.DictReader((tmp_path / "r.csv").read_text().splitlines())
    assert float(row["test/accuracy"]) == math.pi / 10
    assert (row["variant"], row["x"], row["y"], row["seed"]) == ("a / b", "a", "b", "3")
    curves = {"val/loss": {1: 3.0, 2: math.pi}, "val/accuracy": {2: 0.5}}
    results = [RunResult(Variant("a", (), {"x": "b"}), 7, curves, {}), result("none", 0, 0.1)]
    curves_table(results).to_csv(tmp_path / "c.csv", index=False)
    rows = list(csv.reader((tmp_path / "c.csv").read_text().splitlines()))
    assert rows == [  # one a round
        ["variant", "x", "seed", "round", "val/loss", "val/accuracy"],
        ["a", "b", "7", "1", "3.0", ""],
        ["a", "b", "7", "2", repr(math.pi), "0.5"],
    ]


def test_curves_over_virtual_time_end_where_the_time_does(tmp_path):
    slow, fast = ({number: number * seconds for number in (1, 2, 3)} for seconds in (10.0, 2.0))
    results = [
        RunResult(Variant(name, (), {}), seed, {"val/loss": {1: 3.0, 3: 1.0}}, {}, clock)
        for name, clock in (("waits", slow), ("buffer", fast))
        for seed in (0, 1)
    ]
    panel = Figure().subplots()
    _curves("val/loss", results, "round/total_virtual_seconds")(panel)
    assert panel.lines[0].get_xydata().tolist() == [[10.0, 3.0], [30.0, 1.0]]
    assert [line.get_xdata()[-1] for line in panel.lines] == [30.0, 30.0, 6.0, 6.0]
    assert panel.get_legend_handles_labels()[1] == ["waits", "buffer"]
    over = {"over": "round/total_virtual_seconds", "monitor": "val/loss"}
    two = {"waits": {}, "buffer": {}}
    results = [replace(r, columns={"val/loss": 1.0}) for r in results]
    experiment = Experiment(base=BASE, variants=two, report=["val/loss"], **over)
    draw(comparison_panels(results, experiment))[0].savefig(tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 0
