"""What a federation's options refuse: values out of range, and what does not go together."""

from __future__ import annotations

import numpy as np
from lightning.pytorch import Trainer

from fl_lightning.client.corrections.correction import Correction
from fl_lightning.client.personal.personalisation import Personalisation
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.cohorts.cohort import CohortSampler, as_cohort
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.stages.client_masks import client_masks
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.server.robust.collect import Collected, RobustRule
from fl_lightning.sparsity.optimizers.masked_optimizer import MaskedOptimizer


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
    if isinstance(aggregator, RobustRule) and aggregator.min_updates > most:
        raise ConfigurationError(
            f"federation.aggregator {aggregator} needs at least "
            f"{aggregator.min_updates} updates, but a round has at most {most}: raise the "
            "cohort's size, or lower num_attackers"
        )


def check_trusted(
    aggregator: Aggregator | RobustRule | None, cohort: CohortSampler, num_clients: int
) -> None:
    """Refuse rounds without the client that `FLTrust` judges by, which would end the run.

    Raises:
        ConfigurationError: if cohorts are drawn at random.
    """
    rule = aggregator.rule if isinstance(aggregator, Collected) else aggregator
    if not isinstance(rule, RobustRule) or rule.trusted_client is None:
        return
    asked = as_cohort(cohort)
    is_drawn = asked.is_uniform or asked.coin is not None
    if is_drawn and cohort.expected_size(num_clients) < num_clients:
        raise ConfigurationError(
            f"federation.aggregator: {type(rule).__name__} judges by the update of client {rule.trusted_client}, "
            f"which {cohort} would often leave out: let all clients take part (cohort: null)"
        )


def check_correction(
    trainer: Trainer, correction: Correction | None, personal: Personalisation | None
) -> None:
    """Refuse corrections and personal models that would give a wrong result.

    Raises:
        ConfigurationError: saying with what they do not go together.
    """
    pull = personal.pull if personal else 0.0
    tunes = personal is not None and personal.tuning_steps > 0
    if tunes and any(isinstance(each, MaskedOptimizer) for each in trainer.optimizers):
        raise ConfigurationError(
            "federation.personal: FineTuned takes its steps with a new optimizer, which knows "
            "no masks: use Personal or Ditto with SparseSGDM and SparseAdamW"
        )
    if correction is None and not pull:
        return
    if correction is not None and correction.remembers and client_masks(trainer) is not None:
        raise ConfigurationError(
            f"federation.correction {type(correction).__name__} remembers a number for every "
            "coordinate, and with masks of their own clients do not move the same ones: use one "
            "mask for all, or FedProx"
        )
    groups = (group for each in trainer.optimizers for group in each.param_groups)
    if any(group.get("maximize") for group in groups):
        raise ConfigurationError(
            f"federation.{'personal.pull' if correction is None else 'correction'} is added to "
            "the gradient of what is minimised, and the clients' optimizer has maximize: leave that "
            "out and return the negative loss"
        )
