"""Task arithmetic: the change by fine-tuning as a vector that can be added, scaled and subtracted.

    τ = θ_fine-tuned - θ_pretrained
    addition:  θ = θ_pretrained + Σ_t λ_t τ_t         several tasks in one model
    negation:  θ = θ_pretrained - λ τ                 a task forgotten

Source: Ilharco et al. 2023, ICLR, sections 2 to 4. A file of a task vector is a container
(`fl_lightning.core.container`, a safetensors file) with the parameters' differences under their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fl_lightning.core.container import read, write
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.plain_json import MessageError, fields_of
from fl_lightning.core.space import Space
from fl_lightning.sparsity.masks.mask import Mask, some


class TaskVector:
    """Task vector: fine-tuned minus pretrained parameters of a model, as one vector of shape (k,).

    It is made by `between`, `merge` or `load_task_vector`; sums and multiples are new task vectors. Buffers,
    such as the statistics of batch norm, are not included.

    Args:
        shapes: shapes of the parameters by name, in the order of the vector.
        vector: the differences, shape (k,).

    Raises:
        ConfigurationError: if the vector has another length.

    Example:
        >>> start, end = nn.Linear(1, 1), nn.Linear(1, 1)
        >>> task = TaskVector.between(start, end)
        >>> task.apply_to(start)
        >>> bool(torch.allclose(start.weight, end.weight))
        True
        >>> (task - task).vector.tolist()
        [0.0, 0.0]
    """

    def __init__(self, shapes: dict[str, torch.Size], vector: Tensor) -> None:
        size = sum(shape.numel() for shape in shapes.values())
        if vector.shape != (size,):
            raise ConfigurationError(
                f"a task vector of {some(list(shapes))} must have the shape ({size},), got "
                f"{tuple(vector.shape)}"
            )
        self.shapes = dict(shapes)
        self.vector = vector

    @classmethod
    def between(
        cls, pretrained: nn.Module, fine_tuned: nn.Module, *, names: Sequence[str] | None = None
    ) -> TaskVector:
        """Return the task vector of two models: the parameters of ``fine_tuned`` minus ``pretrained``.

        Args:
            pretrained: the model before training.
            fine_tuned: the model after training.
            names: names of the parameters to compare, e.g. all but a head that differs; None for all.

        Raises:
            ConfigurationError: if one of the modules lacks a parameter, or shapes differ.
        """
        chosen = [name for name, _ in fine_tuned.named_parameters()] if names is None else names
        start, end = _space(pretrained, chosen), _space(fine_tuned, chosen)
        shapes = {name: p.shape for name, p in end.named_views(end.read()).items()}
        if start.fingerprint() != end.fingerprint():
            own = dict(pretrained.named_parameters())
            differing = [name for name, shape in shapes.items() if own[name].shape != shape]
            raise ConfigurationError(
                f"the two models differ in the shapes of {some(differing)}: name the parameters to compare in names"
            )
        return cls(shapes, end.read() - start.read().to(end.device))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The task vector split by parameter: differences by name, in the parameters' shapes."""
        parts = self.vector.split([shape.numel() for shape in self.shapes.values()])
        return {n: part.view(s) for (n, s), part in zip(self.shapes.items(), parts, strict=True)}

    def fingerprint(self) -> str:
        """Return a hash of the parameters' names and shapes, to check that two task vectors match."""
        return Space(self.tensors).fingerprint()

    def support(self) -> Mask:
        """Return the mask of the nonzero entries: those that fine-tuning has changed."""
        return Mask({name: tensor != 0 for name, tensor in self.tensors.items()})

    def apply_to(self, module: nn.Module, scale: float = 1.0) -> None:
        """Add ``scale`` times the task vector to a module's parameters, in place.

        Raises:
            ConfigurationError: if the module lacks parameters or has other shapes; it does not change then.
        """
        space = _space(module, list(self.shapes))
        if space.fingerprint() != self.fingerprint():
            own = dict(module.named_parameters())
            differing = [name for name, shape in self.shapes.items() if own[name].shape != shape]
            raise ConfigurationError(
                f"the task vector does not fit {type(module).__name__}: the shapes of {some(differing)} differ: give "
                "the architecture from which it was made"
            )
        space.write(space.read().add_(self.vector.to(space.device, space.dtype), alpha=scale))

    def __add__(self, other: TaskVector) -> TaskVector:
        """Return the sum of two tasks."""
        return merge([self, other])

    def __sub__(self, other: TaskVector) -> TaskVector:
        """Return the difference of two tasks."""
        return merge([self, other], weights=[1.0, -1.0])

    def __mul__(self, scale: float) -> TaskVector:
        """Return the task times a number."""
        return TaskVector(self.shapes, self.vector * scale)

    __rmul__ = __mul__

    def __neg__(self) -> TaskVector:
        """Return the negated task vector, which makes a model forget the task."""
        return TaskVector(self.shapes, -self.vector)

    def __repr__(self) -> str:
        return f"TaskVector({len(self.shapes)} tensors, {self.vector.numel():,} entries)"


