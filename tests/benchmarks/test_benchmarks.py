"""The benchmark's harness at a tiny scale: every workload runs, and the results agree."""

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from benchmarks import __main__ as command
from benchmarks import alone, rivals
from benchmarks.bare import PLAIN, VARIANTS, BareLoop, own_plan
from benchmarks.cluster import Constants
from benchmarks.engineered import Comparison, applies, compare_variants, loop_for
from benchmarks.options import Options
from benchmarks.page import _HEADER, RESULTS, ratio, row, with_tables
from benchmarks.process import MeasurementError, run, seconds_alive
from benchmarks.turns import _MOST_ROUNDS_OF_A_TURN, Turns, measure, rounds_of_a_turn
from benchmarks.workloads import WORKLOADS

TINY = Options(rounds=1, scale=0.01)
SIZES = {
    "W1": 1_626_442,
    "W2": 1_663_370,
    "W3": 48_670,
    "U-logreg": 7_850,
    "U-mlp": 199_210,
    "U-lenet5": 61_706,
    "U-lenet": 215_730,
    "E-cnn": 1_206_590,
    "R-18": 11_220_132,
    "V-tiny": 5_380_132,
    "L-lstm": 822_570,
    "L-lora": 14_092_288,
}


MARKED = [n if n == "U-logreg" else pytest.param(n, marks=pytest.mark.slow) for n in WORKLOADS]


def only(monkeypatch, variant):
    """Let the measurement find one variant of the loop the fastest."""
    found = Comparison({str(variant): 1.0, "sgd": 2.0}, {}, {})
    monkeypatch.setattr("benchmarks.turns.compare_variants", lambda *_: found)


def turns_of(name, options, length=2000):
    """Return what a run of some rounds measures, as an object."""
    return Turns(**measure(name, options, [length])["runs"][length])


@pytest.mark.parametrize("name", MARKED)
def test_federation_and_bare_loop_agree(name, monkeypatch):
    # by hand, the most different from torch's own; but the ViT is slow, once is enough
    only(monkeypatch, PLAIN if name == "V-tiny" else VARIANTS["by hand"])
    rounds = 3 if name == "W3" else 1
    monkeypatch.setattr("benchmarks.turns.rounds_of_a_turn", lambda _: rounds)
    turns = turns_of(name, TINY)
    assert len(turns.ours) == len(turns.plain) == len(turns.best) == rounds
    # of the largest change, which a step of this size computes in float32 to a few 1e-6
    assert 0 < turns.difference <= 5e-5
    assert turns.engine.startswith("sequential") or "slots" in turns.engine


@pytest.mark.parametrize(
    ("name", "scale", "length", "engine"),
    [
        # 40 clients of a step and more
        pytest.param("U-logreg", 0.3, 1000, "12 slots, compiled", marks=pytest.mark.slow),
        ("T-mlp", 0.1, 10, "2 slots, not compiled"),  # embeddings
        ("T-transformer", 0.1, 10, "2 slots, not compiled"),  # attention
    ],
)
def test_slots_agree_with_the_loop_and_a_row_says_whether_they_are_compiled(
    name, scale, length, engine, monkeypatch
):
    only(monkeypatch, PLAIN)
    monkeypatch.setattr("benchmarks.turns.rounds_of_a_turn", lambda _: 1)
    turns = turns_of(name, Options(rounds=1, scale=scale, engine="slots"), length)
    assert turns.engine == engine
    # six layers of attention round more often
    assert 0 < turns.difference <= (5e-5 if name == "T-transformer" else 1e-5)


def test_a_turn_has_several_rounds_where_they_are_short():
    class Loop(BareLoop):
        def train_round(self, plan):
            return self.seconds

    work = WORKLOADS["W3"].scaled(0.01)
    loop = Loop(work, work.data())
    for loop.seconds, rounds in ((0.001, 20), (0.1, 10), (3.0, 1)):
        assert rounds_of_a_turn(loop) == rounds


