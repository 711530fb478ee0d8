"""A site evaluates a model on the examples that its clients hold out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from lightning.pytorch import Trainer
from torch import Tensor

from fl_lightning.federation import PersonalModels, StepOf, evaluated_clients
from fl_lightning.flower.messages import ClientAnswer, Order
from fl_lightning.flower.site.desk import Done


def evaluated(
    trainer: Trainer,
    order: Order,
    models: PersonalModels | None,
    allows: Callable[[str], bool],
) -> Done:
    """Return the metrics of the clients of an order, of the model that the module holds and of their own.

    Args:
        trainer: of the site.
        order: names clients, and a stage.
        models: of the clients' own; None if they have none.
        allows: whether a metric of a name may leave.
    """
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    stage: StepOf = "test" if order.options.get("stage") == "test" else "validation"
    found = evaluated_clients(trainer, data, stage, np.array(order.clients, np.int64), models)

    def leaving(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in metrics.items() if allows(name)}

    return Done([ClientAnswer(client=c, metrics=leaving(found.get(c, {}))) for c in order.clients])
