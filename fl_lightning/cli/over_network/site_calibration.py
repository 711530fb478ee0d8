"""What a site's clients send for a mask or a head, as `MaskCalibration` of the configuration says."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from fl_lightning.callbacks.calibration.apply import WhatMoves
from fl_lightning.callbacks.calibration.head_fitting import linear_head, owner_features
from fl_lightning.callbacks.calibration.mask_calibration import MaskCalibration
from fl_lightning.callbacks.calibration.owners import clients_as_owners, scoring_context
from fl_lightning.callbacks.calibration.scores import scoring
from fl_lightning.federation import visiting
from fl_lightning.flower.failures import OrderRefused
from fl_lightning.flower.messages import ClientAnswer, Order
from fl_lightning.flower.server.calibration import SUMS, VALUES
from fl_lightning.flower.site.desk import Done
from fl_lightning.flower.whole_model import hold_model, of_stage
from fl_lightning.sparsity.heads import OneExchange


class SiteCalibration:
    """Answers orders to calibrate.

    Args:
        calibration: of the configuration.
    """

    def __init__(self, calibration: MaskCalibration) -> None:
        self._calibration = calibration

    def what_moves(self, trainer: Trainer) -> WhatMoves:
        """Return what puts masks on a Trainer's module."""
        return self._calibration.what_moves(trainer)

    def answer(self, trainer: Trainer, order: Order) -> Done:
        """Return what clients of an order send, of the order's model; the module stays as it is."""
        found = self._scores if order.options.get("what") == "scores" else self._sums
        answers: list[ClientAnswer] = []
        tensors: dict[str, Tensor] = {}
        for client, num_examples, sums in found(trainer, order):
            answers.append(ClientAnswer(client=client, num_examples=num_examples))
            tensors |= {f"{client}/{SUMS}{name}": tensor.cpu() for name, tensor in sums.items()}
        return Done(answers, tensors)

    def _scores(self, trainer: Trainer, order: Order) -> list[tuple[int, int, dict[str, Tensor]]]:
        """Return the scores of clients: each with its number of examples."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        device = trainer.strategy.root_device
        values = {n: t.to(device) for n, t in of_stage(VALUES, order.tensors).items()}
        ids = order.options["version"], order.options["round"]
        with scoring(trainer) as visit:
            hold_model(visit.module, order.tensors)
            score = self._calibration.scores.score(visit, clients_as_owners(data), values, ids)
            found = [(client, score(client, count)) for client, count in order.options["examples"]]
        return [(client, scores.num_examples, dict(scores.sums)) for client, scores in found]

    def _sums(self, trainer: Trainer, order: Order) -> list[tuple[int, int, dict[str, Tensor]]]:
        """Return the sums for the head of clients."""
        fit = self._calibration.head_fit
        if not isinstance(fit, OneExchange):
            raise OrderRefused("policy", "this run fits no head by one exchange of sums")
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        owners, module = clients_as_owners(data), trainer.lightning_module
        head = linear_head(module, self._calibration.heads(module))
        found = []
        with visiting(trainer, mode="eval") as visit, scoring_context(trainer):
            hold_model(visit.module, order.tensors)
            for client in order.clients:
                features = owner_features(visit, owners, client, head, fit)
                sums = fit.sums(features, head.in_features, head.out_features)
                found.append((client, 0, {"head": sums}))
        return found
