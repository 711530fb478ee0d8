"""What a `OneShot` brings to a run: who trains which sub-networks, and the evaluation of some.

Training: in a federation it tells the module whose turn it is. With a capability each client keeps to a
mask: the coordinates that it can afford, which alone travel and are averaged over those who held them.
Between rounds: channels are sorted before narrower widths join, and a predictor of accuracy is fitted, if
the method says so.
Evaluation: statistics of the largest, of the smallest and of one in between are recalibrated before
every validation and test, and at the end of rounds without one. The module keeps the largest's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import Trait
from fl_lightning.federation.federation import Federation
from fl_lightning.federation.stage import Stage, Turn
from fl_lightning.federation.stages.client_masks import MaskOfClient
from fl_lightning.nas.elastic.attentive import Predict
from fl_lightning.nas.elastic.calibration import Sums, apply_sums
from fl_lightning.nas.spaces.space import Architecture
from fl_lightning.nas.sub_networks.accuracy_predictor import RunPredictor
from fl_lightning.nas.sub_networks.attentive import Attentive
from fl_lightning.nas.sub_networks.capability import limits, reach
from fl_lightning.nas.sub_networks.recalibration import check_personal, has_statistics, recalibrated
from fl_lightning.nas.sub_networks.sorted_channels import check_sorting, sort_before_round

if TYPE_CHECKING:
    from fl_lightning.nas.one_shot import OneShot


class Guest(NamedTuple):
    """Whose turn it is in the module.

    Attributes:
        client: its number.
        limit: its largest sub-network.
    """

    client: int
    limit: Architecture


class Turns(Stage):
    """Notes whose turn it is.

    Args:
        limits: the largest sub-network of every client; None: the space's, for all.
        largest: of the space.

    Attributes:
        guest: the client at work; None between turns.
    """

    one_at_a_time = "which sub-networks train differs from step to step"
    # it reads a client's number alone
    traits = Stage.traits.without(Trait.PRIVATE_CLIENTS, Trait.PRIVATE_EXAMPLES)

    def __init__(self, limits: list[Architecture] | None, largest: Architecture) -> None:
        self._limits, self._largest = limits, largest
        self.guest: Guest | None = None

    def around(self, turn: Turn) -> AbstractContextManager[None]:
        """Have the module be this client's."""
        return self._visit(turn.work.client_id)

    @contextmanager
    def _visit(self, client: int) -> Iterator[None]:
        before = self.guest
        limit = self._largest if self._limits is None else self._limits[client]
        self.guest = Guest(client, limit)
        try:
            yield
        finally:
            self.guest = before


class SubNetworkRounds(Callback):
    """The callback, which a `OneShot` brings along.

    Attributes:
        unprotected: what of clients no privacy of rounds covers, in words.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unprotected: str | None = None
        self._module: OneShot | None = None
        self._turns: Turns | None = None
        self._limits: list[Architecture] | None = None
        self._masks: dict[Architecture, Mapping[str, Tensor]] = {}
        self._sums: dict[str, Sums] = {}
        self._recalibrated_at: int | None = None
        self._predictor: RunPredictor | None = None

    @property
    def guest(self) -> Guest | None:
        """Whose turn it is; None in a central run."""
        return None if self._turns is None else self._turns.guest

    @property
    def predict(self) -> Predict | None:
        """Accuracies of architectures; None as long as nothing has been fitted to predict them."""
        return None if self._predictor is None else self._predictor.predict

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Have a federation tell whose turn it is.

        Raises:
            ConfigurationError: for a capability in a run without clients, a budget that no network
                meets, or models of clients whose statistics would not be recalibrated.
        """
        module: Any = pl_module
        self._module, self._sums, self._recalibrated_at = module, {}, None
        self._turns = self._limits = self._predictor = None
        self._masks = {}
        if has_statistics(module.network):
            self.unprotected = "the sums of each client's activations, for batch norm statistics"
        if stage != "fit":
            return
        check_sorting(trainer, module.method)
        options = module.method.predictor if isinstance(module.method, Attentive) else None
        self._predictor = RunPredictor(options, module.space, module.seed)
        self._predictor.check(trainer)
        if options is not None:
            self.unprotected = ", and ".join(
                filter(None, [self.unprotected, "how many of its examples sub-networks get right"])
            )
        federations = [c for c in trainer.callbacks if isinstance(c, Federation)]  # type: ignore[attr-defined]
        if module.capability is not None:
            if not federations:
                raise ConfigurationError(
                    "model.capability is of clients, and this run has none: add a federation block, or "
                    "leave it out"
                )
            num_clients = len(trainer.datamodule.clients)  # type: ignore[attr-defined]
            cost = module.cost_in(module.capability.measure)
            self._limits = limits(module.capability, module.space, cost, num_clients)
        if federations:
            check_personal(federations[0].personal, module.network)
            self._turns = Turns(self._limits, module.space.largest)
            federations[0].add(self._turns)

    def client_masks(self) -> MaskOfClient | None:
        """Return what gives a client's mask; None without a capability."""
        return None if self._limits is None else self._mask

    def _mask(self, client: int) -> Mapping[str, Tensor]:
        assert self._limits is not None
        assert self._module is not None
        limit = self._limits[client]
        if limit not in self._masks:
            held = reach(self._module.space, self._module.network, limit)
            self._masks[limit] = {f"network.{name}": mask for name, mask in held.items()}
        return self._masks[limit]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sort the channels where the method asks for it, and fit its predictor of accuracy."""
        sort_before_round(trainer, pl_module)
        assert self._predictor is not None, "a fit was set up"
        for name, value in self._predictor.before_round(trainer, pl_module).items():
            pl_module.log(name, value, on_epoch=True, sync_dist=True)  # the same in all processes

    def state_dict(self) -> dict[str, Any]:
        """Return what the predictor was fitted on."""
        return {} if self._predictor is None else self._predictor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have the predictor that the run had."""
        if self._predictor is not None:
            self._predictor.load_state_dict(state_dict)

    # Evaluation.

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Recalibrate the statistics of those that are shown."""
        self._recalibrate(trainer, pl_module)

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Recalibrate the statistics of those that are shown."""
        self._recalibrate(trainer, pl_module)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Recalibrate where no validation does, ahead of checkpoints."""
        if trainer.is_last_batch and not trainer.enable_validation:
            self._recalibrate(trainer, pl_module)

    def _recalibrate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        if not has_statistics(module.network) or trainer.sanity_checking:
            return
        found = recalibrated(
            trainer,
            module.network,
            list(module.shown.values()),
            max_examples=module.recalibration_examples,
            seed=module.seed,
        )
        if found is None:
            self._sums = {}
            return
        self._sums = dict(zip(module.shown, found.sums, strict=True))
        self.use("largest")
        if any(isinstance(c, Federation) for c in trainer.callbacks):  # type: ignore[attr-defined]
            module.log("recalibration/bytes_up", float(found.num_bytes), rank_zero_only=True)

    @property
    def has_statistics(self) -> bool:
        """Whether the statistics of all that are shown are known, or none are needed."""
        assert self._module is not None
        return bool(self._sums) or not has_statistics(self._module.network)

    def use(self, name: str) -> None:
        """Write the statistics of one that is shown into the network."""
        assert self._module is not None
        if name in self._sums:
            apply_sums(self._module.network, self._sums[name])
