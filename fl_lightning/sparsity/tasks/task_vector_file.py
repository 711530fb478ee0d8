"""A task vector as a file: safetensors, the parameters' differences under their names."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.sparsity.tasks.task_vectors import TaskVector

_FORMAT, _VERSION = "fl_lightning task vector", "1"


def save_task_vector(task: TaskVector, path: str | Path) -> None:
    """Write a task vector to a file; folders that are missing are made.

    Example:
        >>> import tempfile
        >>> task = TaskVector({"a": torch.Size([2])}, torch.tensor([1.0, 2.0]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_task_vector(task, f"{folder}/task.safetensors")
        ...     load_task_vector(f"{folder}/task.safetensors").vector
        tensor([1., 2.])
    """
    metadata = {
        "format": _FORMAT,
        "version": _VERSION,
        "fingerprint": task.fingerprint(),
        "names": json.dumps(list(task.shapes)),
    }
    tensors = {name: tensor.clone() for name, tensor in task.tensors.items()}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path), metadata)


def load_task_vector(path: str | Path) -> TaskVector:
    """Read a task vector from a file, on the CPU.

    Raises:
        ConfigurationError: if there is no such file, it holds no task vector or one of another
            version, or its tensors are not those of its fingerprint.
    """
    where = f"task vector: the file {str(path)!r}"
    if not Path(path).is_file():
        raise ConfigurationError(f"{where} does not exist on this machine")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # a broken file fails in as many ways as there are bytes
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigurationError(f"{where} is no safetensors file ({reason})") from error
    found = metadata.get("format"), metadata.get("version")
    if found != (_FORMAT, _VERSION):
        raise ConfigurationError(
            f"{where} has format and version {found}, expected {(_FORMAT, _VERSION)}"
        )
    names = json.loads(metadata.get("names", "[]"))
    if sorted(names) != sorted(tensors) or not names:
        raise ConfigurationError(f"{where} is damaged: its tensors are not those that it names")
    shapes = {name: tensors[name].shape for name in names}
    task = TaskVector(shapes, torch.cat([tensors[name].flatten() for name in names]))
    if task.fingerprint() != metadata.get("fingerprint"):
        raise ConfigurationError(f"{where} is damaged: shapes do not belong to its fingerprint")
    return task
