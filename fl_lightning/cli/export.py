"""The command ``fl-lightning export``: saves the model of a checkpoint in a format that other programs read.

The module is built from the ``config.yaml`` that the run has saved beside the checkpoint; no data are needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation import CONFIG, check_checkpoint, run_of


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command to a parser."""
    parser.add_argument("--ckpt_path", type=str, required=True, help="The checkpoint of a run.")
    parser.add_argument(
        "--adapter",
        type=str | None,
        default=None,
        help="A new folder for the adapters of a CausalLM, which peft loads.",
    )
    parser.add_argument(
        "--state_dict",
        type=str | None,
        default=None,
        help="A new file for the whole module's weights, which torch.load reads.",
    )


def export(given: Any) -> None:
    """Run the command with its parsed options.

    Raises:
        ConfigurationError: if an option is refused.
    """
    targets = [target for target in (given.adapter, given.state_dict) if target is not None]
    if not targets:
        raise ConfigurationError("export: give --adapter FOLDER or --state_dict FILE")
    for target in targets:
        if Path(target).exists():
            raise ConfigurationError(f"export: {target} exists: name another, or remove it")
    module = trained_module(Path(given.ckpt_path))
    if given.adapter is not None:
        save = getattr(module, "save_adapter", None)
        if save is None:
            raise ConfigurationError(
                f"export --adapter: {type(module).__name__} is no CausalLM and has no save_adapter"
            )
        save(given.adapter)
    if given.state_dict is not None:
        torch.save(module.state_dict(), given.state_dict)
    print("\n".join(f"{target} is written" for target in targets))


def trained_module(checkpoint: Path) -> LightningModule:
    """Return the module of a checkpoint, built from the run's configuration, in evaluation mode.

    Raises:
        ConfigurationError: if there is no such checkpoint, or no configuration of its run.
    """
    check_checkpoint(checkpoint)
    run = run_of(checkpoint)
    if run is None:
        raise ConfigurationError(
            f"ckpt_path: the run that wrote {checkpoint} has left no {CONFIG} beside it: make the module "
            "in Python and load the checkpoint's state_dict"
        )
    parser: Any = ArgumentParser()
    parser.add_subclass_arguments(LightningModule, "model")
    found = parser.instantiate_classes(parser.parse_object({"model": run.config["model"]}))
    module: LightningModule = found.model
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    module.on_load_checkpoint(state)
    module.load_state_dict(state["state_dict"])
    return module.eval()
