"""A callback that tells a metric after every round, and stops the fit where the answer says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation import begin_round, logged_in_round


class ReportRounds(Callback):
    """Tells a metric after every round, e.g. to a search's trial.

    Args:
        metric: as the run logs it.
        tell: gets the round, counted from 1, and the value; returns whether the fit goes on. It is
            called in one process, after every round that has measured the metric.

    Attributes:
        values: round to value, of the rounds before a resume as well.
        is_stopped: whether the answer was to stop.

    Raises:
        ConfigurationError: after the first round, if the run does not log the metric.

    Example:
        With Optuna, inside of an objective::

            def tell(round_number: int, value: float) -> bool:
                trial.report(value, round_number)
                return not trial.should_prune()

            Trainer(callbacks=[federation, ReportRounds("val/accuracy", tell)])
    """

    def __init__(self, metric: str, tell: Callable[[int, float], bool]) -> None:
        super().__init__()
        self.metric, self.tell = metric, tell
        self.values: dict[int, float] = {}
        self.is_stopped = False

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell this round's metrics from older ones."""
        begin_round(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the value; all processes follow the answer."""
        logged = logged_in_round(trainer)
        if self.metric not in logged:
            known = trainer.callback_metrics
            if self.metric in known or trainer.current_epoch + 1 < _first_validation(trainer):
                return  # it is not validated in every round
            raise ConfigurationError(
                f"metric: the runs do not log {self.metric!r} in every round. There is "
                f"{', '.join(sorted(known)) or 'nothing'}"
            )
        number, value = trainer.current_epoch + 1, float(logged[self.metric])
        self.values[number] = value
        goes_on = self.tell(number, value) if trainer.is_global_zero else True
        if not trainer.strategy.broadcast(goes_on):
            self.is_stopped = trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """Return the values so far."""
        return {"values": dict(self.values)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.values = dict(state_dict["values"])


def _first_validation(trainer: Trainer) -> int:
    return trainer.check_val_every_n_epoch or 1