def test_a_federation_in_another_precision_takes_turns_with_loops_in_it(monkeypatch):
    only(monkeypatch, VARIANTS["by hand"])
    monkeypatch.setattr("benchmarks.turns.rounds_of_a_turn", lambda _: 2)
    turns = turns_of("W3", Options(rounds=1, scale=0.01, precision="bf16-mixed"))
    assert len(turns.ours) == len(turns.plain) == len(turns.best) == 2
    assert 0 < turns.difference < 0.05


def test_variants_that_differ_or_fail_are_left_out(monkeypatch):
    work = WORKLOADS["U-logreg"].scaled(0.1)
    wrong = replace(work, lr=work.lr * 1.001)

    def loops(work, data, variant, *args, **options):
        if variant.update == "fused":
            raise_in_training = BareLoop(work, data)
            monkeypatch.setattr(raise_in_training, "train_round", _fails)
            return raise_in_training
        return BareLoop(wrong if variant.update == "by hand" else work, data)

    monkeypatch.setattr("benchmarks.engineered.loop_for", loops)
    found = compare_variants(work, work.data(), "32-true", repetitions=1)
    assert set(found.left_out) == {"by hand", "fused"}
    assert found.left_out["fused"] == "RuntimeError: no kernel"
    assert found.differences["by hand"] == pytest.approx(1e-3, rel=0.1)
    assert set(found.seconds) == {"sgd", "foreach", "compiled", "batched"}
    assert list(found.seconds.values()) == sorted(found.seconds.values())


def _fails(plan):
    raise RuntimeError("no kernel\nat line 3")


@pytest.mark.slow
def test_a_wrong_result_shows(monkeypatch):
    only(monkeypatch, PLAIN)
    monkeypatch.setattr("benchmarks.plan.derive_seed", lambda *_: 0)
    assert turns_of("W1-dropout", TINY).difference > 0.01


@pytest.mark.slow
def test_what_two_processes_saw_comes_back():
    options = Options(rounds=1, scale=0.1, devices=2).as_arguments()
    words = [sys.executable, "-m", "benchmarks.turns", "U-logreg", *options]
    output = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    seen = json.loads(output.splitlines()[-1])
    turns = Turns(**seen["runs"]["2000"])
    counts = {len(seconds) for seconds in (turns.ours, turns.plain, turns.best)}
    assert len(counts) == 1
    assert 1 <= counts.pop() <= _MOST_ROUNDS_OF_A_TURN
    assert 0 < turns.difference <= 5e-5


@pytest.mark.parametrize("name", SIZES)
def test_networks_have_the_size_of_their_sources(name):
    assert parameters_to_vector(WORKLOADS[name].network().parameters()).numel() == SIZES[name]


def test_shards_lie_inside_the_data():
    for work in WORKLOADS.values():
        ends = work.starts + work.sizes
        assert len(ends) == work.num_clients
        assert (work.sizes.min(), work.sizes.max()) == work.examples
        if work.pool is None:
            assert (work.starts[1:] == ends[:-1]).all()
        else:
            assert ends.max() <= work.pool


def assert_loops_agree(work, variant, plan, most=1e-6):
    """A round of a variant of the bare loop ends as that of the plain one."""
    data = work.data()
    plain, other = BareLoop(work, data), loop_for(work, data, VARIANTS[variant])
    for loop in (plain, other):
        loop.train_round(plan)
    for one, another in zip(plain.start, other.start, strict=True):
        torch.testing.assert_close(one, another, rtol=0, atol=most)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(v, marks=pytest.mark.slow if v.startswith(("compiled", "batched")) else ())
        for v in VARIANTS
    ],
)
def test_variants_of_the_bare_loop_agree(variant):
    work = WORKLOADS["U-lenet5"].scaled(0.1)
    torch.manual_seed(0)  # of the orders: in some, two maxima are equal but for rounding
    if not applies(VARIANTS[variant], work):
        pytest.skip("its clients take several steps: see the test of one gradient")
    assert_loops_agree(work, variant, own_plan(work, 0))


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_compiled_loop_takes_last_batches_of_any_size(compiles, monkeypatch):
    if not compiles:
        monkeypatch.setattr(torch, "compile", lambda step, **options: step)
    work = WORKLOADS["U-logreg"]
    plan = own_plan(work, 0)
    assert len({len(visit.batches[-1]) for visit in plan}) > 8  # as many graphs as torch allows
    assert_loops_agree(work, "compiled", plan)


