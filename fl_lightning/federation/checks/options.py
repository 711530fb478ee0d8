"""What a federation's options refuse: values out of range, and what does not go together.

Data that a model cannot take, found by a few examples before the first client trains.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from lightning.pytorch import Trainer

from fl_lightning.client.devices import Devices
from fl_lightning.client.recorded import RecordedArrivals
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import preserve_global_generators
from fl_lightning.data.cohorts.cohort import CohortSampler, as_cohort
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.privacy.example import ExampleDP
from fl_lightning.privacy.mechanism import Privacy
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.server.robust.rule import RobustRule
from fl_lightning.server.server import as_aggregator
from fl_lightning.server.staleness import AsyncRule


def check_values(
    *,
    local_steps: int | None,
    local_epochs: int | None,
    on_client_failure: str,
    min_replies: int,
    clients_per_group: int | None,
    client_memory_gb: float,
) -> None:
    """Refuse values out of range; they are those of `Federation`.

    Raises:
        ConfigurationError: all of them in one sentence.
    """
    problems = []
    if local_steps is not None and local_epochs is not None:
        problems.append("give either local_steps or local_epochs, not both: set the other to null")
    counts = {
        "local_steps": local_steps,
        "local_epochs": local_epochs,
        "clients_per_group": clients_per_group,
    }
    for name, value in counts.items():
        if value is not None and value < 1:
            problems.append(f"{name} must be at least 1, got {value}")
    if on_client_failure not in ("raise", "skip"):
        problems.append(f"on_client_failure must be raise or skip, got {on_client_failure!r}")
    if min_replies < 1:
        problems.append(f"min_replies must be at least 1 client, got {min_replies}")
    if not 0 <= client_memory_gb < float("inf"):
        problems.append(f"client_memory_gb must be at least 0 and finite, got {client_memory_gb}")
    if problems:
        raise ConfigurationError("federation: " + "; ".join(problems))


def check_recorded(
    devices: Devices | RecordedArrivals | None, asynchronous: AsyncRule | None
) -> None:
    """Refuse a record of arrivals where the server waits for its cohort.

    Raises:
        ConfigurationError: if there is such a record.
    """
    if isinstance(devices, RecordedArrivals) and asynchronous is None:
        raise ConfigurationError(
            "federation: devices RecordedArrivals is who arrived when in an asynchronous run: set "
            "asynchronous as well"
        )


def check_privacy(
    privacy: Privacy | ExampleDP | None,
    *,
    cohort: CohortSampler,
    asynchronous: object,
) -> None:
    """Refuse cohorts for which nothing is proved.

    Raises:
        ConfigurationError: naming them.
    """
    if privacy is None:
        return
    if not isinstance(privacy, ExampleDP | Privacy):
        raise ConfigurationError(
            f"federation.privacy {type(privacy).__name__} lacks what a kind of privacy says of "
            "itself: derive it from fl_lightning.privacy.mechanism.ClientPrivacy and give it a mechanism"
        )
    if asynchronous is None:  # which is refused, and has no cohorts
        privacy.check_cohort(cohort)


def check_shards(data: FederatedDataModule, on_client_failure: str) -> None:
    """Refuse clients without examples, unless they are to be skipped.

    Raises:
        ConfigurationError: naming some of them.
    """
    empty = np.flatnonzero(data.clients.num_examples == 0)
    if len(empty) and on_client_failure == "raise":
        shown = ", ".join(map(str, empty[:5])) + (", …" if len(empty) > 5 else "")
        raise ConfigurationError(
            f"{len(empty)} of {len(data.clients)} clients have no training example "
            f"(client {shown}): use fewer clients or a partition with min_examples, or skip "
            "them with federation.on_client_failure: skip"
        )


def check_cohort_size(
    most: int, min_replies: int, aggregator: Aggregator | RobustRule | None
) -> None:
    """Refuse cohorts that can never be large enough.

    Args:
        most: clients that a round may have.
        min_replies: wanted by the user.
        aggregator: some rules need so many.

    Raises:
        ConfigurationError: saying who wants how many.
    """
    if min_replies > most:
        raise ConfigurationError(
            f"federation.min_replies is {min_replies}, but a round has at most {most} "
            "clients: lower it, or raise the cohort's size"
        )
    rule = as_aggregator(aggregator).robust_rule
    if rule is not None and rule.min_updates > most:
        raise ConfigurationError(
            f"federation.aggregator {rule} needs at least "
            f"{rule.min_updates} updates, but a round has at most {most}: raise the "
            "cohort's size, or lower num_attackers"
        )


def check_trusted(
    aggregator: Aggregator | RobustRule | None, cohort: CohortSampler, num_clients: int
) -> None:
    """Refuse rounds without the client that `FLTrust` judges by, which would end the run.

    Raises:
        ConfigurationError: if cohorts are drawn at random.
    """
    rule = as_aggregator(aggregator).robust_rule
    if rule is None or rule.trusted_client is None:
        return
    asked = as_cohort(cohort)
    is_drawn = asked.is_uniform or asked.coin is not None
    if is_drawn and cohort.expected_size(num_clients) < num_clients:
        raise ConfigurationError(
            f"federation.aggregator: {type(rule).__name__} judges by the update of client {rule.trusted_client}, "
            f"which {cohort} would often leave out: let all clients take part (cohort: null)"
        )


# examples that are looked at, evenly spaced over all clients'
_EXAMPLES = 64


@runtime_checkable
class ChecksBatches(Protocol):
    """A module that says whether a training batch fits it."""

    def check_batch(self, batch: Any) -> None:
        """Refuse a batch that it cannot train on.

        Raises:
            ConfigurationError: with what the model takes and what the data have.
        """


def check_data_fits(trainer: Trainer) -> None:
    """Have a module that knows how look at some of the data; nothing is drawn or changed.

    Raises:
        ConfigurationError: as the module says it.
    """
    module = trainer.lightning_module
    data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(module, ChecksBatches):
        return
    indices = torch.from_numpy(data.clients.flat.indices)
    if not len(indices):
        return
    chosen = indices[:: max(1, len(indices) // _EXAMPLES)].long()
    with preserve_global_generators():
        module.check_batch(data.train_batch(chosen))
