"""What a search cannot have around it, each refused in a sentence before anything trains."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.nas.alpha_gradients import AlphaGradient, Reward
from fl_lightning.nas.cost.penalties import NoPenalty, Penalty
from fl_lightning.nas.relaxation import Relaxation, SinglePath
from fl_lightning.server.server import as_aggregator
from fl_lightning.sparsity import SparseAdamW, SparseSGDM

MASKS_IN_A_SEARCH = "a search keeps to no mask: operations would compete with parts of them missing"
SEARCH_TRAITS = Traits(
    needs={
        Trait.ALL_PARAMETERS: "keeps to no mask: operations would compete with parts of them missing",
        Trait.SIMULATION: "is simulated only: its server steps alpha and needs clients' batch norm "
        "statistics, which sites do not send",
    },
    instead={
        Trait.ALL_PARAMETERS: "search without MaskCalibration, then mask the network that was found",
        Trait.SIMULATION: "search in a simulation, then train what was found over the network (retrain.yaml)",
    },
)
ALL_SIZES_TRAITS = Traits(
    needs={
        Trait.ALL_PARAMETERS: "keeps to no mask but its clients' capability: a mask of its largest size "
        "leaves smaller ones with parts missing",
        Trait.SIMULATION: "is simulated only: its clients' turns and sums are not sent to sites",
    },
    instead={
        Trait.ALL_PARAMETERS: "train it without MaskCalibration, then mask the network that was chosen",
        Trait.SIMULATION: "train it in a simulation, then train the sub-network that was chosen over the "
        "network",
    },
)


def check_precision(precision: str) -> None:
    """Refuse one in which alpha, or its gradient, has 16 bits.

    Raises:
        ConfigurationError: saying what to take instead.
    """
    reason = {
        "16": "gradients of alpha are taken without the scale that keeps float16 from rounding them to zero",
        "bf16-true": "alpha has 8 binary digits, by which its small steps round to nothing",
    }
    for start, why in reason.items():
        if precision.startswith(start):
            raise ConfigurationError(
                f"trainer.precision is {precision}, and {why}: take bf16-mixed or 32-true"
            )


def check_one_device(world_size: int) -> None:
    """Refuse a central search in several processes.

    Raises:
        ConfigurationError: saying what to take instead.
    """
    if world_size > 1:
        raise ConfigurationError(
            f"a search without federation trains in one process, got {world_size}: each would move an alpha "
            "of its own. Set trainer.devices to 1, or add a federation block, whose clients train in all "
            "of them"
        )


def check_length(max_epochs: int | None) -> None:
    """Refuse a search that does not know how long it is.

    Raises:
        ConfigurationError: if it has no number of epochs.
    """
    if max_epochs is None or max_epochs < 1:
        raise ConfigurationError(
            f"trainer.max_epochs must be at least 1 in a search, got {max_epochs}: how far it is sets the "
            "temperature, and when alpha begins to move"
        )


def check_image_size(side: int, images: Tensor) -> None:
    """Refuse images of another size than costs are counted for; of a rectangle one side is enough.

    Raises:
        ConfigurationError: with both sizes.
    """
    if images.ndim == 4 and side not in images.shape[2:]:
        given = " x ".join(map(str, images.shape[2:]))
        raise ConfigurationError(
            f"model.image_size is {side}, and the images are {given}: set what the data have, which "
            "costs are counted for"
        )


def check_learning(rule: Relaxation, learn: AlphaGradient, penalty: Penalty) -> None:
    """Refuse parts of which one has no influence.

    Raises:
        ConfigurationError: saying what to take instead.
    """
    if isinstance(rule, SinglePath) and not isinstance(learn, Reward):
        raise ConfigurationError(
            "model.rule SinglePath gives alpha no gradient, so that it would stay as it was drawn: set model.learn "
            "to fl_lightning.nas.Reward, or take BinaryGates or HardGumbel"
        )
    if isinstance(learn, Reward) and not isinstance(penalty, NoPenalty):
        raise ConfigurationError(
            f"model.penalty {type(penalty).__name__} adds to a loss, and model.learn Reward learns from accuracy "
            "alone: leave one of them out"
        )


def check_beside_updates(federation: Any, sends: str) -> None:
    """Refuse buffers that travel beside updates which nobody may read.

    Args:
        federation: its options.
        sends: the option that sends buffers, in words; empty if none does.

    Raises:
        ConfigurationError: saying what to take instead.
    """
    hides = protector(federation)
    if sends and hides is not None:
        raise ConfigurationError(
            f"{sends} travels in buffers beside the update, and {type(hides).__name__} protects "
            "updates alone: take architecture_state: server, and a learn by Gradient"
        )


def protector(federation: Any) -> Any:
    """Return what hides the updates of single clients; None if nothing does."""
    given = federation.aggregator
    if federation.privacy is not None or given is None:
        return federation.privacy
    return given if as_aggregator(given).protection is not None else None


def check_steps_once(option: str, optimizer: Optimizer) -> None:
    """Refuse an optimizer that asks for the loss again and again: a search has a gradient for one step.

    Raises:
        ConfigurationError: naming the option.
    """
    if isinstance(optimizer, LBFGS):
        raise ConfigurationError(
            f"{option} is LBFGS, which evaluates the loss several times a step, and a search has one "
            "gradient for it: take torch.optim.SGD or torch.optim.Adam"
        )


def check_weights_optimizer(optimizer: Optimizer) -> None:
    """Refuse one that keeps to a mask, or asks for more than a gradient.

    Raises:
        ConfigurationError: saying what to do first.
    """
    check_steps_once("model.optimizer", optimizer)
    if isinstance(optimizer, SparseSGDM | SparseAdamW):
        raise ConfigurationError(
            f"model.optimizer is {type(optimizer).__name__}, and {MASKS_IN_A_SEARCH}. Search with "
            "torch.optim.SGD, then mask the network that was found"
        )
