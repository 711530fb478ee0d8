"""Sparse fine-tuning of any run: a mask at its start, outside of which nothing trains.

Before the first round the training data decide which entries may move (`OwnerScores`); the mask is
put on the module's optimizer, everything outside mask and head is frozen. In a federation the
scores come from clients, and what is frozen does not travel; in a central run from all examples.

Source: Iurada et al. 2025, ICLR (TaLoS), section 4; `fl_lightning.sparsity` says where we differ.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.callbacks.calibration.apply import (
    WhatMoves,
    check_callbacks,
    check_forward,
    check_options,
    heads_of,
    masked_optimizer,
)
from fl_lightning.callbacks.calibration.head_fitting import SumsElsewhere, fit_head
from fl_lightning.callbacks.calibration.mask_report import (
    ClientMasks,
    calibration_bytes,
    head_bytes,
    report_mask,
    tell_client_masks,
)
from fl_lightning.callbacks.calibration.scores import OwnerScores, ScoresElsewhere
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import run_seed
from fl_lightning.core.traits import NO_TRAITS, Trait, Traits, check_together
from fl_lightning.data.cohorts.cohort import Cohort
from fl_lightning.federation import Ranks, log_once
from fl_lightning.reports.progress import federation_of
from fl_lightning.sparsity.calibration.plan import CalibrationPlan
from fl_lightning.sparsity.calibration.rules import Rule
from fl_lightning.sparsity.heads import HeadFit
from fl_lightning.sparsity.masks.mask import Mask, load_mask
from fl_lightning.sparsity.sensitivity.protocol import Sensitivity

Head: TypeAlias = Literal["train", "freeze"] | HeadFit
MASKS = Traits(breaks={Trait.ALL_PARAMETERS: "keeps parameters from training"})


@final
class MaskCalibration(Callback):
    """Calibrates a mask when a fit starts, and has training keep to it.

    The module's optimizer must be `SparseSGDM` or `SparseAdamW`. The mask is printed, logged, drawn
    per layer, saved as ``mask_v0.safetensors`` beside the logs and kept in checkpoints: a resumed
    run does not calibrate again. Of masks of clients it is told what they are together, whenever
    a round has found some; they are kept in checkpoints alone. Of a federation's callbacks this
    one must come before `Federation`.

    Everything that is neither under the mask nor the head is frozen while the fit lasts, among it
    embeddings of patches and positions.

    A calibration is paid once, ahead of the rounds: every client of its cohort sends 4 bytes for
    each maskable entry in each of its rounds, ``calibration/total_bytes_up`` in sum, whatever the
    density. One round, a smaller ``cohort`` or a rule without scores make it cheaper.

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
        per_client: every client keeps to a mask of its own, found on its own examples when it first
            takes part; the cohort then has no say, and ``max_examples`` is each client's. They lie
            in every checkpoint, an eighth of a byte for each entry and client. Backward passes
            skip no tensor, not even one that a client's own mask freezes as a whole.
        mask_file: start from this mask instead of calibrating; the options of calibration are then
            those of later versions.
        seed: of all draws, each a function of (seed, version, round, client); None is the run's.

    Attributes:
        scores: how entries are scored.
        per_client: whether every client has a mask of its own.
        mask: the present one, on the CPU; None before a fit. Of a fit in several processes on CPUs
            it stays with them: read the file or the checkpoint. With ``per_client`` what the
            clients' masks lie in: everything that they may cover.
        history: of every version the round in whose start it was found, and its hash.
        unprotected: what of clients is in the model that no privacy of rounds covers, in words.

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
        cohort: Cohort | None = None,
        max_examples: int | None = None,
        every_n_rounds: int | None = None,
        per_client: bool = False,
        mask_file: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        calibrates = mask_file is None or every_n_rounds is not None
        check_options(max_examples, every_n_rounds, mask_file, per_client)
        self._plan: CalibrationPlan | None = None
        if calibrates:
            self._plan = CalibrationPlan(
                density=density,
                sparsity=sparsity,
                rule=rule,
                rounds=rounds,
                progressive=progressive,
                soft_mask=soft_mask,
                per_tensor=per_tensor,
            )
        scores_clients = self._plan is not None and self._plan.chosen_rule.needs_scores
        shown = {
            "the mask found from clients' scores": scores_clients,
            "the head fitted to clients' examples": not isinstance(head, str),
        }
        self.unprotected = " and ".join(what for what, is_shown in shown.items() if is_shown)
        self.scores = OwnerScores(
            sensitivity=sensitivity,
            cohort=cohort,
            max_examples=max_examples,
            seed=run_seed(seed),
        )
        self._include, self._exclude = include, exclude
        self._head, self._head_name = head, head_name
        self._every_n_rounds = every_n_rounds
        self._mask_file = mask_file
        self.per_client = per_client
        self._sums_elsewhere: SumsElsewhere | None = None
        self._clients: ClientMasks | None = None
        self._is_claimed = False
        self._moves: WhatMoves | None = None
        self._saved: dict[str, Any] = {}
        self.mask: Mask | None = None
        self.history: list[dict[str, Any]] = []

    @property
    def masks_by_client(self) -> dict[int, Mask]:
        """With ``per_client`` the masks found so far, on the CPU, by client; else empty."""
        return {} if self._clients is None else self._clients.found()

    @property
    def version(self) -> int:
        """Number of the present mask: 0 at the start of a run."""
        return len(self.history) - 1

    late_charts = ("masks",)  # of TensorBoard, without numbers in the first round

    @property
    def has_curves(self) -> bool:
        """True if masks are found during the run, not only at its start."""
        return self._every_n_rounds is not None or self.per_client

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse settings that cannot work, before anything is computed."""
        if stage == "fit":
            traits = getattr(pl_module, "federation_traits", NO_TRAITS)
            check_together({f"model {type(pl_module).__name__}": traits, "MaskCalibration": MASKS})
            check_callbacks(trainer, self)
            if self._plan is not None and self._plan.chosen_rule.needs_scores:
                check_forward(pl_module, self.scores.sensitivity)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the mask and put it on the optimizer, ahead of the federation's own start."""
        self._moves = self.what_moves(trainer)
        if self.per_client:
            plan = self._plan
            assert plan is not None
            self._clients = ClientMasks(
                lambda client: self.scores.mask_of(trainer, plan, self._names(), client)
            )
        if self._saved:
            self._resume(trainer)
            return
        self.mask, self.history = None, []
        metrics = self._fit_head(trainer)
        if self._clients is not None:
            params = dict(pl_module.named_parameters())
            everything = Mask.ones({name: params[name] for name in self._names()}).to("cpu")
            self._use(trainer, everything, "each client finds its own", metrics)
        elif self._mask_file is not None:
            self._use(trainer, load_mask(self._mask_file), f"from {self._mask_file}", metrics)
        else:
            self._calibrate(trainer, metrics)

    # For a network, whose clients' examples are at sites.

    @property
    def head_fit(self) -> HeadFit | None:
        """How the head is fitted; None if it is not."""
        return None if isinstance(self._head, str) else self._head

    def heads(self, module: LightningModule) -> list[str]:
        """Return the names of the modules that are the head."""
        is_needed = self._include is None or self._head != "train"
        return heads_of(module, self._head_name, is_needed=is_needed)

    def what_moves(self, trainer: Trainer) -> WhatMoves:
        """Return the object that puts masks on a Trainer's module and optimizer."""
        optimizer, module = masked_optimizer(trainer), trainer.lightning_module
        return WhatMoves(module, optimizer, self.heads(module), head_trains=self._head == "train")

    def ask_elsewhere(self, scores: ScoresElsewhere, sums: SumsElsewhere) -> None:
        """Calibrate on remote clients."""
        self.scores = replace(self.scores, elsewhere=scores)
        self._sums_elsewhere = sums

    def client_masks(self) -> ClientMasks | None:
        """Masks of the clients' own; None if all clients have the same mask.

        For the federation, when the fit starts: who asks for masks of clients says with it that
        clients will keep to them, and that an entry is averaged over the clients that may move it.
        A mask that is not known yet is found on the module's present values, which must be the
        model that the client was sent.
        """
        self._is_claimed = True
        return self._clients

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse masks of clients that nobody would keep to."""
        if self._clients is not None and not self._is_claimed:
            raise ConfigurationError(
                "MaskCalibration: per_client needs a federation whose clients keep to masks of "
                "their own; this run has none. Leave per_client out for one mask for all"
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Calibrate anew after every n-th round, if asked to."""
        self._recalibrate(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Do so now if the round has just begun without saying so.

        So it is after resuming a central run from a checkpoint that was taken between the last
        batch of an epoch and its end: Lightning passes over the start of the next one.
        """
        self._recalibrate(trainer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Share the masks of this round's clients with all processes, ahead of any checkpoint."""
        if self._clients is not None and trainer.is_last_batch:
            num_bytes = self._clients.exchange(Ranks(trainer))
            if num_bytes:
                tell_client_masks(trainer, self._clients.counts, num_bytes)

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

        Of masks of clients all that were found so far.
        """
        if self.mask is None:
            return self._saved
        clients = {} if self._clients is None else self._clients.state_dict()
        return {
            "mask": self.mask.state_dict(),
            "history": list(self.history),
            "clients": clients,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a checkpoint's mask until the fit starts."""
        self._saved = dict(state_dict)

    def _resume(self, trainer: Trainer) -> None:
        mask = Mask.from_state_dict(self._saved["mask"])
        *self.history, last = self._saved["history"]
        if self._clients is not None:
            self._clients.load_state_dict(self._saved["clients"])
        self._saved = {}
        self._use(trainer, mask, "from the checkpoint", {}, round_=last["round"])

    def _recalibrate(self, trainer: Trainer) -> None:
        done, n = trainer.current_epoch, self._every_n_rounds
        if n is not None and done and done % n == 0 and self.history[-1]["round"] != done:
            self._calibrate(trainer, {})

    def _fit_head(self, trainer: Trainer) -> dict[str, float]:
        if isinstance(self._head, str):
            return {}
        began = time.perf_counter()
        heads = self.heads(trainer.lightning_module)
        fitted = fit_head(trainer, heads, self._head, self._sums_elsewhere)
        return {
            "head/seconds": time.perf_counter() - began,
            "head/rounds": float(fitted.rounds),
            **head_bytes(trainer, fitted),
        }

    def _calibrate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        assert self._plan is not None
        assert self._moves is not None
        began = time.perf_counter()
        names = self._names()
        version = len(self.history)
        mask = self.scores.mask(trainer, self._plan, names, version)
        seconds = time.perf_counter() - began
        metrics = {**metrics, "calibration/seconds": seconds}
        if federation_of(trainer) is not None:
            num_sent = self.scores.num_sent(trainer, self._plan, version)
            metrics |= calibration_bytes(mask.num_entries, num_sent)
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
        if self._clients is not None:
            known = self._clients.counts.num_masks
            rank_zero_info(
                f"masks of clients: each finds its own when it first takes part, among "
                f"{mask.num_entries:,} maskable parameters; {num_dense:,} train densely, "
                f"{num_frozen:,} frozen{f'; {known:,} are from the checkpoint' if known else ''}"
            )
            if metrics:
                log_once(trainer, "mask", metrics, step=trainer.global_step)
            return
        words = (
            f"mask {self.version}: {mask.num_active:,} of {mask.num_entries:,} maskable parameters "
            f"train (density {mask.density:.4g}), {num_dense:,} densely, {num_frozen:,} frozen; "
            f"{origin}; hash {mask.hash()}"
        )
        news = metrics if round_ is None else None
        report_mask(trainer, mask, self.version, words, news, is_one_of_many=self.has_curves)

    def _give_back(self) -> None:
        self._is_claimed = False
        if self._moves is not None:
            self._moves.undo()
            self._moves = None
