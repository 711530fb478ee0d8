"""Logs and files of a search by `Supernet`, and the choice of the architecture at its end.

Logged in every round: ``search/entropy`` of the operation probabilities (nats per row, at most the log of
the number of operations), ``search/signal_to_noise`` of α's gradients (see `GradientSignal`),
``search/expected_flops``, ``search/expected_latency_ms`` with a latency file, ``search/table/…`` with a
table of results; in TensorBoard also the current cell and the probabilities.
Written at the end, in the folder of the run:

    cell.png, cell.svg      the architecture as a graph
    architecture.yaml       arguments of `Network`
    retrain.yaml            a configuration that trains it from scratch, see `retraining`
    sections/search.html    the section of report.html: architecture, probabilities and cost over rounds,
                            if a round was complete

Where accuracy chooses the architecture (`Supernet`'s ``selection``, `Reward`'s ``best_of``), it does so at the end
of the last round, before checkpoints are saved, so that they contain the choice.
A run of several rounds is refused if α cannot decide in it: Adam moves a number by about its learning rate per
step (Kingma, Ba 2015, section 2.1), and even if all steps agree the entropy stays too high.
The last line of a search says if α has not decided: the entropy is above 98 % of the largest possible, or,
if α is held, the mean gradient is below 2 of its standard errors (judged from 10 steps of α on).
In a federation the callback adds the stage by which the server steps α, see `ServerSearchStep`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation import CONFIG, run_folder
from fl_lightning.nas.alpha_optimizer import GradientSignal, ServerSearchStep
from fl_lightning.nas.mixture import protector
from fl_lightning.nas.network import retraining
from fl_lightning.nas.spaces.cells import CellSpace
from fl_lightning.nas.spaces.space import Architecture
from fl_lightning.reports.charts import Panel, draw, inline, series, write_figure
from fl_lightning.reports.graphs import Graph, graph_figure
from fl_lightning.reports.loggers import log_figure
from fl_lightning.reports.page import FRAGMENTS, Page
from fl_lightning.reports.panels import Line, curves, table_map
from fl_lightning.reports.progress import federation_of

_UNDECIDED_ENTROPY = 0.98  # share of the largest entropy above which α has not decided
_UNDECIDED_ERRORS = 2.0  # standard errors of the mean gradient below which a held α has not decided
_LEAST_STEPS = 10  # number of steps of α in shorter runs, which are not judged
_NUM_PICTURES = 20  # in TensorBoard, evenly spaced over the run


class SearchReport(Callback):
    """Callback that logs a `Supernet` search and writes its files; the `Supernet` adds it itself."""

    # no values outside of ε: everything is computed from the released model
    unprotected: str | None = None

    def __init__(self) -> None:
        self._signal = GradientSignal()
        # how accuracy has chosen, in words; empty if α selects, None before the last round
        self._choice: str | None = None
        self._shares: dict[int, Tensor] = {}  # probabilities of the operations after each round

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics of α's gradients, and the operation probabilities after each round."""
        return {**self._signal.state_dict(), "shares": dict(self._shares)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the gradient statistics and probabilities that `state_dict` returned."""
        self._signal.load_state_dict(state_dict)
        self._shares = dict(state_dict["shares"])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the run's options; in a federation, add the stage in which the server steps α."""
        module: Any = pl_module
        _check_precision(str(trainer.precision))
        federation = federation_of(trainer)
        module.signal = self._signal
        if stage == "fit":
            _check_length(trainer.max_epochs)
        if federation is None:
            _check_one_device(trainer.world_size)
            return
        _check_beside_updates(federation, module)
        if stage != "fit":
            return
        if federation.local_steps is not None:
            _check_turns(module.alpha_every, federation.local_steps, "federation.local_steps")
        if module.is_stepped_by_server:
            federation.add(
                ServerSearchStep(
                    list(module.alphas),
                    module.new_architecture_optimizer,
                    module.local_lr,
                    is_active=module.moves_alpha,
                    signal=self._signal,
                )
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise ConfigurationError if α gets no step in an epoch, or too few in the run to decide."""
        module: Any = pl_module
        per_round = 1.0
        if not module.is_federated:
            steps = trainer.num_training_batches
            _check_turns(module.alpha_every, steps, "the number of batches in an epoch")
            per_round = steps // module.alpha_every if math.isfinite(steps) else math.inf
        if module.is_stepped_by_server or not module.is_federated:
            rounds = range(trainer.max_epochs or 0)
            _check_reach(module, per_round * sum(map(module.moves_alpha, rounds)), len(rounds))

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log entropy, expected cost and other search metrics after the last batch of a round."""
        if not trainer.is_last_batch:
            return
        module: Any = pl_module
        shares = module.shares
        self._shares[trainer.current_epoch + 1] = shares.cpu()
        values = {
            "search/entropy": _entropy(shares),
            "search/expected_flops": module.costs["flops"].expected(shares),
        }
        if not math.isnan(self._signal.to_noise):
            values["search/signal_to_noise"] = torch.tensor(self._signal.to_noise)
        if module.latency is not None:
            values["search/expected_latency_ms"] = module.costs["latency_ms"].expected(shares)
        if module.table is not None:
            truth = module.table.lookup(module.architecture)
            values |= {f"search/table/{name}": torch.tensor(value) for name, value in truth.items()}
        numbers = {name: value.float() for name, value in values.items()}
        # all processes have the same values, so that their mean is the value
        module.log_dict(numbers, on_step=False, on_epoch=True, batch_size=1, sync_dist=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Select the architecture in the last round; draw it in TensorBoard about twenty times per run."""
        module: Any = pl_module
        if _is_last_round(trainer):
            self._choose(module)
        every = max(1, (trainer.max_epochs or 1) // _NUM_PICTURES)
        step = trainer.current_epoch
        if not trainer.is_global_zero or step % every:
            return
        cell, shares = module.architecture, {"": _map(module.space, module.shares)}
        log_figure(trainer, "search/cell", lambda: cell_figure(cell), step=step)
        log_figure(trainer, "search/probabilities", lambda: draw(shares)[0], step=step)

    def _verdict(self, module: Any, last_round: int) -> str:
        """Return a line of text that names the found architecture, or says that α is still undecided."""
        found, errors = module.architecture, self._signal.standard_errors
        if self._choice:
            return f"architecture: {found}, {self._choice}"
        if not module.moves_alpha(last_round):
            return (
                f"alpha has not moved: it is fixed for the first {module.alpha_from:.0%} of the search. Its "
                f"start is {found}. Lower model.alpha_from, or search longer"
            )
        equal = module.space.masked(torch.zeros_like(module.alpha)).softmax(1)
        entropy, largest = _entropy(module.shares), _entropy(equal)
        why = ""
        is_known = self._signal.count >= _LEAST_STEPS
        if module.alpha_held and is_known and errors < _UNDECIDED_ERRORS:
            why = f"its mean gradient is {errors:.1f} standard errors from zero"
        elif not module.alpha_held and entropy > _UNDECIDED_ENTROPY * largest:
            why = f"its entropy is {entropy:.3f} of at most {largest:.3f} nats"
        if not why:
            is_start = found == module.started_from
            return f"architecture: {found}{', that of its zero-cost start' if is_start else ''}"
        ratio, needs = self._signal.to_noise, ""
        if ratio > 0 and (steps := (3 / ratio) ** 2) > self._signal.count:
            needs = f": {steps:,.0f} steps of alpha at this signal to noise"
        return (
            f"alpha has not decided: {why}. Its largest numbers say {found}, little better than a draw. "
            f"Search longer{needs}, with a higher rate of alpha, or let the weights learn first (model.alpha_from)"
        )

    def _choose(self, module: Any) -> None:
        """Select the architecture by accuracy if the search's options ask for it."""
        if module.selection == "perturbation":
            self._choice = module.choose_by_perturbation()
        else:
            self._choice = module.choose_best(module.best_of)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the found architecture, and write it, its picture and its training configuration to files."""
        module: Any = pl_module
        folder = Path(run_folder(trainer))
        if self._choice is None:  # stopped by a later callback, or resumed without a round left
            saved = module.chosen
            self._choose(module)
            if module.chosen != saved:
                rank_zero_info(
                    "checkpoints of this run have no choice by accuracy: alpha selects there"
                )
        found = module.architecture
        cost = module.networks.cost(found)
        verdict = self._verdict(module, max(trainer.current_epoch - 1, 0))
        facts = [f"{cost.flops:,} multiply-adds, {cost.params:,} parameters"]
        if module.latency is not None:
            facts.append(f"{module.latency.milliseconds(found):.3g} ms on {module.latency}")
        for line in (verdict, *facts):
            rank_zero_info(line)
        if not trainer.is_global_zero or trainer.logger is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder.mkdir(parents=True, exist_ok=True)
        content = retraining(found, module.networks, run=_configuration(folder))
        network = content["model"]["init_args"]["network"]["init_args"]
        _write(folder / "architecture.yaml", network)
        _write(folder / "retrain.yaml", content)
        drawn = write_figure(cell_figure(found), folder / "cell")
        if self._shares:  # empty if no round reached its last batch, as with max_steps
            text = f"{verdict}. {', '.join(facts)}."
            self._write_section(folder, module, drawn, text)
        rank_zero_info(f"cell.png, architecture.yaml, retrain.yaml: {folder}")

    def _write_section(self, folder: Path, module: Any, drawn: str, text: str) -> None:
        """Write the report's search section: cell, operation probabilities, entropy and expected cost over rounds."""
        page, space, rounds = Page("search"), module.space, list(self._shares)
        page.heading("Architecture search")
        page.text(text)
        page.include(f'<div style="background:#fff;max-width:44rem">{inline(drawn, "cell")}</div>')
        last, over = self._shares[rounds[-1]], [*self._shares.values()]
        means = torch.stack(over).mean(1).T.tolist()  # over edges, by operation
        lines = [
            Line(rounds, values, name, colour=series(number))
            for number, (name, values) in enumerate(zip(space.operations, means, strict=True))
        ]
        entropy = [float(_entropy(shares)) for shares in over]
        flops = [float(module.costs["flops"].expected(shares)) for shares in over]
        panels = {
            "probabilities after the last round": _map(space, last),
            "mean probability over edges": curves(lines, from_zero=True),
            "entropy (nats per edge)": curves([Line(rounds, entropy)]),
            "expected multiply-adds": curves([Line(rounds, flops)]),
        }
        page.charts(panels, folder / "figures", prefix="search-")
        path = folder / FRAGMENTS / "search.html"
        path.parent.mkdir(exist_ok=True)
        path.write_text(page.fragment(), encoding="utf-8")


def cell_figure(architecture: Architecture, title: str = "") -> Any:
    """Draw an architecture's cells as graphs: nodes from left to right, edges labelled with operations.

    Missing edges are not drawn. Gray arrows without a name concatenate. Dashed edges have no effect: no
    path from an input to the output uses them.

    Returns:
        A figure of matplotlib.

    Raises:
        ConfigurationError: if the space of the architecture is not made of cells.
    """
    space = architecture.space
    if not isinstance(space, CellSpace):
        raise ConfigurationError(f"{space.name} is not made of cells: there is no graph to draw")
    kinds = dict.fromkeys(row.cell for row in space.rows)
    return graph_figure([_graph(space, architecture, kind) for kind in kinds], title)


def _graph(space: CellSpace, architecture: Architecture, kind: str) -> Graph:
    joined = space.concatenated(kind)
    edges = [
        (row.source, row.target, space.name_of(number, operation))
        for number, (row, operation) in enumerate(
            zip(space.rows, space.operations_of(architecture), strict=True)
        )
        if row.cell == kind and operation != space.none
    ]
    nodes = space.node_names(kind)
    # no edge enters an input
    entered = {row.target for row in space.rows if row.cell == kind} | {end for _, end in joined}
    title = kind if kind.startswith("stage") else f"{kind} cell"
    return Graph(
        title, nodes, [*edges, *((a, b, "") for a, b in joined)], len(nodes) - len(entered)
    )


def _map(space: CellSpace, shares: Tensor) -> Panel:
    """Return a chart panel of all operation probabilities, with a row per edge."""
    edges = [f"{row.cell} {row}" for row in space.rows]
    values = shares.double().cpu().numpy()
    return table_map(values, x="operation", y="edge", columns=space.operations, rows=edges)


def _entropy(shares: Tensor) -> Tensor:
    """Return the entropy of the operation probabilities, averaged over edges, in nats."""
    return -(shares * shares.clamp_min(1e-38).log()).sum(1).mean()


def _configuration(folder: Path) -> dict[str, Any] | None:
    """Return the configuration saved in the run's folder; None for a run started in Python."""
    path = folder / CONFIG
    content = yaml.safe_load(path.read_text()) if path.is_file() else None
    return content if isinstance(content, dict) else None


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def _is_last_round(trainer: Trainer) -> bool:
    """True if this round is the last; stops by later callbacks (EarlyStopping) are not seen."""
    num_done, num_steps = trainer.current_epoch + 1, trainer.global_step
    is_stopped = trainer.should_stop and num_done >= (trainer.min_epochs or 0)
    return is_stopped or num_done == trainer.max_epochs or 0 <= trainer.max_steps <= num_steps


def _check_precision(precision: str) -> None:
    """Raise ConfigurationError if the trainer's precision stores α or its gradient in 16 bits."""
    reason = {
        "16": "gradients of alpha are taken without the scale that keeps float16 from rounding them to zero",
        "bf16-true": "alpha has 8 binary digits, by which its small steps round to nothing",
    }
    for start, why in reason.items():
        if precision.startswith(start):
            raise ConfigurationError(
                f"trainer.precision is {precision}, and {why}: use bf16-mixed or 32-true"
            )


def _check_one_device(world_size: int) -> None:
    """Raise ConfigurationError if a search without a federation runs in several processes."""
    if world_size > 1:
        raise ConfigurationError(
            f"a search without federation trains in one process, got {world_size}: each would have its own "
            "alpha. Set trainer.devices to 1, or add a federation block, whose clients train in all processes"
        )


def _check_length(max_epochs: int | None) -> None:
    """Raise ConfigurationError if the trainer has no number of epochs."""
    if max_epochs is None or max_epochs < 1:
        raise ConfigurationError(
            f"trainer.max_epochs must be at least 1 in a search, got {max_epochs}: the temperature, and the round "
            "in which alpha starts to move, depend on it"
        )


def _check_turns(alpha_every: int, num_steps: float, what: str) -> None:
    """Raise ConfigurationError if a round has fewer steps than `alpha_every`, so that α never moves."""
    if num_steps < alpha_every:
        raise ConfigurationError(
            f"model.alpha_every is {alpha_every}, and {what} is {num_steps:g}: alpha would never move. "
            f"Set model.alpha_every to {num_steps:g} or less, or take more steps per round"
        )


def _check_beside_updates(federation: Any, module: Any) -> None:
    """Raise ConfigurationError if updates are protected but clients would send other values in clear."""
    sends = {
        "architecture_state: clients": module.architecture_state == "clients",
        "the number of right answers of model.selection perturbation": module.selection != "alpha",
        "the baseline of model.learn Reward": module.baseline.numel() > 0,
    }
    sent, hides = [what for what, is_sent in sends.items() if is_sent], protector(federation)
    if sent and hides is not None:
        raise ConfigurationError(
            f"{sent[0]} is sent beside the update, and {type(hides).__name__} protects updates alone: set "
            "model.architecture_state: server, model.learn: Gradient, and model.selection: alpha"
        )


def _check_reach(module: Any, num_steps: float, num_rounds: int) -> None:
    """Raise ConfigurationError if this run is too short for α to decide, even if all its steps agreed.

    Runs of a single round or of fewer than 10 steps, which try a configuration, are not checked; nor are
    those with ``selection: perturbation``, with a held α, or whose initial α is already decided.
    """
    optimizer = module.new_architecture_optimizer(list(module.alphas.values()))
    has_moments = "betas" in optimizer.defaults  # of Adam's kind
    if num_rounds < 2 or num_steps < _LEAST_STEPS or module.alpha_held or not has_moments:
        return
    if module.selection == "perturbation":
        return

    def entropy(reach: float) -> float:
        best = torch.full_like(module.alpha.detach(), -reach)
        best[:, 0] = reach
        return float(_entropy(module.space.masked(best).softmax(1)))

    rate, least, largest = optimizer.defaults["lr"], 0.01, entropy(0)
    if float(_entropy(module.shares)) <= _UNDECIDED_ENTROPY * largest:
        return
    while entropy(least) > _UNDECIDED_ENTROPY * largest:
        least += 0.01
    if num_steps * rate < least:
        raise ConfigurationError(
            f"alpha cannot decide in this search: in {num_steps:g} steps of about {rate:g} it changes by "
            f"{num_steps * rate:.2g} at most, and a decision needs {least:.2g}. Set the lr of "
            f"model.architecture_optimizer to {1.1 * least / num_steps:.2g}, or search longer"
        )