def merge(tasks: Iterable[TaskVector], weights: Sequence[float] | None = None) -> TaskVector:
    """Merge tasks: return the weighted sum of their task vectors.

    Args:
        tasks: at least one, all over the same parameters.
        weights: one weight per task; None for the plain sum.

    Raises:
        ConfigurationError: if there is no task, names or shapes differ, or the number of weights is
            wrong.

    Example:
        >>> one, other = (TaskVector({"a": torch.Size([1])}, torch.ones(1) * n) for n in (1, 2))
        >>> merge([one, other], weights=[0.5, 0.25]).vector
        tensor([1.])
    """
    tasks = list(tasks)
    weights = [1.0] * len(tasks) if weights is None else weights
    if not tasks or len(weights) != len(tasks):
        raise ConfigurationError(
            f"merge needs at least one task vector, and one weight per vector, got {len(tasks)} vectors and "
            f"{len(weights)} weights"
        )
    total = tasks[0].vector * weights[0]
    for task, weight in zip(tasks[1:], weights[1:], strict=True):
        check_same_parameters(tasks[0], task)
        total += task.vector.to(total.device) * weight
    return TaskVector(tasks[0].shapes, total)


def check_same_parameters(one: TaskVector, other: TaskVector) -> None:
    """Raise ConfigurationError if two task vectors have different parameters, or another order."""
    if list(one.shapes.items()) != list(other.shapes.items()):
        names = one.shapes.keys() | other.shapes.keys()
        differing = sorted(n for n in names if one.shapes.get(n) != other.shapes.get(n))
        raise ConfigurationError(
            f"task vectors must be of the same parameters, and these differ in {some(differing) or 'their order'}"
        )


def _space(module: nn.Module, names: Sequence[str]) -> Space:
    own = dict(module.named_parameters())
    if missing := [name for name in names if name not in own]:
        raise ConfigurationError(f"{type(module).__name__} has no parameters {some(missing)}")
    return Space({name: own[name] for name in names})


def save_task_vector(task: TaskVector, path: str | Path) -> None:
    """Write a task vector to a file; missing folders are created.

    Example:
        >>> import tempfile
        >>> task = TaskVector({"a": torch.Size([2])}, torch.tensor([1.0, 2.0]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_task_vector(task, f"{folder}/task.safetensors")
        ...     load_task_vector(f"{folder}/task.safetensors").vector
        tensor([1., 2.])
    """
    about = {"fingerprint": task.fingerprint(), "names": list(task.shapes)}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(write("task vector", about, task.tensors))


def load_task_vector(path: str | Path) -> TaskVector:
    """Read a task vector from a file, on the CPU.

    Raises:
        ConfigurationError: if the file does not exist, is no task vector, or is damaged.
    """
    where = f"task vector: the file {str(path)!r}"
    if not Path(path).is_file():
        raise ConfigurationError(f"{where} does not exist on this machine")
    try:
        fields, tensors = read(Path(path).read_bytes(), "task vector")
        about = fields_of(fields, ("fingerprint", "names"), "a task vector")
    except MessageError as error:
        raise ConfigurationError(f"{where} is no file of a task vector ({error})") from error
    names = about["names"]
    is_list = isinstance(names, list) and all(type(name) is str for name in names)
    if not is_list or sorted(names) != sorted(tensors) or not names:
        raise ConfigurationError(f"{where} is damaged: its tensors do not match its list of names")
    shapes = {name: tensors[name].shape for name in names}
    task = TaskVector(shapes, torch.cat([tensors[name].flatten() for name in names]))
    if task.fingerprint() != about["fingerprint"]:
        raise ConfigurationError(f"{where} is damaged: its shapes do not match its fingerprint")
    return task
