"""The command ``fl-lightning export``: saves the model of a checkpoint in a format that other programs read.

The module is built from the ``config.yaml`` that the run has saved beside the checkpoint; no data are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt
from lightning.pytorch import LightningModule

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation import CONFIG, check_checkpoint, run_of


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command to a parser."""
    parser.add_argument("--ckpt_path", type=str, required=True, help="The checkpoint of a run.")
    for name, text in (
        ("adapter", "A new folder for the adapters of a CausalLM, which peft loads."),
        ("state_dict", "A new file for the whole module's weights, which torch.load reads."),
        ("program", "A new .pt2 file for the module as a program, which torch.export.load reads."),
        ("onnx", "A new .onnx file for the module as a program of ONNX (extra onnx)."),
    ):
        parser.add_argument(f"--{name}", type=str | None, default=None, help=text)
    parser.add_argument(
        "--input_shape",
        type=list[PositiveInt] | None,
        default=None,
        help="For --program and --onnx: shape of one input without the batch, as [1,28,28]. If null "
        "that of the module's example_input_array.",
    )


def export(given: Any) -> None:
    """Run the command with its parsed options.

    Raises:
        ConfigurationError: if an option is refused.
    """
    targets = [given[name] for name in _WRITERS if given[name] is not None]
    if not targets:
        raise ConfigurationError(
            "export: give --adapter FOLDER, --state_dict FILE, --program FILE or --onnx FILE"
        )
    for target in targets:
        if Path(target).exists():
            raise ConfigurationError(f"export: {target} exists: name another, or remove it")
    module = trained_module(Path(given.ckpt_path))
    for name, write in _WRITERS.items():
        if given[name] is not None:
            write(module, given[name], given.input_shape)
    print("\n".join(f"{target} is written" for target in targets))


def _write_adapter(module: LightningModule, target: str, shape: Any) -> None:
    save = getattr(module, "save_adapter", None)
    if save is None:
        raise ConfigurationError(
            f"export --adapter: {type(module).__name__} is no CausalLM and has no save_adapter"
        )
    save(target)


def _write_onnx(module: LightningModule, target: str, shape: Any) -> None:
    if find_spec("onnx") is None or find_spec("onnxscript") is None:
        raise ConfigurationError("export --onnx needs ONNX: pip install 'fl-lightning[onnx]'")
    program = torch.onnx.export(_program(module, shape), dynamo=True, verbose=False)
    assert program is not None
    program.save(target)


def _program(module: LightningModule, shape: Sequence[int] | None) -> torch.export.ExportedProgram:
    """Return the program of a module's ``forward`` for batches of any size."""
    example = module.example_input_array if shape is None else torch.zeros(2, *shape)
    if not isinstance(example, torch.Tensor):
        raise ConfigurationError(
            f"export: {type(module).__name__} has no example_input_array: give --input_shape, the shape "
            "of one input without the batch, such as [1,28,28]"
        )
    example = example[:1].expand(2, *example.shape[1:])  # a batch of one would stay of that size
    batch = {0: torch.export.Dim("batch")}
    return torch.export.export(module, (example,), dynamic_shapes=(batch,))


_WRITERS: dict[str, Callable[[LightningModule, str, Any], None]] = {
    "adapter": _write_adapter,
    "state_dict": lambda module, target, shape: torch.save(module.state_dict(), target),
    "program": lambda module, target, shape: torch.export.save(_program(module, shape), target),
    "onnx": _write_onnx,
}


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
