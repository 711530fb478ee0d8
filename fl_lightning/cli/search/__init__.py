"""The command ``fl-lightning search``: finds an architecture under constraints, without training.

Architectures of a space are scored by a proxy or a table of accuracies; those of a trained supernet by their
validation accuracy.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from fl_lightning.cli.checks import check_writable
from fl_lightning.cli.latency import add_networks, networks_of, show_progress
from fl_lightning.cli.search.trained import Trained, look_at
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import check_seed
from fl_lightning.nas.cost.latency import LatencyTable
from fl_lightning.nas.network import retraining
from fl_lightning.nas.search import strategies
from fl_lightning.nas.search.findings import Findings, write_sweep
from fl_lightning.nas.search.problem import (
    Constraint,
    Costs,
    Objective,
    Problem,
    shown,
)
from fl_lightning.nas.search.proxies import PROXIES
from fl_lightning.nas.search.proxy_scores import (
    MeanRank,
    ProxyScore,
    folder_batches,
    noise_batch,
)
from fl_lightning.nas.spaces.named import NAMES
from fl_lightning.nas.spaces.nas_bench_201 import NASBench201Table
from fl_lightning.nas.spaces.space import Architecture, Networks
from fl_lightning.reports.screen import markdown

StrategyName = Literal["random", "evolution", "regularized_evolution", "predictor", "tpe", "nsga2"]
_SIZES = ("params", "flops")
_SCORES = (*PROXIES, *_SIZES, "accuracy")

_STRATEGIES: dict[str, Callable[[str], strategies.Strategy]] = {
    "random": lambda measure: strategies.RandomSearch(),
    "evolution": lambda measure: strategies.Evolution(),
    "regularized_evolution": lambda measure: strategies.RegularizedEvolution(),
    "predictor": lambda measure: strategies.PredictorSearch(),
    "tpe": lambda measure: strategies.OptunaSearch("tpe"),
    "nsga2": lambda measure: strategies.OptunaSearch("nsga2", measure),
}
# function from an architecture to the configuration that trains it
Retraining = Callable[[Architecture], dict[str, Any]]


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fl-lightning search`` to its parser."""
    add_networks(parser, required=False)
    group = parser.add_argument_group("a trained supernet")
    _add_texts(
        group,
        ckpt_path="A checkpoint of a trained supernet (OneShot, Supernet), whose sub-networks are scored by "
        "their accuracy on validation examples. Space and sizes are its configuration's.",
    )
    _add_list(
        group,
        *("-c", "--config"),
        text="The supernet's configuration, one file or several; that of the run that wrote "
        "--ckpt_path if null. Words after -- are further options of it.",
    )
    group = parser.add_argument_group("what is maximised, under which constraints")
    _add_texts(
        group,
        score=f"What is maximised: {', '.join(PROXIES)} of fresh networks, {', '.join(_SIZES)}, several of "
        "these as synflow+params, which is the mean of their ranks; or accuracy: that in --table, or with "
        "--ckpt_path that of the supernet's parts. If null accuracy with one of these two, else synflow.",
        table="The truth of NAS-Bench-201, a CSV file.",
        latency="A file of fl-lightning latency: the cost latency_ms.",
    )
    _add_list(
        group,
        "--images",
        text="A folder of images, one sub-folder a class, for proxies; noise if none. May be given several times, "
        "once for each client: scores are pooled. Synflow sees their shape alone.",
    )
    _add_list(
        group,
        "--constraint",
        text="E.g. 'flops<=4e7', 'params<=1e6', 'latency_ms<=8'. May be given several times.",
    )
    group.add_argument(
        "--batch_size", type=PositiveInt, default=32, help="Images that a proxy sees."
    )
    group = parser.add_argument_group("the search and what it finds")
    group.add_argument(
        "--strategy", type=StrategyName, default="evolution", help="How networks are chosen."
    )
    group.add_argument("--budget", type=PositiveInt, default=200, help="Networks to score.")
    group.add_argument("--seed", type=int, default=0, help="Of all draws.")
    group.add_argument("--out", type=str, default="runs/search", help="Folder of the findings.")
    _add_texts(
        group,
        front="The cost of the Pareto front; if null that of the first constraint, or flops.",
        export="The YAML file of the best network; <out>/best.yaml if null.",
        sweep="Instead of scoring: a YAML file to write, with which fl-lightning sweep trains networks.",
    )