def test_a_batched_loop_takes_smaller_batches_between(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda step, **options: step)
    work = replace(WORKLOADS["U-logreg"].scaled(0.1), local_steps=8)
    plan = own_plan(work, 0)
    assert any(len(batch) < work.batch_size for visit in plan for batch in visit.batches[:-1])
    assert_loops_agree(work, "batched", plan)


def test_one_gradient_is_the_mean_of_single_steps():
    work = replace(WORKLOADS["W3"].scaled(0.02), weight_decay=0.1)
    assert_loops_agree(work, "one gradient", own_plan(work, 0))


@pytest.mark.parametrize("column", ["bare", "ours"])
def test_a_column_alone(column, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["alone", column, "W3", *TINY.as_arguments()])
    alone.main()
    line = json.loads(capsys.readouterr().out)
    assert len(line["seconds"]) == 1
    assert line["peak_mb"] > 50
    assert 0 < line["start_up"] < seconds_alive() + 0.1  # told by two clocks


@pytest.mark.slow
def test_a_column_of_two_processes_alone():
    options = Options(rounds=2, scale=0.01, devices=2).as_arguments()
    began = time.monotonic()
    line = run([sys.executable, "-m", "benchmarks.alone", "ours", "W3", *options])
    assert len(line["seconds"]) == 2
    assert 1 < line["start_up"] < time.monotonic() - began  # imports are in it


RESULT = {
    "title": "logistic regression",
    "environment": {"date": "2026-11-28", "commit": "abc", "torch": "2.15.0", "CPU": "EPYC"},
    "variants": {"seconds": {"compiled": 0.5, "fused": 0.9, "sgd": 1.0}},
    "runs": {
        "2000": {"engine": "4 slots, compiled", "difference": 1e-6}
        | {"ours": [0.2, 0.4], "plain": [1.0, 2.0], "best": [0.5, 1.0]},
        "100": {"engine": "4 slots, not compiled", "difference": 2e-6}
        | {"ours": [0.4, 0.8], "plain": [1.0, 2.0], "best": [0.5, 1.0]},
    },
    "starts": {
        name: {"start_up": seconds}
        for name, seconds in (
            ("ours, 100", 10.0),
            ("ours, 2000", 30.0),
            ("compiled", 65.0),
            ("fused", 5.0),
        )
    },
    "rivals": {"pfl": {"failure": "no such package"}, "flwr": {"seconds": [3.0], "bare": [1.5]}},
}


def test_a_row_of_the_table():
    cells = [cell.strip() for cell in row("W3", RESULT).split("|")[1:-1]]
    assert len(cells) == _HEADER.count("|") - 1
    assert cells[1:6] == [
        "1.5 s",
        "compiled: 0.50",
        "4 slots, compiled: 0.20",
        "**0.40**",
        "30 s",
    ]
    # 10 s and 100 rounds of 0.6 s; the compiled loop takes 65 s and 100 rounds of 0.75, the fused one more
    assert cells[6:] == ["4 slots, not compiled: 0.40", f"**{70 / 140:.2f}**"]


def test_tables_are_written_between_their_comments(tmp_path):
    (tmp_path / "rounds.json").write_text(json.dumps({"W3": RESULT}))
    old = "before\n<!-- rounds -->\nold\n<!-- end of rounds -->\nafter\n"
    page = with_tables(old, tmp_path)
    assert "old" not in page
    assert page.startswith(f"before\n<!-- rounds -->\n\n{_HEADER}\n")
    assert "| W3 | 0.20 | 2 | n/a: no such package |" in page
    assert "Differences: W3 2e-06." in page
    assert "Measured 2026-11-28 at `abc`, torch 2.15.0, EPYC." in page
    assert page.endswith("<!-- end of rounds -->\nafter\n")
    assert with_tables(page, tmp_path) == page
    with pytest.raises(ValueError, match="no results for the table other"):
        with_tables("<!-- other -->\n<!-- end of other -->", tmp_path)


