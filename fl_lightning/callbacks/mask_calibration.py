"""Sparse fine-tuning of any run: a mask at its start, and only what the mask allows moves.

Before the first round the training data decide which entries may move (`OwnerScores`); the mask is
put on the module's optimizer, everything outside mask and head is frozen. In a federation the
scores come from clients, and what is frozen does not travel; in a central run from all examples.

Source: Iurada et al. 2025, ICLR (TaLoS), section 4; `fl_lightning.sparsity` says where we differ.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from fl_lightning.callbacks.example_owners import federation_of
from fl_lightning.callbacks.head_fitting import fit_head
from fl_lightning.callbacks.mask_report import MaskReport
from fl_lightning.callbacks.owner_scores import OwnerScores
from fl_lightning.callbacks.what_moves import WhatMoves, heads_of, masked_optimizer
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import run_seed
from fl_lightning.data.cohort import CohortSampler
from fl_lightning.sparsity.head_fit import HeadFit
from fl_lightning.sparsity.logits import module_logits
from fl_lightning.sparsity.mask import Mask
from fl_lightning.sparsity.mask_file import load_mask
from fl_lightning.sparsity.plan import CalibrationPlan
from fl_lightning.sparsity.rules import Rule
from fl_lightning.sparsity.sensitivity import Sensitivity

Head: TypeAlias = Literal["train", "freeze"] | HeadFit


@final
class MaskCalibration(Callback):
    """Calibrates a mask when a fit starts, and has training keep to it.

    The module's optimizer must be `SparseSGDM` or `SparseAdamW`. The mask is printed, logged, drawn
    per layer, saved as ``mask_v0.safetensors`` beside the logs and kept in checkpoints: a resumed
    run does not calibrate again. Of a federation's callbacks it must come before `Federation`.

    Everything that is neither under the mask nor the head is frozen while the fit lasts, among it
    embeddings of patches and positions.

    Args:
        density: fraction of the maskable entries that train, in (0, 1].
        sparsity: 1 - density, instead of it.
        rule: which entries train; None is `LeastSensitive`.
        sensitivity: how they are scored; None is `SampledFisher`, the paper's.
        rounds: of calibration, ≥ 1.
        progressive: False scores ``rounds`` times without masking anything, adds up, drops once.
        soft_mask: factor of dropped entries while the others are scored, in [0, 1]; 1 is off.
        per_tensor: one threshold a tensor, all with the same density, instead of a global one.
        include: patterns of the parameters that the mask covers, instead of the layers that
            `maskable_names` chooses.
        exclude: patterns of parameters that it does not cover.
        head: the classifier: ``train`` densely, ``freeze``, or a `HeadFit` (`RidgeHead`,
            `LinearHead`) that fits it on the frozen backbone's features before anything else, on
            the training examples of all clients; then it is frozen.
        head_name: the head's module, for modules without timm's ``get_classifier``.
        cohort: the clients that score, drawn anew in each round of calibration; None draws them as
            the federation does for its rounds. Each sends a number per maskable entry.
        max_examples: score at most so many examples in a round of calibration, of all its clients
            together, each in proportion to its own; None is all.
        every_n_rounds: calibrate anew after every so many rounds (epochs in a central run), which
            gives masks of version 1, 2, …; None keeps the first.
        mask_file: start from this mask instead of calibrating; the options of calibration are then
            those of later versions.
        seed: of all draws, each a function of (seed, version, round, client); None is the run's.

    Raises:
        ConfigurationError: if an option is out of range, and when the fit starts if the optimizer
            keeps to no mask, or a mask does not fit the model.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from fl_lightning import Federation
        >>> from fl_lightning.sparsity import RidgeHead
        >>> sparse = MaskCalibration(density=0.1, max_examples=1000, head=RidgeHead())
        >>> trainer = Trainer(callbacks=[sparse, Federation(local_steps=4)])  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        density: float | None = None,
        sparsity: float | None = None,
        rule: Rule | None = None,
        sensitivity: Sensitivity | None = None,
        rounds: int = 4,
        progressive: bool = True,
        soft_mask: float = 0.01,
        per_tensor: bool = False,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        head: Head = "train",
        head_name: str | None = None,
        cohort: CohortSampler | None = None,
        max_examples: int | None = None,
        every_n_rounds: int | None = None,
        mask_file: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        _check(head, max_examples, every_n_rounds)
        self._plan: CalibrationPlan | None = None
        if mask_file is None or every_n_rounds is not None:
            self._plan = CalibrationPlan(
                density=density,
                sparsity=sparsity,
                rule=rule,
                rounds=rounds,
                progressive=progressive,
                soft_mask=soft_mask,
                per_tensor=per_tensor,
            )
        self._scores = OwnerScores(
            sensitivity=sensitivity,
            cohort=cohort,
            max_examples=max_examples,
            seed=run_seed(seed),
        )
        self._include, self._exclude = include, exclude
        self._head, self._head_name = head, head_name
        self._every_n_rounds = every_n_rounds
        self._mask_file = mask_file
        self._moves: WhatMoves | None = None
        self._saved: dict[str, Any] = {}
        self.mask: Mask | None = None
        self.history: list[dict[str, Any]] = []

    @property
    def version(self) -> int:
        """Number of the present mask: 0 at the start of a run."""
        return len(self.history) - 1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work before anything is computed."""
        if stage == "fit":
            self._check_callbacks(trainer)
            self._check_forward(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the mask and put it on the optimizer, ahead of the federation's own start."""
        optimizer = masked_optimizer(trainer)
        heads = heads_of(
            pl_module,
            self._head_name,
            is_needed=self._include is None or self._head != "train",
        )
        self._moves = WhatMoves(pl_module, optimizer, heads, head_trains=self._head == "train")
        if self._saved:
            self._resume(trainer)
            return
        self.mask, self.history = None, []
        metrics = self._fit_head(trainer, heads)
        if self._mask_file is None:
            self._calibrate(trainer, metrics)
        else:
            self._use(trainer, load_mask(self._mask_file), f"from {self._mask_file}", metrics)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Calibrate anew after every n-th round, if asked to."""
        self._recalibrate(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Do so now if the round has just begun without saying so.

        So it is after resuming from a checkpoint that was taken between the last batch of a round
        and its end: Lightning passes over the start of the next one.
        """
        self._recalibrate(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the module back with everything unfrozen that trained before."""
        self._give_back()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Give the module back after a run that failed or was interrupted as well."""
        self._give_back()

    def state_dict(self) -> dict[str, Any]:
        """Return the mask, eight entries to a byte, and which masks there were, for a checkpoint.

        Each has a version (its place), the round in whose start it was found, and its hash.
        """
        if self.mask is None:
            return self._saved
        return {"mask": self.mask.state_dict(), "history": list(self.history)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a checkpoint's mask until the fit starts."""
        self._saved = dict(state_dict)

    def _resume(self, trainer: Trainer) -> None:
        mask = Mask.from_state_dict(self._saved["mask"])
        *self.history, last = self._saved["history"]
        self._saved = {}
        self._use(trainer, mask, "from the checkpoint", {}, round_=last["round"])

    def _recalibrate(self, trainer: Trainer) -> None:
        done, n = trainer.current_epoch, self._every_n_rounds
        if n is not None and done and done % n == 0 and self.history[-1]["round"] != done:
            self._calibrate(trainer, {})

    def _fit_head(self, trainer: Trainer, heads: list[str]) -> dict[str, float]:
        if isinstance(self._head, str):
            return {}
        began = time.perf_counter()
        fitted = fit_head(trainer, heads, self._head)
        return {
            "head/seconds": time.perf_counter() - began,
            "head/rounds": float(fitted.rounds),
            "head/bytes_up": 8.0 * fitted.values_up,  # in double precision
        }

    def _calibrate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        assert self._plan is not None
        assert self._moves is not None
        began = time.perf_counter()
        names = self._names()
        mask = self._scores.mask(trainer, self._plan, names, len(self.history))
        seconds = time.perf_counter() - began
        scores = self._plan.chosen_rule.needs_scores
        metrics = {
            **metrics,
            "calibration/seconds": seconds,
            "calibration/bytes_up": 4.0 * mask.num_entries * scores,  # per client and round of it
        }
        self._use(trainer, mask, f"calibrated in {seconds:.1f} s", metrics)

    def _names(self) -> list[str]:
        assert self._moves is not None
        if self.mask is not None:  # of which tensors may be frozen by now
            return list(self.mask)
        return self._moves.names(self._include, self._exclude)

    def _use(
        self,
        trainer: Trainer,
        mask: Mask,
        origin: str,
        metrics: dict[str, float],
        *,
        round_: int | None = None,
    ) -> None:
        assert self._moves is not None
        self._moves.apply(mask)
        found = trainer.current_epoch if round_ is None else round_
        self.mask = mask
        self.history.append({"round": found, "hash": mask.hash()})
        num_dense = self._moves.num_entries(self._moves.dense)
        num_frozen = self._moves.num_frozen(mask)
        MaskReport(mask, self.version, origin, num_dense, num_frozen, metrics).tell(trainer)

    def _give_back(self) -> None:
        if self._moves is not None:
            self._moves.undo()
            self._moves = None

    def _check_callbacks(self, trainer: Trainer) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        federation = federation_of(trainer)
        if federation is None:
            if not isinstance(trainer.strategy, SingleDeviceStrategy):
                raise ConfigurationError(
                    "without a federation MaskCalibration runs in one process, got "
                    f"{trainer.world_size} with {type(trainer.strategy).__name__}: set "
                    "trainer.devices to 1"
                )
        elif callbacks.index(federation) < callbacks.index(self):
            raise ConfigurationError(
                "MaskCalibration must come before Federation in the Trainer's callbacks, because a "
                "federation settles at its start what travels: Trainer(callbacks=[calibration, "
                "federation])"
            )

    def _check_forward(self, module: LightningModule) -> None:
        scoring = getattr(self._scores.sensitivity, "scoring", None)
        uses_forward = self._plan is not None and self._plan.chosen_rule.needs_scores
        if scoring is not None and scoring.logits is not module_logits:
            uses_forward = False
        if uses_forward and not is_overridden("forward", module, LightningModule):
            raise ConfigurationError(
                f"{type(module).__name__} has no forward, from whose logits sensitivity is scored: "
                "define forward(x), or give sensitivity a scoring with a function logits(module, "
                "batch)"
            )


def _check(head: Head, max_examples: int | None, every_n_rounds: int | None) -> None:
    issues = []
    if isinstance(head, str) and head not in ("train", "freeze"):
        issues.append(
            f"head must be train, freeze, or a fit such as fl_lightning.sparsity.RidgeHead, got "
            f"{head!r}"
        )
    if max_examples is not None and max_examples < 1:
        issues.append(f"max_examples must be at least 1, got {max_examples}; leave it out for all")
    if every_n_rounds is not None and every_n_rounds < 1:
        issues.append(
            f"every_n_rounds must be at least 1, got {every_n_rounds}; leave it out to keep the "
            "first mask"
        )
    if issues:
        raise ConfigurationError("MaskCalibration: " + "; ".join(issues))