def _add_texts(group: Any, **texts: str) -> None:
    for name, text in texts.items():
        group.add_argument(f"--{name}", type=str | None, default=None, help=text)


def _add_list(group: Any, *names: str, text: str) -> None:
    group.add_argument(*names, action="append", type=str, default=[], help=text)


def search(given: Any, *, options: Sequence[str]) -> None:
    """Run ``fl-lightning search``. The words after ``--`` are options of the supernet's configuration."""
    check_seed("search", given.seed)
    if given.config or given.ckpt_path is not None:
        look_at(given, options, partial(_search_trained, given))
        return
    if options:
        raise ConfigurationError(
            "words after -- are options of a supernet's configuration: give --ckpt_path as well"
        )
    if given.space is None:
        raise ConfigurationError(
            f"space must be one of {', '.join(NAMES)}, or give --ckpt_path of a trained supernet"
        )
    given.score = given.score or ("synflow" if given.table is None else "accuracy")
    _check_sources(given)
    networks = networks_of(given)
    if given.sweep is not None:
        sweep = Path(given.sweep)
        check_writable("sweep", sweep)
        if sweep.exists():
            raise ConfigurationError(f"sweep: {sweep} exists: name another file, or remove it")
        write_sweep(sweep, networks.space, partial(retraining, networks=networks), given.seed)
        words = data_words(networks, given.images)
        print(
            _next(
                f"fl-lightning sweep --search {shlex.quote(given.sweep)} --", words, "of the trials"
            )
        )
        return
    configuration = partial(retraining, networks=networks)
    _search(given, networks, partial(_objective, given, networks), configuration)


def _check_sources(given: Any) -> None:
    """Raise ConfigurationError if the score is unknown, or does not use a table or images that were given."""
    names = given.score.split("+")
    if set(names) - set(_SCORES) or ("accuracy" in names and len(names) > 1):
        raise ConfigurationError(
            f"score must be one of {', '.join(_SCORES)}, or several of them (except accuracy) joined by +, got "
            f"{given.score!r}"
        )
    if given.table is not None and given.score != "accuracy":
        raise ConfigurationError(
            f"table: a search by --score {given.score} does not read it: leave --table out, or give --score "
            "accuracy"
        )
    if given.images and not set(names) & set(PROXIES):
        raise ConfigurationError(
            f"images: a search by --score {given.score} does not use them: leave --images out, or give "
            f"--score as one of {', '.join(PROXIES)}"
        )


def _search_trained(given: Any, trained: Trained) -> None:
    given.score = "accuracy"
    networks, weights = trained.networks, trained.weights
    configuration = partial(retraining, networks=networks, weights=weights, run=trained.run)
    _search(given, networks, lambda costs: trained.score, configuration)


def _search(
    given: Any,
    networks: Networks,
    objective: Callable[[Costs], Objective],
    configuration: Retraining,
) -> None:
    table = None
    measures = ["flops", "params", "activations"]
    if given.latency is not None:
        table = LatencyTable.read(given.latency)
        table.check(networks)
        measures.append("latency_ms")
    costs = _costs(networks, table)
    constraints = tuple(Constraint.parse(text, measures) for text in given.constraint)
    if given.front is not None and given.front not in measures:
        raise ConfigurationError(
            f"front must be one of the costs {', '.join(measures)}, got {given.front!r}"
        )
    measure = given.front or (constraints[0].measure if constraints else "flops")
    score = _with_progress(objective(costs), given.budget)
    problem = Problem(networks.space, score, costs, constraints)
    strategy = _STRATEGIES[given.strategy](measure)
    check_writable("out", Path(given.out), is_folder=True)
    if given.export is not None:
        check_writable("export", Path(given.export))
    result = strategy.search(problem, given.budget, given.seed)
    show_progress(f"done: {len(result.evaluated)} networks")
    _report(Findings(result, measure, given.score), given, table, configuration)


