"""Loads a trained supernet for the command ``search``: a configuration's model with a checkpoint's weights.

The supernet is loaded as by ``validate``, with the same device, precision, recalibration and validation examples: the
score of the largest sub-network equals ``val/accuracy``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from fl_lightning.cli.commands import parser_of, resolve, run_lightning
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation import CONFIG, EarlierRun, differences, run_of, visiting
from fl_lightning.nas.one_shot import OneShot
from fl_lightning.nas.spaces.space import Networks
from fl_lightning.nas.sub_networks.evaluation import SubNetworkScore, TrainingExamples
from fl_lightning.nas.supernet import Supernet

# options of the command that the configuration of a trained supernet determines
_NOT_GIVEN = ("space", "side", "in_channels", "num_classes", "channels", "cells", "images", "table")
# options of the model that determine the meaning of its weights
_OF_SPACE = ("model.class_path", "model.init_args.space.", "model.init_args.rule.")


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained supernet whose sub-networks can be scored.

    Attributes:
        networks: the supernet's networks.
        score: accuracy of a sub-network on validation examples.
        weights: path of the checkpoint if a single network can be initialised from it, else None.
        run: the supernet's complete configuration.
    """

    networks: Networks
    score: SubNetworkScore
    weights: str | None
    run: Mapping[str, Any]


def look_at(given: Any, options: Sequence[str], look: Callable[[Trained], None]) -> None:
    """Load the trained supernet that the options of ``fl-lightning search`` name, and pass it to a function.

    Args:
        given: parsed options of the command.
        options: words after ``--``: options of the supernet's configuration.
        look: function that is called once, with the loaded supernet.

    Raises:
        ConfigurationError: if there is no such supernet, or there are no validation examples.
    """
    _check_options(given)
    if not Path(given.ckpt_path).is_file():
        raise ConfigurationError(f"ckpt_path: there is no file {given.ckpt_path!r}")
    own = run_of(Path(given.ckpt_path))
    files = given.config or ([] if own is None else [str(own.folder / CONFIG)])
    if not files:
        raise ConfigurationError(
            f"ckpt_path: there is no {CONFIG} in the folder above {given.ckpt_path}: give the configuration of its "
            "run with --config"
        )
    words = [word for path in files for word in ("--config", path)]
    run = yaml.safe_load(resolve([*words, *options]))
    if own is not None:
        _check_space(own, run)
    looking = _Looking(run, look)
    here = [
        *("--trainer.devices=1", "--trainer.strategy=auto", "--trainer.num_nodes=1"),
        *("--trainer.logger=false", "--trainer.enable_progress_bar=false", "--verbose=false"),
    ]
    try:
        words = ["validate", *words, *options, f"--ckpt_path={given.ckpt_path}", *here]
        run_lightning(words, [looking], keeps_configuration=False)
    except RuntimeError as error:
        if not str(error).startswith("Error(s) in loading state_dict"):
            raise
        raise ConfigurationError(
            f"ckpt_path: {given.ckpt_path} belongs to another model or space than the configuration's "
            "model: give --config the config.yaml of the run that wrote it"
        ) from error
    if not looking.has_looked:
        raise ConfigurationError(
            "data: a search needs validation examples, but there are none: hold some out, e.g. with -- "
            "--data.init_args.source.init_args.val_fraction 0.1"
        )


class _Looking(Callback):
    """Callback that passes the loaded supernet to a function when ``validate`` starts."""

    unprotected: str | None = None

    def __init__(self, run: Mapping[str, Any], look: Callable[[Trained], None]) -> None:
        super().__init__()
        self._run, self._look = run, look
        self.has_looked = False

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pass the loaded supernet to the function.

        Raises:
            ConfigurationError: if the model is no supernet, or a weight is not finite.
        """
        self.has_looked = True
        module: Any = pl_module
        _check_module(module)
        with visiting(trainer, "validation", mode="eval") as visit:
            score = SubNetworkScore(
                module,
                lambda: map(visit.prepared, _training_batches(trainer, module)),
                lambda: map(visit.prepared, _validation_batches(trainer)),
                trainer.precision_plugin.forward_context,
            )
            weights = str(trainer.ckpt_path) if isinstance(module, OneShot) else None
            self._look(Trained(module.networks, score, weights, self._run))


def _check_module(module: LightningModule) -> None:
    if not isinstance(module, OneShot | Supernet):
        raise ConfigurationError(
            "model must be a trained fl_lightning.nas.OneShot or Supernet, whose sub-networks are scored, got "
            f"{type(module).__name__}"
        )
    broken = [name for name, p in module.named_parameters() if not bool(p.isfinite().all())]
    if broken:
        raise ConfigurationError(
            f"ckpt_path: the weight {broken[0]} of the supernet is not finite, so its training has failed: give "
            "another checkpoint"
        )


def _training_batches(trainer: Trainer, module: OneShot | Supernet) -> Iterator[Any]:
    most = module.recalibration_examples
    examples = TrainingExamples.of(trainer, max_examples=most, seed=module.seed)
    if examples is None:
        return iter(())
    return (
        batch for owner in range(len(examples.owners.shards)) for batch in examples.batches(owner)
    )


def _validation_batches(trainer: Trainer) -> Iterator[Any]:
    loaders: Any = trainer.val_dataloaders
    loaders = loaders if isinstance(loaders, list | tuple) else [loaders]
    for loader, most in zip(loaders, trainer.num_val_batches, strict=True):
        yield from islice(loader, None if most == math.inf else int(most))


def _check_options(given: Any) -> None:
    if given.ckpt_path is None:
        raise ConfigurationError(
            "ckpt_path: a search with --config needs the trained supernet: give --ckpt_path as well"
        )
    defaults = parser_of("search").get_defaults()
    said = [name for name in _NOT_GIVEN if given[name] != defaults[name]]
    if said:
        raise ConfigurationError(
            f"{said[0]}: with --ckpt_path, the supernet's configuration sets it: leave --{said[0]} out"
        )
    if given.score not in (None, "accuracy"):
        raise ConfigurationError(
            f"score: {given.score} needs untrained networks: leave out --ckpt_path and --config; or leave out "
            "--score, to score the sub-networks of the trained supernet by their accuracy"
        )


def _check_space(own: EarlierRun, run: Mapping[str, Any]) -> None:
    """Raise ConfigurationError if the configuration's search space differs from that of the checkpoint's run."""
    found = differences(own.config, run, ["model"])
    of_space = [text for text in found if text.startswith(_OF_SPACE)]
    if of_space:
        raise ConfigurationError(
            f"ckpt_path: {own.checkpoint} was trained on another search space ({of_space[0]}). Give the "
            f"configuration of its training: --config {own.folder / CONFIG}"
        )
