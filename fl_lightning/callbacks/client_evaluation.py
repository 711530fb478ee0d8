"""Evaluation of the global model, and of personal models, on the held-out examples of every client.

A client's metrics are the metrics that the module logs in its validation or test step, computed on the
client's held-out validation or test examples. Clients count equally in the statistics over clients: mean,
standard deviation, mean of the worst decile and, if no value is negative, Jain's fairness index. Personal
models (option ``personal`` of `Federation`) are evaluated on the same examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from fl_lightning.callbacks.local_models import LocalModels
from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation import (
    PERSONAL,
    ClientExamples,
    Ranks,
    StepOf,
    chosen_clients,
    common_test_examples,
    evaluate_clients,
    held_out_examples,
    log_numbers,
    log_once,
    run_folder,
)
from fl_lightning.reports.evaluated_model import ModelOrigin
from fl_lightning.reports.log_file import detail
from fl_lightning.reports.loggers import log_clients, log_histogram
from fl_lightning.reports.progress import federation_of

# lower values are better for metrics whose names contain one of these
_LOWER_IS_BETTER = ("loss", "error", "inertia", "perplexity", "mse", "mae", "nll")


class ClientEvaluation(Callback):
    """Evaluates the global model, and personal models if any, on each client's held-out examples.

    At the end of a fit and in ``validate``, clients are evaluated on their validation examples; in ``test``,
    on their test examples. Set ``client_val_fraction`` and ``client_test_fraction`` of
    `FederatedDataModule` to hold examples out; otherwise clients are not evaluated, and a message says so.

    Logs ``clients/…`` metrics of the global model, ``personal/…`` metrics of personal models (a client that
    was never sampled uses the global model), and a histogram over clients. Writes ``clients_<stage>.csv``
    with one row per client into the run's folder.

    Args:
        every_n_rounds: also evaluate after every n-th round, ≥ 0; 0 evaluates at the end only.
        max_clients: largest number of clients to evaluate, ≥ 1. If more clients have held-out examples,
            a sample is drawn by the data module's seed, the same one in every evaluation. A client takes
            about a millisecond.
        common_test_set: in ``test``, evaluate personal models on the data module's whole test set instead
            of each client's test examples. (``test`` itself evaluates the global model on that set.)
        local_models: after every round, or every n-th with ``every_n_rounds``, also evaluate each
            client's model after local training, and the new global model, on the data module's whole test
            set. Costs one pass over the test set per client of the round. Writes ``local_models.csv``
            with one row per model and round; a resumed run appends to it.
        client_curves: whether loggers get each client's metrics in a fit too, as
            ``client/<number>/<name>``.

    Attributes:
        per_client: metrics of each client in the last evaluation, by client and name; empty before.
    """

    def __init__(
        self,
        every_n_rounds: int = 0,
        max_clients: int = 10_000,
        common_test_set: bool = False,
        local_models: bool = False,
        client_curves: bool = False,
    ) -> None:
        super().__init__()
        check_range("every_n_rounds", every_n_rounds, "at least 0")
        check_range("max_clients", max_clients, "at least 1 client")
        self.every_n_rounds = every_n_rounds
        local = ", and metrics of their local models on the common test set" if local_models else ""
        self.unprotected = f"the metrics of clients on their held-out examples{local}"
        self.max_clients = max_clients
        self.common_test_set = common_test_set
        self.client_curves = client_curves
        self._local = LocalModels(max(1, every_n_rounds)) if local_models else None
        self._origin = ModelOrigin()
        self.per_client: dict[int, dict[str, float]] = {}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Record which checkpoint the evaluated model comes from."""
        self._origin.note(trainer, pl_module, checkpoint)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that client metrics are logged as often as other callbacks monitor them; set up local models."""
        if stage == "fit":
            self._check_monitors(trainer)
            if self._local is not None:
                self._local.join(trainer)

    def _check_monitors(self, trainer: Trainer) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            monitor = getattr(callback, "monitor", None) or ""
            every_round = isinstance(callback, EarlyStopping) and callback.strict
            is_there = self.every_n_rounds == 1 or (self.every_n_rounds and not every_round)
            if monitor.startswith(("clients/", PERSONAL)) and not is_there:
                raise ConfigurationError(
                    f"{type(callback).__name__} monitors {monitor}, which not every round logs: "
                    f"ClientEvaluation has every_n_rounds={self.every_n_rounds} (0: only at the end of the "
                    "fit). Set its every_n_rounds to 1"
                )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the evaluation of the clients' local models, if it is wanted."""
        if self._local is not None:
            self._local.begin(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the clients after every n-th round (``every_n_rounds``)."""
        if self._local is not None:
            self._local.report(trainer)
        n = self.every_n_rounds
        if n and (trainer.current_epoch + 1) % n == 0:
            self._report(trainer, pl_module, "validation")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the final global model on the clients, unless this was done after the last round."""
        averaging = getattr(callbacks, "WeightAveraging", ())  # may have changed the model since
        is_new = any(isinstance(one, averaging) for one in trainer.callbacks)  # type: ignore[attr-defined]
        n = self.every_n_rounds
        if is_new or not n or trainer.current_epoch % n:
            self._report(trainer, pl_module, "validation")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the clients in the command ``validate``, but not in the validations of a fit."""
        if trainer.state.fn == "validate":
            self._report(trainer, pl_module, "validation")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the clients on their test examples, after a test."""
        self._report(trainer, pl_module, "test")

    def _report(self, trainer: Trainer, module: LightningModule, stage: StepOf) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, FederatedDataModule) or not is_overridden(
            f"{stage}_step", module, LightningModule
        ):
            return
        common = self.common_test_set and stage == "test"
        examples = common_test_examples(trainer, data) if common else held_out_examples(data, stage)
        federation = federation_of(trainer)
        models = None if federation is None else federation.personal_models(trainer)
        if why_not := _why_not(data, stage, examples, has_models=models is not None):
            rank_zero_info(f"No per-client evaluation: {why_not}.", **detail())
            return
        words = f"per-client evaluation ({stage}): {self._origin.words(trainer)}"
        rank_zero_info(words, **detail())
        clients = chosen_clients(data, self.max_clients, examples)
        if data.evaluated_by is not None:  # remote clients, which sites evaluate
            found = data.evaluated_by(stage, clients.tolist())
        else:  # each process evaluates a part of the clients
            found = evaluate_clients(trainer, data, stage, clients, examples, models=models)
        self._write(trainer, stage, examples, found)

    def _write(
        self,
        trainer: Trainer,
        stage: StepOf,
        examples: ClientExamples,
        found: dict[int, dict[str, Tensor]],
    ) -> None:
        """Gather the per-client metrics of all processes; print, log and save them."""
        values = dict(sorted(p for share in Ranks(trainer).gather(found) for p in share.items()))
        if not values and trainer.datamodule.evaluated_by is None:  # type: ignore[attr-defined]
            rank_zero_warn(
                f"per-client evaluation: no client has a metric, because {stage}_step logs none. Call self.log "
                f"in {stage}_step: on_{stage}_epoch_end logs metrics of all examples, not of single clients"
            )
        self.per_client = {
            client: {name: float(value) for name, value in metrics.items()}
            for client, metrics in values.items()
        }
        folder = run_folder(trainer)  # a collective operation: every process must call it
        if not trainer.is_global_zero:
            return
        is_fit = trainer.state.fn == "fit"
        step = trainer.global_step - is_fit  # in a fit the server has already stepped
        logs: dict[str, float] = {}
        for name in sorted({name for metrics in values.values() for name in metrics}):
            per_client = torch.stack([m[name] for m in values.values() if name in m]).double()
            key = name if name.startswith(PERSONAL) else f"clients/{name}"
            logs |= _statistics(name, key, per_client)
            log_histogram(trainer, key, per_client, step=step)
        if self.client_curves and is_fit:
            log_clients(trainer, self.per_client, step=step)
        if self.every_n_rounds and is_fit:
            log_numbers(trainer, logs, step=step)
        else:
            trainer.callback_metrics.update({name: torch.tensor(v) for name, v in logs.items()})
            log_once(trainer, "clients", logs, step=step)
        if trainer.logger is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            _save(Path(folder) / f"clients_{stage}.csv", self.per_client, examples)