def _objective(given: Any, networks: Networks, costs: Costs) -> Objective:
    """Return the function that scores architectures, for a search without a trained supernet."""
    names = given.score.split("+")
    if len(names) > 1:
        every = [_one_objective(given, networks, costs, name) for name in names]
        return MeanRank(every, networks.space, seed=given.seed)
    return _one_objective(given, networks, costs, names[0])


def _one_objective(given: Any, networks: Networks, costs: Costs, name: str) -> Objective:
    if name in _SIZES:
        return lambda architecture: costs(architecture)[name]
    if name == "accuracy":
        if given.table is None:
            raise ConfigurationError(
                "score: accuracy needs the table of NAS-Bench-201: give --table"
            )
        truth = NASBench201Table.read(given.table)
        return lambda architecture: truth.lookup(architecture)["cifar10"]
    sizes = given.batch_size, networks, given.seed
    batches = folder_batches(given.images, *sizes) or [noise_batch(*sizes)]
    return ProxyScore(name, networks, batches, given.seed)


def _costs(networks: Networks, table: LatencyTable | None) -> Costs:
    def costs(architecture: Architecture) -> Mapping[str, float]:
        latency = {} if table is None else {"latency_ms": table.milliseconds(architecture)}
        return {**asdict(networks.cost(architecture)), **latency}

    return costs


def _with_progress(score: Objective, budget: int) -> Objective:
    done = 0

    def scored(architecture: Architecture) -> float:
        nonlocal done
        value, done = score(architecture), done + 1
        show_progress(f"{done} of {budget} networks")
        return value

    return scored


def _report(
    found: Findings, given: Any, table: LatencyTable | None, configuration: Retraining
) -> None:
    """Write a search's tables, figures and best network's configuration; print the Pareto front."""
    out, best, count = Path(given.out), found.best, len(found.result.evaluated)
    found.write_evaluated(out / "evaluated.csv")
    target = Path(given.export) if given.export else out / "best.yaml"
    content = configuration(best.architecture)
    text = found.export(target, content, [] if table is None else [f"latency_ms on {table}"])
    found.write_page(out, text)
    print(markdown(*found.front_rows()))
    is_all = count == given.budget
    more = "" if is_all else f" of {given.budget}: no others were found within the constraints"
    print(f"\nscored:   {count} networks of {best.architecture.space.name}{more}")
    print(f"best:     {best.architecture}")
    costs = [f"{name} {shown(value)}" for name, value in best.costs.items()]
    score = [] if given.score in best.costs else [f"{given.score} {best.score:.6g}"]
    print(f"          {', '.join([*score, *costs])}")
    if table is not None:
        print(f"latency:  {table.where}\n          {table.accuracy}")
    print(f"results:  {out}/report.html, evaluated.csv, front.png")
    command = f"fl-lightning fit --config {shlex.quote(str(target))}"
    if "data" in content:
        print(f"next:     {command}")
    else:  # the search had no data module
        space, network = best.architecture.space, content["model"]["init_args"]
        options = {
            name: network["network"]["init_args"][name] for name in ("in_channels", "num_classes")
        }
        networks = Networks(space, network["image_size"], options)
        print(_next(command, data_words(networks, given.images), "of the run"))


def data_words(networks: Networks, images: Sequence[str]) -> list[str]:
    """Return ``--data`` options of a fit that suit the networks' input shape; empty if no known data set does.

    Args:
        networks: the networks.
        images: folders of images, with one folder per class; the options name the first.
    """
    size = [f"--data.image_size={networks.side}"]
    if images:
        folder = Path(images[0])
        root = [f"--data.root={folder.parent}", f"--data.train={folder.name}", "--data.test=null"]
        return ["--data=fl_lightning.data.ImageFolder", *root, *size]
    name = _KNOWN_DATA.get((networks.shape["in_channels"], networks.shape["num_classes"]))
    return [] if name is None else [f"--data=fl_lightning.data.{name}", *size]


_KNOWN_DATA = {
    (1, 10): "Digits",
    (3, 10): "CIFAR10",
    (3, 100): "CIFAR100",
}  # by channels and classes


def _next(command: str, data: Sequence[str], of: str) -> str:
    """Return a line with the next command to type, including its data options or a note that data must be named."""
    if data:
        return f"next:     {command} {shlex.join(data)}"
    return f"next:     {command}, with the data {of}: add --config or --data options that name them"
