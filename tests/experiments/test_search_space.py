"""What a search's YAML may say, where it applies, and what is refused before any trial."""

import math
import sys

import optuna
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import FloatDistribution, IntDistribution
from toys import toy_options

from fl_lightning.cli.commands import resolve
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.experiments.space import Parameter, Search, read_parameters
from fl_lightning.experiments.study import ask, sampler_of
from fl_lightning.experiments.sweep_plan import place_of, plan_search, short_names, with_values

BASE = toy_options(max_epochs=3)
BASE["federation"]["cohort"] = {
    "class_path": "fl_lightning.UniformCohort",
    "init_args": {"size": 2},
}
LR = {"low": 0.01, "high": 1.0, "log": True}


@pytest.fixture(autouse=True)
def no_words_of_pytest(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])


def plan(space, out, options=(), **keys):
    search = Search(space=space, base=BASE, **keys)
    return plan_search(search, [], list(options), out=out, resolve=resolve)


def test_ranges_and_choices_are_read():
    found = read_parameters(
        {
            "a": {"low": 1, "high": 9, "step": 2},
            "b": {"low": 1, "high": "2.5e0"},
            "c": ["x", None, True],
            "d": [{"class_path": "my.Krum"}, {"class_path": "my.Median"}],
            "e": {"choices": {"off": None, "on": {"class_path": "my.Median"}}},
        }
    )
    assert found["a"].distribution == IntDistribution(1, 9, step=2)
    assert found["b"].distribution == FloatDistribution(1.0, 2.5)
    assert list(found["c"].choices) == ["x", None, True]
    assert list(found["d"].choices) == ["Krum", "Median"]
    assert found["e"].value_of("on") == {"class_path": "my.Median"}


REFUSED = [
    ({}, "space must name at least one option"),
    (
        {"a": 3},
        "a must be a list of values, or a mapping with low and high, or with choices, got 3",
    ),
    ({"a": {"low": 1}}, "a must have both low and high"),
    (
        {"a": {"low": 2, "high": 1}},
        "a must be a valid range: `low <= high` must hold, but got (low=2, high=1)",
    ),
    ({"a": {"low": 0, "high": 1, "log": True}}, "`low >= 1` must hold for `log=True`"),
    ({"a": {"low": 1, "high": 2, "log": "yes"}}, "log, which must be true or false, got 'yes'"),
    ({"a": {"low": "one", "high": 2}}, "low, which must be a number, got 'one'"),
    ({"a": {"low": True, "high": 2}}, "low, which must be a finite number, got True"),
    ({"a": {"low": 0, "high": math.inf}}, "high, which must be a finite number"),
    (
        {"a": {"low": 0, "high": 1, "setp": 1}},
        "a has setp, which is not accepted: the keys are low, high",
    ),
    ({"a": {"low": 1, "high": 9, "log": True, "step": 2}}, "a must be a valid range: "),
    ({"a": []}, "at least one value"),
    ({"a": [{"class_path": "x.A"}, {"class_path": "y.A"}]}, "choices of the same name"),
    ({"a": [1, 2], "a.b": [1, 2]}, "a.b is inside a"),
]


def test_a_space_that_says_nothing_is_refused_with_all_its_problems():
    for space, message in REFUSED:
        with pytest.raises(ConfigurationError) as refused:
            read_parameters(space)
        assert message in str(refused.value)
    with pytest.raises(ConfigurationError, match=r"(?s)space: a .*\nspace: b "):
        read_parameters({"a": 3, "b": {"low": 1}})


@given(
    low=st.floats(1e-6, 1e3),
    ratio=st.just(1.0) | st.floats(1.001, 1e6),  # ends that are one, or apart
    points=st.integers(1, 9),
    log=st.booleans(),
)
def test_a_grid_lies_in_its_range_and_is_one_of_optunas(low, ratio, points, log):
    distribution = FloatDistribution(low, low * ratio, log=log)
    grid = Parameter(distribution, points=points).grid("x")
    assert len(grid) == (1 if ratio == 1 else points)
    assert grid[0] == low
    assert grid == sorted(grid)
    assert points == 1 or grid[-1] == distribution.high
    assert all(distribution._contains(distribution.to_internal_repr(one)) for one in grid)


def test_a_grid_has_an_end_and_its_size_is_the_number_of_its_trials():
    with pytest.raises(ConfigurationError, match=r"model.lr: the sampler grid needs the numbers"):
        Search(space={"model.lr": LR}, sampler="grid")
    with pytest.raises(ConfigurationError, match="has 1000001 numbers, too many"):
        Search(space={"model.lr": {"low": 0, "high": 1_000_000}}, sampler="grid")
    space = {"model.lr": {**LR, "points": 3}, "federation.local_steps": [1, 2]}
    assert Search(space=space, sampler="grid").num_trials == 6
    assert Search(space=space, sampler="grid", trials=4).num_trials == 4
    assert Search(space=space, sampler="random").num_trials == 20


