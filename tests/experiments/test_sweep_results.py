"""What a search shows: the order of its trials, tables that fit, what matters, pictures."""

import csv

import matplotlib.image
import optuna
import pytest
import yaml
from optuna.trial import TrialState, create_trial

from fl_lightning.experiments.space import read_parameters
from fl_lightning.experiments.study import (
    cells,
    draw_importance,
    draw_trials,
    importances,
    ranked,
    trial_line,
    trials_table,
    write_best,
)
from fl_lightning.experiments.sweep_plan import Plan, short_names
from fl_lightning.reports.charts import draw
from fl_lightning.reports.panels import points

LR, STEPS = "model.optimizer.lr", "federation.local_steps"
PARAMETERS = read_parameters({LR: {"low": 1e-3, "high": 1.0, "log": True}, STEPS: [1, 4]})
NAMES = short_names([*PARAMETERS])


@pytest.fixture(autouse=True)
def quiet_optuna():
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(before)


def study_of(trials, direction="maximize"):
    """Make a study of (state, value, lr, steps)."""
    study = optuna.create_study(direction=direction)
    distributions = {path: one.distribution for path, one in PARAMETERS.items()}
    for number, (state, value, lr, steps) in enumerate(trials):
        stopped = state == TrialState.PRUNED
        study.add_trial(
            create_trial(
                state=state,
                value=value,  # of a stopped one that of its last round, as Optuna keeps it
                params={LR: lr, STEPS: steps},
                distributions=distributions,
                intermediate_values={2: value} if stopped else {},
                user_attrs={"rounds": 2 if stopped else 9, "seconds": 7.0 + number},
            )
        )
    return study


def mixed(direction="maximize"):
    done, stopped = TrialState.COMPLETE, TrialState.PRUNED
    return study_of(
        [
            *((done, 0.8, 0.1, 1), (stopped, 0.2, 0.9, 4), (done, 0.9, 0.2, 4)),
            *((done, 0.9, 0.3, 1), (stopped, 0.3, 0.001, 1), (done, 0.7, 0.05, 4)),
        ],
        direction,
    )


def test_the_best_come_first_and_the_stopped_ones_last():
    study = mixed()
    assert [one.number for one in ranked(study)] == [2, 3, 0, 5, 1, 4]
    assert [one.number for one in ranked(mixed("minimize"))] == [5, 0, 2, 3, 1, 4]
    assert study.best_trial.number == 2  # of equal ones the earliest


def test_a_table_and_a_line_have_values_or_states():
    trials = mixed().trials
    line = trial_line(trials[2], 3, 6, None, is_best=True)
    assert line == "[3/6] trial 2: 0.9000, best so far, 9 s"
    line = trial_line(trials[1], 4, 6, "stopped after round 2", is_best=False)
    assert line == "[4/6] trial 1: stopped after round 2, 8 s"
    head, rows = cells(trials_table(mixed(), [LR, STEPS]), "val/accuracy", NAMES)
    assert head == ["trial", "val/accuracy", "rounds", "seconds", "lr", "local_steps"]
    assert rows[0] == ["2", "0.9000", "9", "9", "0.2", "4"]
    assert rows[4] == ["1", "stopped", "2", "8", "0.9", "4"]
    empty = trials_table(study_of([]), [LR, STEPS])
    assert cells(empty[empty["state"] != "failed"], "val/accuracy", NAMES) == (head, [])


def test_the_csv_has_every_digit_and_no_value_of_what_was_stopped(tmp_path):
    study = study_of([(TrialState.COMPLETE, 1 / 3, 0.1, 1), (TrialState.PRUNED, 0.5, 0.2, 4)])
    trials_table(study, [LR, STEPS]).to_csv(tmp_path / "t.csv", index=False)
    with (tmp_path / "t.csv").open() as file:
        first, second = csv.DictReader(file)
    assert float(first["value"]) == 1 / 3
    assert (first["state"], first[LR], first[STEPS]) == ("complete", "0.1", "1")
    assert (second["state"], second["value"], second["rounds"]) == ("stopped", "", "2")


def test_best_yaml_is_the_configuration_with_the_values(tmp_path):
    configuration = {
        "model": {"optimizer": {"class_path": "a.B", "init_args": {"lr": 0.5}}},
        "federation": {"local_steps": 2},
        "test_after_fit": True,
    }
    places = {LR: ("model", "optimizer", "init_args", "lr"), STEPS: ("federation", "local_steps")}
    plan = Plan(configuration, PARAMETERS, places, [0], tmp_path)
    write_best(tmp_path / "best.yaml", mixed().trials[2], plan, "val/accuracy")
    text = (tmp_path / "best.yaml").read_text()
    assert text.startswith("# val/accuracy 0.9: trial 2 of a search over\n#   model.optimizer.lr")
    found = yaml.safe_load(text)
    assert found["model"]["optimizer"]["init_args"]["lr"] == 0.2
    assert found["federation"] == {"local_steps": 4}
    assert found["test_after_fit"] is True


@pytest.mark.parametrize(("direction", "sign"), [("maximize", 1), ("minimize", -1)])
def test_the_option_that_decides_matters_most_also_where_bad_trials_were_stopped(direction, sign):
    """Where the rate is bad, trials were stopped; among the others only steps differ a little."""
    trials = []
    for number in range(24):
        lr, steps = 10.0 ** (-3 + 3 * (number * 5 % 24) / 23), (1, 4)[number % 2]
        if lr < 0.1:
            trials.append((TrialState.PRUNED, sign * 0.2, lr, steps))
        else:
            trials.append((TrialState.COMPLETE, sign * (0.9 + 0.01 * (steps == 4)), lr, steps))
    shares = importances(study_of(trials, direction))
    assert next(iter(shares)) == LR
    assert shares[LR] > 0.8
    assert sum(shares.values()) == pytest.approx(1)
    done = TrialState.COMPLETE  # few or equal ones say nothing
    assert importances(study_of([(done, 0.5, 0.1, 1), (done, 0.6, 0.2, 4)])) == {}
    assert importances(study_of([(done, 0.5, 0.1 * n, 1) for n in range(1, 7)])) == {}


def test_pictures(tmp_path):
    study = mixed("minimize")
    draw_trials(tmp_path, study, "val/loss")
    draw_importance(tmp_path / "importance", importances(study), NAMES)
    for name in ("trials", "options", "importance"):
        assert matplotlib.image.imread(tmp_path / f"{name}.png")[..., :3].std() > 0.02
        assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")


def test_names_of_classes_do_not_overlap():
    names = ["fl_lightning.server.CoordinateMedian", "fl_lightning.server.Krum", "0.5", None]
    figure, _ = draw({"": points(names, [0, 1, 2, 3], [""] * 4, labels=("", ""))})
    figure.draw_without_rendering()
    ticks = figure.axes[0].get_xticklabels()
    assert [tick.get_text() for tick in ticks] == ["CoordinateMedian", "Krum", "0.5", "None"]
    assert {tick.get_rotation() for tick in ticks} == {20}