def test_the_page_is_what_the_command_writes():
    page = (Path(__file__).parents[2] / "docs/benchmarks.md").read_text()
    assert with_tables(page) == page
    named = set(re.findall(r"<!-- end of (\w+) -->", page))
    assert named == {path.stem for path in RESULTS.glob("*.json")}


def test_results_are_merged_and_the_page_is_written(monkeypatch, tmp_path):
    """The processes are replaced by their results: starting them takes longer than all they do."""
    asked = []

    def results(command, timeout=None, environment=()):
        asked.append(command[2:])
        if "benchmarks.turns" in command:
            return {key: RESULT[key] for key in ("variants", "runs")}
        if "benchmarks.rivals.pfl" in command:
            raise MeasurementError("no such package")
        return {"seconds": [3.0], "bare": [1.0], "start_up": 2.0, "peak_mb": 1000.0}

    monkeypatch.setattr(command, "run", results)
    monkeypatch.setattr("benchmarks.process.run", results)
    monkeypatch.setattr(command, "ROUNDS", tmp_path / "rounds.json")
    monkeypatch.setattr(command, "with_tables", lambda page: with_tables(page, tmp_path))
    page = tmp_path / "page.md"
    page.write_text("<!-- rounds -->\n<!-- end of rounds -->\n")
    for name in ("W5", "W3"):
        words = ["--workloads", name, "--rivals", "pfl", "--write", str(page)]
        monkeypatch.setattr("sys.argv", ["benchmarks", *words])
        command.main()
    saved = json.loads((tmp_path / "rounds.json").read_text())
    assert list(saved) == ["W3", "W5"]
    assert set(saved["W3"]["starts"]) == {"compiled", "fused", "ours, 100", "ours, 2000"}
    assert saved["W3"]["rivals"] == {"pfl": {"failure": "no such package"}}
    assert page.read_text().count("| **W") == 2
    lengths = [words[words.index("--length") + 1] for words in asked if "ours" in words]
    assert sorted(lengths) == ["100", "100", "2000", "2000"]


def test_a_command_that_fails_says_why(monkeypatch, capsys):
    with pytest.raises(MeasurementError, match="no such file"):
        run(["python", "-c", "raise SystemExit('no such file')"])
    with pytest.raises(MeasurementError, match="nonsense"):
        run(["a-nonsense-command"])
    with pytest.raises(MeasurementError, match=r"http\.server took longer than 1 s"):
        run([sys.executable, "-m", "http.server", "0"], timeout=0.6)
    monkeypatch.setattr("sys.argv", ["benchmarks", "--workloads", "W9"])
    with pytest.raises(SystemExit):
        command.main()
    assert "there are W3" in capsys.readouterr().err


@pytest.mark.parametrize("in_one_process", [True, False])
def test_the_loop_takes_turns_with_a_rival(in_one_process):
    work = WORKLOADS["W3"].scaled(0.01)
    watch = rivals.stopwatch(work, work.data(), in_one_process=in_one_process)
    for _ in range(3):
        watch.round_done()
    column = watch.report()
    assert len(column["seconds"]) == len(column["bare"]) == 2
    assert min(column["bare"]) > max(column["seconds"]) > 0  # this rival does nothing


def test_ratios():
    assert ratio([2.0, 6.0, 4.0], [1.0, 2.0, 4.0]) == 2


def test_costs_of_a_round_follow_the_formulas():
    found = Constants(
        client=1.0,
        number=0.5,
        fixed=3.0,
        server=0.25,
        exchange=2.0,
        base_mb=100.0,
        copies=5.0,
        of_client=1000.0,
    )
    assert found.seconds(6, 4, steps=2.0) == 6 * (2 + 1 + 0.5 * 4) + 3 + 0.25 * 4
    assert found.seconds(6, 4, steps=2.0, processes=3) == 10 + 3 + 1 + 2 * 4
    assert found.gigabytes(1e6, 1e9) == pytest.approx(0.1 + 4 * 5 + 1)
    assert found.gigabytes(1e3, 1e6, remember=True) == pytest.approx(0.1 + 0.02 + 0.001 + 4)