def test_places_in_lists_classes_and_free_mappings():
    configuration = {
        "trainer": {"callbacks": [{"class_path": "a.B", "init_args": {"x": 1}}]},
        "model": {"class_path": "m.M", "init_args": {"kwargs": {"depth": 2}}},
    }
    assert place_of(configuration, "trainer.callbacks.0.x")[-2:] == ("init_args", "x")
    assert place_of(configuration, "model.init_args.kwargs.depth") == (
        *("model", "init_args", "kwargs", "depth"),
    )
    place = place_of(configuration, "model.kwargs.width")  # new
    assert with_values(configuration, {place: 3})["model"]["init_args"]["kwargs"]["width"] == 3
    assert "width" not in configuration["model"]["init_args"]["kwargs"]
    with pytest.raises(ConfigurationError, match="model has no 'x'"):
        place_of(configuration, "model.x.x")  # only the last word may be new
    with pytest.raises(ConfigurationError, match="callbacks is a list of length 1: name an entry"):
        place_of(configuration, "trainer.callbacks.1.x")


MANY = {"model.lr": LR, "federation.local_steps": [1, "many"]}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"modle.lr": [1, 2]}, "no 'modle'. Did you mean 'model'"),
        ({"model.optimiser.lr": [1, 2]}, "model has no 'optimiser'"),
        ({"federation.server_optimizer.lr": [1]}, "server_optimizer is null in the configuration"),
        ({"federation.local_step": [1, 2]}, "'local_step' is not accepted"),
        ({"model.larning_rate": [1, 2]}, "'larning_rate' is not accepted by ToyModule"),
        # the ends of every range are tried
        (MANY, r"space: with .*local_steps: many"),
        ({"federation.cohort": [{"class_path": "fl_lightning.Fediverse"}]}, "with .*Fediverse"),
        ({"model.lr": LR, "model.init_args.lr": LR}, "are the same option"),
    ],
)
def test_what_is_no_option_or_value_is_refused_before_any_trial(space, message, tmp_path):
    with pytest.raises(ConfigurationError, match=message):
        plan(space, tmp_path)


def test_a_trial_has_its_values_and_nothing_else_changed(tmp_path):
    cohort = {"choices": {"all": None, "two": BASE["federation"]["cohort"]}}
    found = plan({"model.lr": LR, "federation.cohort": cohort}, tmp_path, ["--seed_everything=5"])
    assert found.seeds == [5]
    run = found.run(3, {"model.lr": 0.5, "federation.cohort": "all"}, 5)
    changed = yaml.safe_load(run.configuration)
    assert changed["model"]["init_args"].pop("lr") == 0.5
    assert changed["federation"].pop("cohort") is None
    assert changed.pop("test_after_fit") is False
    base = yaml.safe_load(yaml.safe_dump(found.configuration))
    assert base["model"]["init_args"].pop("lr") == 0.1
    base["federation"].pop("cohort")
    base.pop("test_after_fit")
    assert changed == base
    assert run.folder == tmp_path / "trial_0003" / "seed_5"


def test_what_the_configuration_says_is_a_trial_if_it_is_in_the_space(tmp_path):
    space = {"model.lr": LR, "federation.local_steps": [1, 2]}
    assert plan(space, tmp_path).as_configured == {"model.lr": 0.1, "federation.local_steps": 2}
    assert plan({"model.lr": {"low": 0.2, "high": 1.0}}, tmp_path).as_configured is None


def test_short_names_tell_options_apart():
    names = short_names(["model.optimizer.init_args.lr", "federation.server_optimizer.lr", "a.b"])
    assert list(names.values()) == ["optimizer.lr", "server_optimizer.lr", "b"]


def test_every_trial_draws_anew_wherever_it_runs():
    """A second process, or one after a resume, proposes what the first would have proposed."""
    space = {"x": {"low": 0.0, "high": 1.0}, "y": [1, 2]}

    def proposals(seed, restarts):
        storage = optuna.storages.InMemoryStorage()
        search = Search(space=space, startup_trials=4, sampler_seed=seed)
        found = []
        for number in range(12):
            if number == 0 or number in restarts:
                study = optuna.create_study(
                    storage=storage,
                    study_name="s",
                    sampler=sampler_of(search, 0),
                    load_if_exists=True,
                )
            trial = ask(study, search)
            found.append(dict(trial.params))
            study.tell(trial, (trial.params["x"] - 0.3) ** 2)
        return found

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        whole = proposals(0, ())
        assert proposals(0, (1, 3, 5, 6, 10)) == whole
        assert len({one["x"] for one in whole}) == 12
        assert proposals(1, ()) != whole
    finally:
        optuna.logging.set_verbosity(before)
