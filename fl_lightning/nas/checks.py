"""Checks of the settings of a search before training."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.nas.alpha_gradients import AlphaGradient, Reward
from fl_lightning.nas.cost.cost import Penalty
from fl_lightning.nas.relaxation import PartialChannels, Relaxation, SinglePath
from fl_lightning.nas.sampled_paths import BinaryGates
from fl_lightning.nas.spaces.cells import CellSpace
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
    """Raise ConfigurationError for a precision that stores α or its gradient in 16 bits."""
    reason = {
        "16": "gradients of alpha are taken without the scale that keeps float16 from rounding them to zero",
        "bf16-true": "alpha has 8 binary digits, by which its small steps round to nothing",
    }
    for start, why in reason.items():
        if precision.startswith(start):
            raise ConfigurationError(
                f"trainer.precision is {precision}, and {why}: use bf16-mixed or 32-true"
            )


def check_one_device(world_size: int) -> None:
    """Raise ConfigurationError for a central search in several processes."""
    if world_size > 1:
        raise ConfigurationError(
            f"a search without federation trains in one process, got {world_size}: each would move an alpha "
            "of its own. Set trainer.devices to 1, or add a federation block, whose clients train in all "
            "of them"
        )


def check_length(max_epochs: int | None) -> None:
    """Raise ConfigurationError for a search without a number of epochs."""
    if max_epochs is None or max_epochs < 1:
        raise ConfigurationError(
            f"trainer.max_epochs must be at least 1 in a search, got {max_epochs}: its progress sets the "
            "temperature, and when alpha starts to move"
        )


def check_image_size(side: int, images: Tensor) -> None:
    """Raise ConfigurationError if no side of the images is the size that costs are computed for."""
    if images.ndim == 4 and side not in images.shape[2:]:
        given = " x ".join(map(str, images.shape[2:]))
        raise ConfigurationError(
            f"model.image_size is {side}, and the images are {given}: set image_size to that of the "
            "data, for which costs are computed"
        )


def check_labels(num_classes: int, labels: Tensor) -> None:
    """Raise ConfigurationError if a label is no class of the network."""
    if len(labels) and int(labels.max()) >= num_classes:
        raise ConfigurationError(
            f"model.num_classes is {num_classes}, and there is a label {int(labels.max())}: set "
            "num_classes to the number of classes of the data"
        )


def check_rule(
    rule: Relaxation,
    space: CellSpace,
    learn: AlphaGradient,
    penalty: Penalty | None,
    alpha_draws: int,
) -> None:
    """Raise ConfigurationError if a rule does not go together with another part of a search."""
    if isinstance(rule, PartialChannels) and not space.has_shapes:
        raise ConfigurationError(
            f"model.rule PartialChannels makes layers of fewer channels, and those of {space.name} are made "
            "by functions of yours: use Softmax, HardGumbel or another rule"
        )
    if isinstance(rule, SinglePath) and not isinstance(learn, Reward):
        raise ConfigurationError(
            "model.rule SinglePath gives alpha no gradient, so that it would keep its random start: set "
            "model.learn to fl_lightning.nas.Reward, or use BinaryGates or HardGumbel"
        )
    if isinstance(learn, Reward) and penalty is not None:
        raise ConfigurationError(
            f"model.penalty {type(penalty).__name__} adds to a loss, and model.learn Reward learns from accuracy "
            "alone: leave one of them out"
        )
    if alpha_draws > 1 and (not rule.draws or isinstance(rule, BinaryGates)):
        why = "shifts the pair of each draw" if rule.draws else "draws nothing: all would be equal"
        raise ConfigurationError(
            f"alpha_draws is {alpha_draws}, and {type(rule).__name__} {why}: leave it at 1"
        )


def check_turns(alpha_every: int, num_steps: float, what: str) -> None:
    """Raise ConfigurationError if a round (epoch) is too short for a step of α.

    Args:
        alpha_every: number of steps from one step of α to the next.
        num_steps: number of steps per round (epoch).
        what: name of `num_steps` for the message.
    """
    if num_steps < alpha_every:
        raise ConfigurationError(
            f"model.alpha_every is {alpha_every}, and {what} is {num_steps:g}: alpha would never move. "
            f"Set alpha_every to {num_steps:g} at most, or train longer per round"
        )


def check_beside_updates(federation: Any, sends: str) -> None:
    """Raise ConfigurationError if buffers would be sent unprotected beside protected updates.

    Args:
        federation: options of the federation.
        sends: option because of which clients send buffers; empty if there is none.
    """
    hides = protector(federation)
    if sends and hides is not None:
        raise ConfigurationError(
            f"{sends} is sent in buffers beside the update, and {type(hides).__name__} protects "
            "updates alone: use architecture_state: server, and learn: Gradient"
        )


def protector(federation: Any) -> Any:
    """Return the part that protects single updates (privacy, secure aggregation), or None."""
    given = federation.aggregator
    if federation.privacy is not None or given is None:
        return federation.privacy
    return given if as_aggregator(given).protection is not None else None


def check_steps_once(option: str, optimizer: Optimizer) -> None:
    """Raise ConfigurationError for an optimizer that evaluates the loss several times per step."""
    if isinstance(optimizer, LBFGS):
        raise ConfigurationError(
            f"{option} is LBFGS, which evaluates the loss several times a step, and a search has one "
            "gradient for it: use torch.optim.SGD or torch.optim.Adam"
        )


def check_weights_optimizer(optimizer: Optimizer) -> None:
    """Raise ConfigurationError if the optimizer of the weights has a mask, or is LBFGS."""
    check_steps_once("model.optimizer", optimizer)
    if isinstance(optimizer, SparseSGDM | SparseAdamW):
        raise ConfigurationError(
            f"model.optimizer is {type(optimizer).__name__}, and {MASKS_IN_A_SEARCH}. Search with "
            "torch.optim.SGD, then mask the network that was found"
        )
