"""Sparse fine-tuning: a callback that calibrates a mask before the first round and applies it.

Before the first round, scores on the training data decide which entries train (`OwnerScores`). The optimizer
then changes only these entries and the head. In a federation clients compute the scores, and frozen entries
are not sent. In a central run all examples are scored together.

    bytes of a calibration:    4 · maskable entries · number of scoring clients, summed over its rounds
    bytes of the head's fit:   8 · values in a client's sums · rounds of the fit · clients with examples

Scores are sent in single precision, sums for a head in double precision. These bytes are not part of
``round/bytes_up``. A central run sends nothing.

Source: Iurada et al. 2025, ICLR (TaLoS), section 4; differences are stated in `fl_lightning.sparsity`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, final

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.callbacks.calibration.apply import MaskApplier, check_forward, check_run, heads_of
from fl_lightning.callbacks.calibration.head_fitting import fit_head
from fl_lightning.callbacks.calibration.mask_report import (
    ClientMasks,
    report_client_masks,
    report_mask,
)
from fl_lightning.callbacks.calibration.scores import OwnerScores
from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.core.seeds import run_seed
from fl_lightning.core.traits import NO_TRAITS, Trait, Traits, check_together
from fl_lightning.data.cohorts.cohort import Cohort
from fl_lightning.federation import Ranks, log_once
from fl_lightning.reports.progress import federation_of
from fl_lightning.sparsity.calibration.plan import CalibrationPlan
from fl_lightning.sparsity.calibration.rules import Rule
from fl_lightning.sparsity.heads import HeadFit, OneExchange
from fl_lightning.sparsity.masks.mask import Mask, load_mask
from fl_lightning.sparsity.sensitivity.protocol import Sensitivity

Head: TypeAlias = Literal["train", "freeze"] | HeadFit
MASKS = Traits(breaks={Trait.ALL_PARAMETERS: "keeps parameters from training"})


@final
class MaskCalibration(Callback):
    """Sparse training: chooses which entries train (a mask) when a fit starts, and freezes the others.

    The optimizer must be `SparseSGDM` or `SparseAdamW`. In the Trainer's list of callbacks, this callback
    must come before `Federation`. The mask is logged, drawn per layer, and saved as
    ``mask_v0.safetensors`` in the run's folder and in checkpoints: a resumed run does not calibrate again.

    Parameters that are neither maskable nor in the head, e.g. embeddings, are frozen during the fit.
    Buffers, such as the running statistics of batch norm, are not masked.

    By default calibration happens once, before the first round. In each calibration round, every client of
    its cohort sends 4 bytes per maskable entry, at any density; ``calibration/total_bytes_up`` is the sum.
    Fewer ``rounds``, a smaller ``cohort`` or a rule without scores send less.

    Args:
        density: fraction of the maskable entries that train, in (0, 1].
        sparsity: 1 - density, in [0, 1), as an alternative to ``density``.
        rule: rule for the entries that train; None for `LeastSensitive`.
        sensitivity: estimator of the scores; None for `SampledFisher`, as in the paper.
        rounds: number of calibration rounds, ≥ 1.
        progressive: whether every calibration round drops entries and scores the others again. If False,
            all entries are scored ``rounds`` times, the scores are added, and entries are dropped once.
        soft_mask: factor of dropped entries while others are scored, in [0, 1]; 1 does not change them.
        per_tensor: whether each tensor has the given density, instead of the whole mask.
        include: patterns of names of the maskable parameters, instead of the layers that
            `maskable_names` chooses.
        exclude: patterns of names of parameters that are not maskable.
        head: the classifier: ``train`` densely, ``freeze``, or a `HeadFit` (`RidgeHead`, `LinearHead`),
            which fits it before calibration, on the frozen backbone's features of all clients' training
            examples, and freezes it.
        head_name: name of the head's module, for modules without timm's ``get_classifier``.
        cohort: sampler of the clients that score in a calibration round; None for the federation's sampler.
            Each client sends one number per maskable entry.
        max_examples: largest number of examples in a calibration round, over all clients. If there are more,
            each client scores examples in proportion to its number; None scores all.
        every_n_rounds: calibrate again after every n-th round (epoch in a central run), ≥ 1, which gives
            masks of version 1, 2, …; None keeps the first mask.
        per_client: calibrate one mask per client, on its own examples, when it is first sampled.
            ``cohort`` is then unused, and ``max_examples`` is the limit of each client. Checkpoints
            contain all masks, at eight entries per byte; logs contain statistics over the masks. Tensors
            that a client's mask freezes completely still cost their backward pass.
        mask_file: file with the first mask, which is then not calibrated; the options of the calibration
            apply to later masks.
        seed: seed of all draws, each a function of (seed, version, round, client); the run's seed if
            None.

    Attributes:
        scores: computes the scores.
        per_client: True if every client has its own mask.
        mask: the current mask, on the CPU; None before a fit. With ``per_client``, all maskable entries.
            After a fit in several processes on CPUs, read the file or the checkpoint instead.
        history: round and hash of every version of the mask.
        unprotected: data of clients that enter the model without the privacy of rounds, as text.

    Raises:
        ConfigurationError: if an option is out of range; when the fit starts if the optimizer has no
            masks, or a mask does not fit the model.

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
        keep = "; leave it out to keep the first mask"
        check_range("MaskCalibration: max_examples", max_examples, "at least 1", "; None is all")
        check_range("MaskCalibration: every_n_rounds", every_n_rounds, "at least 1", keep)
        if per_client and (every_n_rounds is not None or mask_file is not None):
            raise ConfigurationError(
                "MaskCalibration: with per_client every client calibrates its mask once: leave out "
                "every_n_rounds and mask_file"
            )
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
        self._clients: ClientMasks | None = None
        self._applier: MaskApplier | None = None
        self._saved: dict[str, Any] = {}
        self.mask: Mask | None = None
        self.history: list[dict[str, Any]] = []

    @property
    def traits(self) -> Traits:
        """Needs of this callback that the federation must meet, e.g. simulation for per-client masks."""
        needs, instead, ways = {}, {}, {}
        if self.per_client:
            ways["finds masks of the clients' own"] = "set per_client to false"
        if not isinstance(self._head, str | OneExchange):
            clause = f"exchanges sums many times for its head {type(self._head).__name__}"
            ways[clause] = "use RidgeHead, train or freeze"
        if ways:
            needs[Trait.SIMULATION] = " and ".join(ways)
            instead[Trait.SIMULATION] = " and ".join(ways.values())
        if self.unprotected:
            needs[Trait.CLEAR_SUMS] = f"would show the server {self.unprotected}"
            instead[Trait.CLEAR_SUMS] = (
                "give mask_file, with a mask found elsewhere, and head: train"
            )
        return MASKS | Traits(needs=needs, instead=instead)

    @property
    def version(self) -> int:
        """Number of the current mask, counted from 0; recalibration makes a new one."""
        return len(self.history) - 1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise ConfigurationError for settings that cannot work together, before any computation."""
        if stage == "fit":
            self._saved = {}  # a checkpoint is loaded after this
            traits = getattr(pl_module, "federation_traits", NO_TRAITS)
            check_together({f"model {type(pl_module).__name__}": traits, "MaskCalibration": MASKS})
            check_run(trainer, self, per_client=self.per_client)
            if self._plan is not None and self._plan.chosen_rule.needs_scores:
                check_forward(pl_module, self.scores.sensitivity)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Calibrate the mask and apply it to the optimizer, before the federation starts."""
        self._applier = self.mask_applier(trainer)
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
            self._use(trainer, everything, "each client calibrates its own", metrics)
        elif self._mask_file is not None:
            self._use(trainer, load_mask(self._mask_file), f"from {self._mask_file}", metrics)
        else:
            self._calibrate(trainer, metrics)

    # for remote clients, whose examples are at sites

    @property
    def head_fit(self) -> HeadFit | None:
        """How the head (classifier) is fitted before calibration; None if the head trains or is frozen."""
        return None if isinstance(self._head, str) else self._head

    def heads(self, module: LightningModule) -> list[str]:
        """Return the names of the modules that form the head (the classifier)."""
        is_needed = self._include is None or self._head != "train"
        return heads_of(module, self._head_name, is_needed=is_needed)

    def mask_applier(self, trainer: Trainer) -> MaskApplier:
        """Return the object that applies masks to a Trainer's module and optimizer."""
        heads = self.heads(trainer.lightning_module)
        return MaskApplier(trainer, heads, head_trains=self._head == "train")

    def client_masks(self) -> ClientMasks | None:
        """Return the per-client masks, or None if all clients share one mask.

        A federation calls this when the fit starts. It then applies a client's mask in local training, and
        averages every entry over the clients whose masks train it. A mask is calibrated on first access, at
        the module's current weights, which must be those that the client has received.
        """
        return self._clients

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Calibrate the mask again after every n-th round, if ``every_n_rounds`` is set."""
        self._recalibrate(trainer)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Calibrate the mask again if it is due, and Lightning has skipped `on_train_epoch_start`.

        Lightning skips it in a central run that resumes from a checkpoint between the last batch of an
        epoch and the end of the epoch.
        """
        self._recalibrate(trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Share new per-client masks with all processes, before a checkpoint is saved."""
        if self._clients is not None:
            num_bytes = self._clients.exchange(Ranks(trainer))
            if num_bytes:
                report_client_masks(trainer, self._clients.counts, num_bytes)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Unfreeze the parameters that were trainable before the fit."""
        self._restore()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Unfreeze the parameters that were trainable before, also if the run failed or was interrupted."""
        self._restore()

    def state_dict(self) -> dict[str, Any]:
        """Return for a checkpoint: the mask, the per-client masks so far, and the history of masks."""
        if self.mask is None:
            return self._saved
        clients = {} if self._clients is None else self._clients.state_dict()
        return {
            "mask": self.mask.state_dict(),
            "history": list(self.history),
            "clients": clients,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store a checkpoint's masks, which are applied when the fit starts."""
        self._saved = dict(state_dict)

    def _resume(self, trainer: Trainer) -> None:
        mask = Mask.from_state_dict(self._saved["mask"])
        self.history = list(self._saved["history"])
        if self._clients is not None:
            self._clients.load_state_dict(self._saved["clients"])
        self._saved = {}
        self._use(trainer, mask, "from the checkpoint", None)

    def _recalibrate(self, trainer: Trainer) -> None:
        done, n = trainer.current_epoch, self._every_n_rounds
        if n is not None and done and done % n == 0 and self.history[-1]["round"] != done:
            self._calibrate(trainer, {})

    def _fit_head(self, trainer: Trainer) -> dict[str, float]:
        if isinstance(self._head, str):
            return {}
        began = time.perf_counter()
        heads = self.heads(trainer.lightning_module)
        fitted = fit_head(trainer, heads, self._head)
        metrics = {
            "head/seconds": time.perf_counter() - began,
            "head/rounds": float(fitted.rounds),
        }
        if federation_of(trainer) is not None:
            num_clients = int(np.count_nonzero(trainer.datamodule.clients.num_examples))  # type: ignore[attr-defined]
            metrics |= _bytes("head", 8.0 * fitted.values_up, fitted.rounds * num_clients)
        return metrics

    def _calibrate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        assert self._plan is not None
        began = time.perf_counter()
        version = len(self.history)
        mask, num_sent = self.scores.mask(trainer, self._plan, self._names(), version)
        seconds = time.perf_counter() - began
        metrics = {**metrics, "calibration/seconds": seconds}
        if federation_of(trainer) is not None:
            metrics |= _bytes("calibration", 4.0 * mask.num_entries if num_sent else 0.0, num_sent)
        self._use(trainer, mask, f"calibrated in {seconds:.1f} s", metrics)

    def _names(self) -> list[str]:
        assert self._applier is not None
        if self.mask is not None:  # tensors of an earlier mask may be frozen now
            return list(self.mask)
        return self._applier.names(self._include, self._exclude)

    def _use(
        self, trainer: Trainer, mask: Mask, origin: str, metrics: dict[str, float] | None
    ) -> None:
        """Apply a new mask (or, if ``metrics`` is None, that of a checkpoint), and report it."""
        assert self._applier is not None
        self._applier.apply(mask)
        self.mask = mask
        if metrics is not None:
            self.history.append({"round": trainer.current_epoch, "hash": mask.hash()})
        others = self._applier.described(mask)
        if self._clients is not None:
            known = self._clients.counts.num_masks
            rank_zero_info(
                f"masks of clients: each is calibrated when its client is first sampled, on "
                f"{mask.num_entries:,} maskable parameters; {others}"
                f"{f'; {known:,} masks are from the checkpoint' if known else ''}"
            )
            if metrics:
                log_once(trainer, "mask", metrics, step=trainer.global_step)
            return
        words = (
            f"mask {self.version}: {mask.num_active:,} of {mask.num_entries:,} maskable parameters "
            f"train (density {mask.density:.4g}); {others}; {origin}; hash {mask.hash()}"
        )
        is_one_of_many = self._every_n_rounds is not None
        report_mask(trainer, mask, self.version, words, metrics, is_one_of_many=is_one_of_many)

    def _restore(self) -> None:
        if self._applier is not None:
            self._applier.undo()
            self._applier = None


def _bytes(purpose: str, each: float, times: int) -> dict[str, float]:
    """Return metrics of bytes sent: by one client in a round, and by all clients in all rounds.

    Their names are calibration/bytes_up, calibration/total_bytes_up, head/bytes_up and head/total_bytes_up.
    """
    return {f"{purpose}/bytes_up": each, f"{purpose}/total_bytes_up": each * times}
