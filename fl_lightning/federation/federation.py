"""The ``federation:`` block: a callback that turns a Lightning run into a federated one.

With this callback an epoch is a round: `RoundCohorts` gives the clients of each round, `Round` trains them
and steps the server, and this class does what Lightning asks of a callback: set up, log, save, restore,
clean up.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed, seed_global_generators
from fl_lightning.federation.checkpoints.state import MissedPlateaus, load_run_state, run_state
from fl_lightning.federation.fit_rounds import FitRounds
from fl_lightning.federation.logs import log_round
from fl_lightning.federation.loop import begin_round_anew
from fl_lightning.federation.options import Options
from fl_lightning.federation.start import Calendar, begin, prepare, take_over
from fl_lightning.federation.visits.client_visits import refresh_losses
from fl_lightning.federation.visits.personal_models import PersonalModels, recalled_models


@final
class Federation(Options, Callback):
    """Callback that makes a Trainer train over many clients: one epoch is one round.

    The module's optimizer is the clients' (its state starts empty whenever a client trains), its
    learning-rate schedule advances once per round, or with ``interval: step`` in every local step, and
    ``global_step`` counts rounds. What a client sends
    is where it began minus where it ended, however it got there: a ``training_step`` may also set the
    parameters itself and return None, or step one or several optimizers by hand
    (``automatic_optimization = False``), in which case clients train one after the other.

    Its options are explained in `Options`, and by ``--federation.help``.

    Raises:
        ConfigurationError: for values out of range, and at the start of the fit for a module,
            data module or Trainer that cannot be federated.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from fl_lightning.data import Digits, FederatedDataModule
        >>> from fl_lightning.models import ImageClassifier
        >>> module = ImageClassifier("lenet", num_classes=10, in_chans=1, image_size=32)
        >>> data = FederatedDataModule(Digits(image_size=32), num_clients=20)
        >>> trainer = Trainer(callbacks=[Federation(local_steps=1)], max_epochs=1)  # doctest: +SKIP
        >>> trainer.fit(module, datamodule=data)  # doctest: +SKIP

    Attributes:
        rounds: rounds of the current or last fit; None before the first fit.
    """

    rounds: FitRounds | None = None
    _calendar: Calendar
    _cleanup: ExitStack | None = None
    _saved: dict[str, Any] | None = None
    _missed: MissedPlateaus | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make Lightning's fit loop run rounds: an epoch has one batch, the ids of the round's clients.

        Raises:
            ConfigurationError: if the Trainer has another Federation.
        """
        num_federations = sum(isinstance(each, Federation) for each in trainer.callbacks)  # type: ignore[attr-defined]
        if num_federations > 1:
            raise ConfigurationError(
                f"trainer.callbacks: a Trainer has one Federation at most, got {num_federations}: give all "
                "options to one"
            )
        if stage == "fit":
            self._cleanup, self._saved = ExitStack(), None  # a checkpoint is loaded after this
            self._missed = None
            self._cleanup.callback(self.handed.clear)
            self._calendar = prepare(trainer, pl_module, self, self._cleanup)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build the rounds from the module's current weights and optimizer, and load a resumed checkpoint's state."""
        assert self._cleanup is not None
        before, saved = self.rounds, self._saved or {}
        earlier = list(before.stages) if before and before.run.module is pl_module else []
        self.rounds = begin(trainer, self, self._calendar)
        if saved:
            self._missed = load_run_state(self.rounds, saved)
            self._saved = None
        for part in self.rounds.stages.around_fit:
            part.fit_begins(trainer, None if saved else earlier)
        take_over(trainer, self.rounds.train, self.rounds.run, self._cleanup)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin at a resumed fit's first unfinished round, and log what users should know before training."""
        begin_round_anew(trainer)
        assert self.rounds is not None
        for part in self.rounds.stages.around_fit:
            part.training_begins(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply changed masks, measure clients' losses if the cohort is chosen by them, and seed generators by round."""
        assert self.rounds is not None
        if self._missed is not None:
            self._missed.catch_up(trainer)
        self.rounds.follow_masks()  # before any checkpoint, which would hold the new masks
        for line in self.rounds.idle_lines():
            rank_zero_info(line)
        if self.cohort.needs_fresh_losses:
            population = self.rounds.run.cohorts.population
            personal = self.personal
            has_layers = personal and not (personal.beside or personal.tuning_steps)
            models = self.personal_models(trainer) if has_layers else None
            own = None if models is None else models.of
            refresh_losses(trainer, self.cohort, population, self.seed, own)
        seed_global_generators(derive_seed(self.seed, "round", trainer.current_epoch))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the round's metrics, counts, bytes and norms; raise if a `Stage` failed while the round closed."""
        assert self.rounds is not None
        if self.rounds.error_of_close is not None:
            raise self.rounds.error_of_close
        record = self.rounds.record
        for part in self.rounds.stages.around_fit:
            part.round_ends(trainer, record)
        metrics, facts, twins = record.metrics(), record.facts(), record.twins()
        in_bar = set(self.rounds.run.collector.prog_bar)
        if not twins or not any("loss" in name.lower() for name in in_bar):
            in_bar.add("train/loss")
        shown = [name for name in metrics if name in in_bar]
        log_round(trainer, metrics | facts, in_progress_bar=shown, twins=twins)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore Trainer, module and data module."""
        if self._cleanup is not None:
            self._cleanup.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Restore Trainer, module and data module after an error or an interruption."""
        if self._cleanup is not None:
            self._cleanup.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the federated run for the checkpoint, besides the module's weights."""
        return (self._saved or {}) if self.rounds is None else run_state(self.rounds)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state read from a checkpoint, or from processes that trained, until the next fit starts."""
        self._saved = dict(state_dict)

    def personal_models(self, trainer: Trainer) -> PersonalModels | None:
        """Return clients' personal models after the last round or from the checkpoint; None if clients have none."""
        fitted = None
        if self.rounds is not None:
            fitted = self.rounds.run.local.personal.names, self.rounds.memory
        return recalled_models(trainer, self.personal, self.seed, fitted, self._saved or {})


# Lightning takes it for the method of `Callback`, and leaves a second Federation to `Federation.setup`
Federation.state_dict.__wrapped__ = Callback.state_dict  # type: ignore[attr-defined]
