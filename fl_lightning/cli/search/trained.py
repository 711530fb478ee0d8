"""A trained supernet for the command ``search``: a configuration's model with a checkpoint's weights.

It is loaded by ``validate``, so device, precision, recalibration and validation examples are the same: the score
of the largest sub-network equals ``val/accuracy``.
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

# options that a trained supernet's configuration determines
_NOT_GIVEN = ("space", "side", "in_channels", "num_classes", "channels", "cells", "images", "table")
# options of the model that determine its weights
_OF_SPACE = ("model.class_path", "model.init_args.space.", "model.init_args.rule.")


@dataclass(frozen=True, eq=False)
class Trained:
    """A supernet with its weights, ready to be scored.

    Attributes:
        networks: the supernet's networks.
        score: accuracy of a sub-network on validation examples.
        weights: path of the checkpoint if a single network can start from its weights, else None.
        run: the supernet's complete configuration.
    """

    networks: Networks
    score: SubNetworkScore
    weights: str | None
    run: Mapping[str, Any]


def look_at(given: Any, options: Sequence[str], look: Callable[[Trained], None]) -> None:
    """Load the supernet that the options of ``search`` name, and call a function with it.

    Args:
        given: parsed options of the command.
        options: further words of a fit's command line.
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
            f"ckpt_path: the run that wrote {given.ckpt_path} has left no {CONFIG} beside it: give its "
            "configuration with --config"
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
            "the data have no validation examples, and a search uses no test data: hold some out, e.g. "
            "by -- --data.init_args.source.init_args.val_fraction 0.1"
        )


class _Looking(Callback):
    """Calls a function with the supernet when ``validate`` has loaded it and is about to begin."""

    unprotected: str | None = None

    def __init__(self, run: Mapping[str, Any], look: Callable[[Trained], None]) -> None:
        super().__init__()
        self._run, self._look = run, look
        self.has_looked = False

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call the function with the loaded supernet.

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
            "model: a search scores sub-networks of a trained fl_lightning.nas.OneShot or Supernet, got "
            f"{type(module).__name__}"
        )
    broken = [name for name, p in module.named_parameters() if not bool(p.isfinite().all())]
    if broken:
        raise ConfigurationError(
            f"ckpt_path: the training of this supernet has failed: {broken[0]} is not finite"
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
            "--config names a model, and a search scores a trained one: give --ckpt_path as well"
        )
    defaults = parser_of("search").get_defaults()
    said = [name for name in _NOT_GIVEN if given[name] != defaults[name]]
    if said:
        raise ConfigurationError(
            f"{said[0]}: with --ckpt_path it is the configuration's: leave it out"
        )
    if given.score not in (None, "accuracy"):
        raise ConfigurationError(
            f"score {given.score} needs untrained networks: leave out --ckpt_path and --config. For the accuracy "
            "of the trained supernet's sub-networks, leave out --score instead"
        )


def _check_space(own: EarlierRun, run: Mapping[str, Any]) -> None:
    """Raise if the configuration's space differs from that of the run that wrote the checkpoint."""
    found = differences(own.config, run, ["model"])
    of_space = [text for text in found if text.startswith(_OF_SPACE)]
    if of_space:
        raise ConfigurationError(
            f"ckpt_path: {own.checkpoint} was trained on another space: {of_space[0]}. Search it with --config "
            f"{own.folder / CONFIG}"
        )
