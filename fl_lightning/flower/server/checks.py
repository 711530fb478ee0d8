"""What cannot be where clients are at sites, said before any of them is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer

from fl_lightning.client.recorded import RecordedArrivals
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.cohorts.cohort import as_cohort
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.checks.privacy import shown_by
from fl_lightning.federation.options import Options
from fl_lightning.federation.stages.client_masks import client_masks
from fl_lightning.server.server import as_aggregator

SCALED = "16-mixed"  # a precision


def check_over_network(trainer: Trainer, module: Any, data: Any, options: Options) -> None:
    """Refuse what has no meaning over a network, or would say there what is not true.

    Raises:
        ConfigurationError: all of it at once.
    """
    problems = [*_of_options(options), *_of_hidden(options), *_of_stages(options)]
    problems += [*_of_trainer(trainer), *_of_module(module), *_of_data(data)]
    if problems:
        raise ConfigurationError("\n".join(problems))


def _of_options(options: Options) -> Iterator[str]:
    if isinstance(options.devices, RecordedArrivals):
        yield (
            "federation.devices RecordedArrivals simulates a run that has been: leave it out over a network"
        )
    elif options.devices is not None and options.asynchronous is None:
        yield (
            "federation.devices simulates how fast clients are, and sites are as fast as they are: leave "
            "it out, and say with network run --deadline how many seconds the server waits"
        )
    if as_cohort(options.cohort).needs_fresh_losses:
        yield (
            f"federation.cohort {type(options.cohort).__name__} asks for clients' losses on the present model, "
            "which is simulated only: set its losses to last_known over a network"
        )
    if options.attackers is not None:
        yield "federation.attackers are simulated only: leave them out over a network"
    if options.engine == "slots":
        yield (
            "federation.engine: slots train many clients at once in one process; sites train one after "
            "the other: set engine to auto or sequential"
        )


def _of_hidden(options: Options) -> Iterator[str]:
    aggregator = as_aggregator(options.aggregator)
    if aggregator.protection is not None and aggregator.protection.over_sites is None:
        yield (
            f"federation.aggregator {type(aggregator).__name__} is simulated only as it is configured: over "
            "this network the server would see updates in clear, which it promises not to; SecureMean "
            "with protocol: run works, and EncryptedMean with CKKS and fraction: 1"
        )
    if options.example_privacy is not None:
        yield (
            f"federation.privacy {type(options.privacy).__name__} is simulated only: over a network use "
            "LocalDP, whose noise clients add at their site, or CentralDP, whose server is trusted"
        )


def _of_stages(options: Options) -> Iterator[str]:
    for stage in options.stages:
        if stage.reason_against_sites is not None:
            yield (
                f"federation.stages {type(stage).__name__}: {stage.reason_against_sites}: set its "
                "reason_against_sites to None if its methods for the two sides share nothing but to_sites "
                "and to_server"
            )


def _of_trainer(trainer: Trainer) -> Iterator[str]:
    if trainer.world_size > 1:
        yield (
            f"trainer.devices: the server is one process, got {trainer.world_size}: set devices to 1; "
            "sites have devices of their own"
        )
    if trainer.precision == SCALED:
        yield (
            f"trainer.precision: {SCALED} has a loss scale that all clients share, which sites do not "
            "exchange: use bf16-mixed or 32-true"
        )
    if client_masks(trainer) is not None:
        yield "masks of the clients' own are simulated only: leave out the callback that gives them"


def _of_module(module: Any) -> Iterator[str]:
    reason = getattr(module, "reason_against_sites", None)
    if reason is not None:
        yield f"model {type(module).__name__}: {reason}"


def _of_data(data: Any) -> Iterator[str]:
    if not isinstance(data, FederatedDataModule):
        yield (
            "data: over a network the configuration is that of a federation: wrap the data module in "
            "fl_lightning.FederatedDataModule"
        )
    else:
        yield from of_transforms(data)


def of_transforms(data: FederatedDataModule) -> Iterator[str]:
    """Say which transforms of inputs cannot be where each site knows its own clients only."""
    for transform in data.transforms:
        if shown_by([transform]):
            yield (
                f"data.transforms {type(transform).__name__} learns from all clients' examples, which are at "
                "sites: use Normalize with numbers that are known, in the configurations of server and sites"
            )
