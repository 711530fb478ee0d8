"""What a site is told when it is greeted: the run's configuration, and which entries may move by now.

Every order also says in which round each client counted last, so that sites know what to remember.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from lightning.pytorch import Trainer
from torch import Tensor

from fl_lightning.core.traits import NO_TRAITS
from fl_lightning.core.update import GlobalModel
from fl_lightning.federation import RoundRecord, Stage
from fl_lightning.flower.messages import Kind, Order
from fl_lightning.flower.packing import RunMask, mask_message, model_tensors
from fl_lightning.sparsity.masks.mask import Mask


class Masks(Protocol):
    """Has the masks of a run."""

    @property
    def mask(self) -> Mask | None:
        """The present one; None before there is one."""

    @property
    def version(self) -> int:
        """Its number."""


class Greeting:
    """Writes the order ``hello`` as it is at the moment.

    With a mask comes the whole model: entries that may not move any more are what training has made of
    them, and no later order has them.

    Args:
        configuration: of the run, as YAML.
        counted: knows the run, and in which rounds clients counted.
        trainer: of the server.
        masks: of the run; None for one without.

    Attributes:
        digest: SHA-256 of the configuration.
        counted: as given.
    """

    def __init__(
        self,
        configuration: str,
        counted: Counted,
        trainer: Trainer,
        masks: Masks | None,
    ) -> None:
        self.digest = hashlib.sha256(configuration.encode()).hexdigest()
        self.counted = counted
        self._configuration, self._trainer, self._masks = configuration, trainer, masks

    @property
    def mask(self) -> RunMask | None:
        """The present mask; None if there is none."""
        if self._masks is None or self._masks.mask is None:
            return None
        return RunMask(self._masks.mask, self._masks.version)

    def order(self) -> Order:
        """Return the order."""
        options: dict[str, Any] = {"configuration": self._configuration}
        tensors: dict[str, Tensor] = {}
        if (mask := self.mask) is not None:
            more, tensors = mask_message(mask)
            options |= more
            options["num_clients"] = len(self._trainer.datamodule.clients)  # type: ignore[attr-defined]
            tensors |= model_tensors(self._trainer.lightning_module)
        order = self.write("hello", (), options, tensors, self._trainer.current_epoch)
        return replace(order, counted=self.counted.rounds)

    def write(
        self,
        kind: Kind,
        clients: tuple[int, ...],
        options: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        round_index: int,
    ) -> Order:
        """Return an order of the run."""
        rounds = self.counted.rounds
        return Order(
            kind=kind,
            run=self.counted.run,
            configuration=self.digest,
            round=round_index,
            clients=clients,
            counted={client: rounds.get(client, -1) for client in clients},
            options=options,
            tensors=tensors,
        )


class Counted(Stage):
    """Knows in which round each client counted last, which sites have to know.

    Args:
        run: of the run, 32 hexadecimal digits; that of the checkpoint in a resumed one.

    Attributes:
        run: as given.
        rounds: by client; the round of the order, also where its update counted in a later one.
        began: of which round's order those clients' updates are that count in a later one.
    """

    key = "sites"
    traits = NO_TRAITS

    def __init__(self, run: str) -> None:
        self.run = run
        self.rounds: dict[int, int] = {}
        self.began: Mapping[int, int] = {}

    def close(self, record: RoundRecord) -> None:
        """Note whose update was used."""
        absent = {*record.skipped, *record.lost}
        counting = (client for client in record.finished if client not in absent)
        self.rounds |= {client: self.began.get(client, self._number) for client in counting}

    def open(self, round_index: int, model: GlobalModel) -> None:
        """Note the round's number."""
        self._number = round_index

    def state_dict(self) -> dict[str, Any]:
        """Return both."""
        return {"run": self.run, "rounds": dict(self.rounds)}

    def load_state_dict(self, state: Any, model: GlobalModel) -> None:
        """Resume the run of a checkpoint."""
        if state:
            self.run, self.rounds = state["run"], dict(state["rounds"])
