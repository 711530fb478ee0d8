"""Searches that train nothing: constraints, budgets, determinism, and that they find what is there."""

import math
from dataclasses import asdict

import pytest

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import torch_generator
from fl_lightning.nas.search.problem import (
    Constraint,
    Problem,
    crossed,
    mutated,
    with_one_change,
)
from fl_lightning.nas.search.strategies import (
    Evolution,
    OptunaSearch,
    PredictorSearch,
    RandomSearch,
    RegularizedEvolution,
)
from fl_lightning.nas.spaces.mobilenet import small_mobilenet
from fl_lightning.nas.spaces.nas_bench_201 import NASBench201
from fl_lightning.nas.spaces.vit import ViT

CELLS = NASBench201()
OTHERS = [
    RegularizedEvolution(),
    Evolution(),
    PredictorSearch(first=25, candidates=10),
    OptunaSearch("tpe"),
    OptunaSearch("nsga2"),
]
STRATEGIES = [RandomSearch(), *OTHERS]
MEASURES = ["flops", "params"]


def costs(architecture):
    return asdict(architecture.space.cost(architecture))


def worth(cell):
    """A hidden score: how many choices are those of one cell."""
    return sum(a == b for a, b in zip(cell.choices, (3, 1, 4, 2, 0, 3), strict=True))


def problem(*constraints, score=worth, space=CELLS):
    return Problem(
        space, score, costs, tuple(Constraint.parse(text, MEASURES) for text in constraints)
    )


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_search_spends_its_budget_on_different_networks_within_the_constraints(strategy):
    result = strategy.search(problem("flops<=6e7", "params>=1e5"), budget=60, seed=3)
    assert len({one.architecture for one in result.evaluated}) == len(result.evaluated) == 60
    assert all(one.costs["flops"] <= 6e7 for one in result.evaluated)
    assert all(one.costs["params"] >= 1e5 for one in result.evaluated)
    assert all(one.score == worth(one.architecture) for one in result.evaluated)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_search_is_a_function_of_its_seed(strategy):
    runs = [strategy.search(problem("flops<=6e7"), 30, seed=seed) for seed in (0, 0, 1)]
    found = [[one.architecture for one in run.evaluated] for run in runs]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("strategy", [RegularizedEvolution(), Evolution(), OptunaSearch()], ids=str)
def test_what_learns_from_scores_beats_random_search(strategy):
    def mean(search):
        return sum(search.search(problem(), 100, seed=seed).best.score for seed in range(5)) / 5

    assert mean(strategy) > mean(RandomSearch()) + 0.5


def test_a_predictor_finds_with_45_scores_more_than_random_search_with_100():
    for seed in range(2):
        found = PredictorSearch().search(problem(), 45, seed=seed).best.score
        assert found > RandomSearch().search(problem(), 100, seed=seed).best.score


def test_the_front_is_what_nothing_else_beats():
    result = RandomSearch().search(problem(), 80)
    front = result.front("flops")
    assert front[-1].score == result.best.score
    for one in result.evaluated:
        dominated = any(
            f.costs["flops"] <= one.costs["flops"] and f.score >= one.score for f in front
        )
        assert dominated
    assert [f.score for f in front] == sorted({f.score for f in front})


def test_useless_networks_are_not_on_the_front():
    result = RandomSearch().search(
        problem(score=lambda cell: worth(cell) if cell.choices[0] else -math.inf), 40
    )
    assert all(one.score > -math.inf for one in result.front("params"))


def test_a_search_ends_when_there_is_nothing_more():
    space = ViT(depths=(1,))
    for strategy in STRATEGIES:
        result = strategy.search(problem(space=space, score=lambda one: sum(one.choices)), 50)
        assert len(result.evaluated) == space.size == 12


def test_scores_of_known_networks_are_not_asked_for_again():
    asked = []

    def score(cell):
        asked.append(cell)
        return worth(cell)

    Evolution().search(problem(score=score), 100)
    assert len(asked) == len(set(asked)) == 100


@pytest.mark.parametrize(
    "text",
    ["", "flop<=1", "flops<1e7", "flops<=many", "flops<=-3", "flops<=nan", "flops<=1e7 params"],
)
def test_a_constraint_that_makes_no_sense_is_refused(text):
    with pytest.raises(ConfigurationError, match=r"a number above 0.*Costs are flops, params$"):
        Constraint.parse(text, MEASURES)
    with pytest.raises(ConfigurationError, match=r"latency_ms needs a file.*--latency"):
        Constraint.parse("latency_ms<=8", MEASURES)


def test_a_constraint_reads_back():
    for text in ("flops<=4e+07", "params>=1500"):
        assert str(Constraint.parse(text, MEASURES)) == text
    assert Constraint.parse(" params >= 1500 ", MEASURES).excess({"params": 1200}) == 0.2


@pytest.mark.parametrize(
    ("constraints", "says"),
    [
        (
            ["flops<=1e6"],
            "no network of nas_bench_201 that meets it was found; the closest has flops 7,783,050",
        ),
        (["params>=2e6"], "the closest has params 1,531,546"),
        (["flops<=8e6", "params>=1e6"], "the closest has flops .*, params "),
    ],
)
def test_constraints_that_nothing_meets_say_what_there_is(constraints, says):
    with pytest.raises(ConfigurationError, match=says):
        RandomSearch().search(problem(*constraints), 5)


def test_a_tight_constraint_of_a_large_space_is_met():
    space = small_mobilenet()
    least = costs(space.smallest)["flops"]
    tight = problem(f"flops<={1.15 * least}", space=space, score=lambda one: costs(one)["params"])
    result = Evolution(population=8).search(tight, 24)
    assert len(result.evaluated) == 24
    with pytest.raises(
        ConfigurationError,
        match=f"closest has flops {least:,}: {space.smallest}".replace("|", r"\|"),
    ):
        RandomSearch().search(problem(f"flops<={0.99 * least}", space=space), 1)


def test_changes_of_architectures():
    generator = torch_generator(0, "test")
    for space in (CELLS, small_mobilenet()):
        one, other = space.sample(generator), space.sample(generator)
        assert with_one_change(one, generator) != one
        assert mutated(CELLS.sample(generator), 0.0, generator).space == CELLS
        child = crossed(one, other, generator)
        assert child.space == space
    for _ in range(20):
        one, other = CELLS.sample(generator), CELLS.sample(generator)
        changed = with_one_change(one, generator)
        assert sum(a != b for a, b in zip(one.choices, changed.choices, strict=True)) == 1
        assert mutated(one, 0.0, generator) == one
        pairs = zip(crossed(one, other, generator).choices, one.choices, other.choices, strict=True)
        assert all(c in (a, b) for c, a, b in pairs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RegularizedEvolution(population=3, tournament=4),
        lambda: Evolution(parents=0),
        lambda: Evolution(population=2),
        lambda: OptunaSearch("cmaes"),
        lambda: RandomSearch().search(problem(), 0),
    ],
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(ConfigurationError):
        make()


def test_a_score_that_is_no_number_is_an_error():
    with pytest.raises(ValueError, match="is NaN"):
        RandomSearch().search(problem(score=lambda cell: math.nan), 1)
