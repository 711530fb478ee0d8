"""The command ``fl-lightning export``: saves the model of a checkpoint in a format that other programs read.

The module is built from the ``config.yaml`` in the folder of the checkpoint's run; no data are needed.
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

from fl_lightning.cli.checks import check_writable
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation import CONFIG, check_checkpoint, run_of


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fl-lightning export`` to its parser."""
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
    """Run ``fl-lightning export``, which writes a checkpoint's module to a file in another format."""
    targets = {name: Path(given[name]) for name in _WRITERS if given[name] is not None}
    if not targets:
        raise ConfigurationError(
            "export: give --adapter FOLDER, --state_dict FILE, --program FILE or --onnx FILE"
        )
    for name, target in targets.items():
        if target.exists():
            raise ConfigurationError(
                f"export --{name}: {target} exists: name another path, or remove it"
            )
        check_writable(f"export --{name}", target, is_folder=name == "adapter")
    module = trained_module(Path(given.ckpt_path))
    for name, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        _WRITERS[name](module, given[name], given.input_shape)
    print("\n".join(f"{given[name]} is written" for name in targets))


def _write_adapter(module: LightningModule, target: str, shape: Any) -> None:
    save = getattr(module, "save_adapter", None)
    if save is None:
        raise ConfigurationError(
            f"export --adapter: the model must be a CausalLM or have a method save_adapter, got "
            f"{type(module).__name__}: use --state_dict for its weights"
        )
    save(target)


def _write_onnx(module: LightningModule, target: str, shape: Any) -> None:
    if find_spec("onnx") is None or find_spec("onnxscript") is None:
        raise ConfigurationError("export --onnx needs ONNX: pip install 'fl-lightning[onnx]'")
    made = program_of(module, shape)
    try:
        program = torch.onnx.export(made, dynamo=True, verbose=False)
    except RuntimeError as error:  # an operator that ONNX does not have
        raise ConfigurationError(
            f"export --onnx: torch.onnx cannot translate {type(module).__name__}: {_first_line(error)}. "
            "Use other operators in its forward, or export --program"
        ) from error
    assert program is not None
    program.save(target)


def program_of(
    module: LightningModule, shape: Sequence[int] | None
) -> torch.export.ExportedProgram:
    """Trace a module's ``forward`` by torch.export, and return the program, which accepts batches of any size."""
    name = type(module).__name__
    example = module.example_input_array if shape is None else torch.zeros(2, *shape)
    if not isinstance(example, torch.Tensor) or not example.ndim:
        what = f"{name} has no example_input_array"
        if example is not None:
            kind = type(example).__name__
            what = f"example_input_array of {name} must be a batch as one tensor, got a {kind}"
            what += " without dimensions" if isinstance(example, torch.Tensor) else ""
        raise ConfigurationError(
            f"export: {what}: give --input_shape, the shape of one input without the batch, such as "
            "[1,28,28]"
        )
    example = example[:1].expand(2, *example.shape[1:])  # torch.export would fix a batch size of 1
    batch = {0: torch.export.Dim("batch")}
    try:
        return torch.export.export(module, (example,), dynamic_shapes=(batch,))
    except Exception as error:  # of torch.export, or whatever the module's forward raises
        given = "example_input_array" if shape is None else f"--input_shape {list(shape)}"
        raise ConfigurationError(
            f"export: torch.export cannot trace {name} by {given}, inputs of {example.dtype} and shape "
            f"{list(example.shape)}: {_first_line(error)}. Its forward must accept one such tensor with batches "
            "of any size, and must not branch on values. If it needs whole numbers, set its "
            "example_input_array to a tensor of whole numbers, and leave --input_shape out"
        ) from error


def _first_line(error: Exception) -> str:
    """Return the first line of an error of PyTorch, without its hints for developers."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return line.partition(" For more information")[0].rstrip(".!")


_WRITERS: dict[str, Callable[[LightningModule, str, Any], None]] = {
    "adapter": _write_adapter,
    "state_dict": lambda module, target, shape: torch.save(module.state_dict(), target),
    "program": lambda module, target, shape: torch.export.save(program_of(module, shape), target),
    "onnx": _write_onnx,
}


def trained_module(checkpoint: Path) -> LightningModule:
    """Build a checkpoint's module from its run's configuration, load the weights, and return it in evaluation mode.

    Raises:
        ConfigurationError: if there is no such checkpoint, or its run has no configuration.
    """
    check_checkpoint(checkpoint)
    run = run_of(checkpoint)
    if run is None:
        raise ConfigurationError(
            f"ckpt_path: there is no {CONFIG} in the folder above {checkpoint}: build the module in Python, and "
            "load the checkpoint's state_dict"
        )
    parser: Any = ArgumentParser()
    parser.add_subclass_arguments(LightningModule, "model")
    found = parser.instantiate_classes(parser.parse_object({"model": run.config["model"]}))
    module: LightningModule = found.model
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    module.on_load_checkpoint(state)
    module.load_state_dict(state["state_dict"])
    return module.eval()