def _why_not(
    data: FederatedDataModule, stage: StepOf, examples: ClientExamples, *, has_models: bool
) -> str | None:
    """Return in words why the clients cannot be evaluated, or None if they can."""
    if examples.are_common and has_models:
        return None
    if examples.are_common:
        return (
            "on the common test set all clients have the metrics of the global model, which test "
            "reports (there are no personal models)"
        )
    if not len(examples.clients):
        option = "client_test_fraction" if stage == "test" else "client_val_fraction"
        return f"the clients hold out no {stage} examples (data.{option} is 0)"
    return data.leakage


def _statistics(name: str, key: str, values: Tensor) -> dict[str, float]:
    """Return a metric's statistics over clients by name, such as ``clients/val_loss_mean``, and log them."""
    higher_is_better = not any(part in name.lower() for part in _LOWER_IS_BETTER)
    worst = float(worst_decile(values, higher_is_better=higher_is_better))
    mean, std = float(values.mean()), float(values.std(correction=0))
    logs = {f"{key}_mean": mean, f"{key}_std": std, f"{key}_worst_decile": worst}
    fairness = ""
    if bool((values >= 0).all()):
        logs[f"{key}_jain"] = float(jains_index(values))
        fairness = f", Jain's index {logs[f'{key}_jain']:.4f}"
    rank_zero_info(
        f"clients: {name} mean {mean:.4f}, std {std:.4f}, worst decile {worst:.4f}{fairness} "
        f"over {len(values)} clients",
        **detail(),
    )
    return logs


def _save(path: Path, values: Mapping[int, Mapping[str, float]], examples: ClientExamples) -> None:
    import pandas  # half a second to import

    table = pandas.DataFrame.from_dict(values, orient="index", dtype=float).sort_index(axis=1)
    table.insert(0, "num_examples", examples.num_examples[table.index])
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(path, index_label="client")


def worst_decile(values: Tensor, *, higher_is_better: bool) -> Tensor:
    """Return a metric's mean over the worst 10 % of clients (at least one); NaN counts as the worst value.

    Example:
        >>> worst_decile(torch.linspace(0, 1, 20), higher_is_better=True)
        tensor(0.0263)
    """
    count = max(1, round(len(values) / 10))
    worst = -torch.inf if higher_is_better else torch.inf
    order = values.nan_to_num(worst).argsort(descending=not higher_is_better)
    return values[order[:count]].mean()


def jains_index(values: Tensor) -> Tensor:
    """Jain's fairness index (Σx)² / (n Σx²) of values ≥ 0: 1 if all are equal, 1/n if all but one are 0.

    Source: Jain et al. 1984, A Quantitative Measure of Fairness, Section 3.

    Example:
        >>> jains_index(torch.tensor([1.0, 1.0, 1.0])), jains_index(torch.tensor([0.0, 5.0]))
        (tensor(1.), tensor(0.5000))
    """
    squares = values.square().sum() * len(values)
    return values.sum().square() / squares if squares else torch.ones_like(squares)
