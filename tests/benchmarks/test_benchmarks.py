"""The benchmark's harness at a tiny scale: every workload runs, and the results agree."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from benchmarks import __main__ as command
from benchmarks import alone, rivals
from benchmarks.bare import PLAIN, VARIANTS, BareLoop, own_plan
from benchmarks.cluster import Constants
from benchmarks.engineered import applies, loop_for
from benchmarks.options import Options
from benchmarks.process import MeasurementError, run, seconds_alive
from benchmarks.report import HEADER, Row, ratio
from benchmarks.turns import _MOST_ROUNDS_OF_A_TURN, measure, rounds_of_a_turn
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
}


MARKED = [n if n == "U-logreg" else pytest.param(n, marks=pytest.mark.slow) for n in WORKLOADS]


@pytest.mark.parametrize("name", MARKED)
def test_federation_and_bare_loop_agree(name, monkeypatch):
    # by hand, the most different from torch's own; but the ViT is slow, once is enough
    variant = PLAIN if name == "W4" else VARIANTS["by hand"]
    monkeypatch.setattr("benchmarks.turns.best_variant", lambda *_: variant)
    rounds = 3 if name == "W3" else 1
    monkeypatch.setattr("benchmarks.turns.rounds_of_a_turn", lambda _: rounds)
    turns = measure(name, TINY)
    assert len(turns.ours) == len(turns.bare) == len(turns.bare_best) == rounds
    # of the largest change, which a step of this size computes in float32 to a few 1e-6
    assert 0 < turns.difference <= 5e-5
    assert turns.engine.startswith("sequential") or "slots" in turns.engine


@pytest.mark.parametrize(("num_rounds", "words"), [(1000, "compiled"), (10, "not compiled")])
def test_a_row_says_whether_slots_are_compiled(num_rounds, words, monkeypatch):
    monkeypatch.setattr("benchmarks.turns.best_variant", lambda *_: PLAIN)
    monkeypatch.setattr("benchmarks.turns.rounds_of_a_turn", lambda _: 1)
    monkeypatch.setattr("benchmarks.ours.LONG_RUN", num_rounds)  # 40 clients of a step and more
    turns = measure("U-logreg", Options(rounds=1, scale=0.3, engine="slots"))
    assert turns.engine == f"12 slots, {words}"


@pytest.mark.parametrize(("name", "most"), [("T-mlp", 1e-5), ("T-transformer", 5e-5)])
def test_slots_agree_with_the_loop_on_embeddings_and_attention(name, most, monkeypatch):
    monkeypatch.setattr("benchmarks.turns.best_variant", lambda *_: PLAIN)
    monkeypatch.setattr("benchmarks.turns.rounds_of_a_turn", lambda _: 1)
    monkeypatch.setattr("benchmarks.ours.LONG_RUN", 10)
    turns = measure(name, Options(rounds=1, scale=0.1, engine="slots"))
    assert turns.engine == "2 slots, not compiled"
    assert 0 < turns.difference <= most  # six layers of attention round more often


@pytest.mark.parametrize(("seconds", "rounds"), [(0.001, 20), (0.1, 10), (3.0, 1)])
def test_a_turn_has_several_rounds_where_they_are_short(seconds, rounds):
    class Loop(BareLoop):
        def train_round(self, plan):
            return seconds

    work = WORKLOADS["W3"].scaled(0.01)
    assert rounds_of_a_turn(Loop(work, work.data())) == rounds


def test_in_another_precision_a_loop_in_the_full_one_takes_its_turn(monkeypatch):
    of_precision = {"bf16-mixed": PLAIN, "32-true": VARIANTS["by hand"]}
    monkeypatch.setattr("benchmarks.turns.best_variant", lambda *args: of_precision[args[2]])
    monkeypatch.setattr("benchmarks.turns.rounds_of_a_turn", lambda _: 2)
    turns = measure("W3", Options(rounds=1, scale=0.01, precision="bf16-mixed"))
    assert (turns.best, turns.best_full) == ("sgd", "by hand")
    assert turns.bare == turns.bare_best != turns.bare_full
    assert len(turns.ours) == len(turns.bare) == len(turns.bare_full) == 2
    assert 0 < turns.difference < 0.05


@pytest.mark.slow
def test_a_wrong_result_shows(monkeypatch):
    monkeypatch.setattr("benchmarks.turns.best_variant", lambda *_: PLAIN)
    monkeypatch.setattr("benchmarks.plan.derive_seed", lambda *_: 0)
    assert measure("W1-dropout", TINY).difference > 0.01


@pytest.mark.slow
def test_what_two_processes_saw_comes_back():
    options = Options(rounds=1, scale=0.1, devices=2).as_arguments()
    words = [sys.executable, "-m", "benchmarks.turns", "U-logreg", *options]
    output = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    seen = json.loads(output.splitlines()[-1])
    counts = {len(seen[name]) for name in ("ours", "bare", "bare_best")}
    assert len(counts) == 1
    assert 1 <= counts.pop() <= _MOST_ROUNDS_OF_A_TURN
    assert 0 < seen["difference"] <= 5e-5


@pytest.mark.parametrize("name", SIZES)
def test_networks_have_the_size_of_their_sources(name):
    assert parameters_to_vector(WORKLOADS[name].network().parameters()).numel() == SIZES[name]


@pytest.mark.parametrize("name", WORKLOADS)
def test_shards_lie_inside_the_data(name):
    work = WORKLOADS[name]
    ends = work.starts + work.sizes
    assert len(ends) == work.num_clients
    assert (work.sizes.min(), work.sizes.max()) == work.examples
    if work.pool is None:
        assert (work.starts[1:] == ends[:-1]).all()
    else:
        assert ends.max() <= work.pool


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(v, marks=pytest.mark.slow if v in ("compiled", "batched") else ())
        for v in VARIANTS
    ],
)
def test_variants_of_the_bare_loop_agree(variant):
    work = WORKLOADS["U-lenet5"].scaled(0.1)
    torch.manual_seed(0)  # of the orders: in some, two maxima are equal but for rounding
    data, plan = work.data(), own_plan(work, 0)
    if not applies(VARIANTS[variant], work):
        pytest.skip("its clients take several steps: see the test of one gradient")
    plain, other = BareLoop(work, data), loop_for(work, data, VARIANTS[variant])
    for loop in (plain, other):
        loop.train_round(plan)
    ends = [parameters_to_vector([p.contiguous() for p in loop.start]) for loop in (plain, other)]
    assert (ends[0] - ends[1]).abs().max() < 1e-6


def test_a_compiled_loop_takes_last_batches_of_any_size():
    work = WORKLOADS["U-logreg"]
    data, plan = work.data(), own_plan(work, 0)
    assert len({len(visit.batches[-1]) for visit in plan}) > 8  # as many graphs as torch allows
    plain, other = BareLoop(work, data), loop_for(work, data, VARIANTS["compiled"])
    for loop in (plain, other):
        loop.train_round(plan)
    for one, another in zip(plain.start, other.start, strict=True):
        torch.testing.assert_close(one, another, rtol=0, atol=1e-6)


def test_one_gradient_is_the_mean_of_single_steps():
    work = replace(WORKLOADS["W3"].scaled(0.02), weight_decay=0.1)
    data, plan = work.data(), own_plan(work, 0)
    plain, other = BareLoop(work, data), loop_for(work, data, VARIANTS["one gradient"])
    for loop in (plain, other):
        loop.train_round(plan)
    for one, another in zip(plain.start, other.start, strict=True):
        torch.testing.assert_close(one, another, rtol=0, atol=1e-6)


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


def test_the_table(monkeypatch, capsys):
    """The processes are imitated here: starting them takes longer than all they do."""

    def imitated(command, timeout=None):
        if "benchmarks.turns" in command:
            seconds = {"bare": [1.0, 2.0], "bare_best": [0.5, 1.0], "ours": [1.5, 3.0]}
            of_full = {"best_full": "by hand, channels last", "bare_full": [2.0, 4.0]}
            return {"best": "fused", "engine": "slots", "difference": 1e-7, **seconds, **of_full}
        if "benchmarks.rivals.pfl" in command:
            raise MeasurementError("no such package")
        return {"seconds": [3.0, 3.0], "bare": [1.0, 1.0], "start_up": 2.0, "peak_mb": 1000.0}

    monkeypatch.setattr("benchmarks.__main__.run", imitated)
    monkeypatch.setattr("benchmarks.process.run", imitated)
    monkeypatch.setattr(rivals, "RIVALS", {"pfl": ("3.11", []), "flwr": ("3.11", [])})
    monkeypatch.setattr("sys.argv", ["benchmarks", "--workloads", "W3", "--rivals", "pfl,flwr"])
    command.main()
    header, title, *rows = capsys.readouterr().out.splitlines()
    assert header == HEADER
    assert title.startswith("W3: ")
    labels = [row[:44].strip() for row in rows]
    full = "bare in 32-true (by hand, channels last)"
    assert labels == [full, "bare", "bare (best: fused)", "ours (slots)", "pfl", "flwr"]
    assert rows[4].endswith("n/a: no such package")
    assert all(len(row) == len(HEADER) for row in (*rows[:4], rows[5]))
    assert rows[0].split()[-6:] == ["3", "2.00", "4.00", "2.0", "1,000", "-"]
    assert rows[5].split()[1:] == ["3", "3.00", "6.00", "2.0", "1,000", "-"]
    assert rows[3].split()[2:] == ["2.25", "1.50", "3.00", "2.0", "1,000", "1.0e-07"]


def test_unknown_names_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmarks", "--workloads", "W9"])
    with pytest.raises(SystemExit):
        command.main()
    assert "there are W1" in capsys.readouterr().err


def test_a_command_that_fails_says_why():
    with pytest.raises(MeasurementError, match="no such file"):
        run(["python", "-c", "raise SystemExit('no such file')"])
    with pytest.raises(MeasurementError, match="nonsense"):
        run(["a-nonsense-command"])


def test_ratios():
    assert ratio([2.0, 6.0, 4.0], [1.0, 2.0, 4.0]) == 2
    assert "n/a: out of reach" in str(Row("pfl", failure="out of reach"))


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
