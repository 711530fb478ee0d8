"""Loading of a backbone's weights from a local file: published weights, or a checkpoint of a run.

A file contains a state dict, or a dict with one under "teacher", "student", "state_dict" or "model" (the
first that exists, repeatedly), with or without the prefixes of wrappers ("module.", "backbone.",
"model.", "network."). So it may be DINO's published backbone, DINO's full training checkpoint (its teacher;
the projection head is dropped), a file of timm or torchvision, or a checkpoint of our runs.

Every tensor except the classifier's must be in the file with the right shape, and no others: a partly
loaded backbone would silently train badly. The classifier is loaded if all of it fits, otherwise it keeps
its fresh values. Position embeddings of another image size are resampled (bicubic, timm's
`resample_abs_pos_embed`); of the same size they are copied bit for bit.

Source: Caron et al. 2021, ICCV (DINO), and the layout of the files it published.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.modules import head_names

_WRAPPERS = ("teacher", "student", "state_dict", "model")
_PREFIXES = ("module.", "backbone.", "model.", "network.")
_PROJECTION_HEAD = ("head.mlp.", "head.last_layer.")  # DINO's, which only its training uses


def load_backbone(network: nn.Module, path: str) -> None:
    """Load a checkpoint file's weights into a network; those of the classifier only if their shapes fit.

    Args:
        network: a timm network, or any module; a part found by timm's `get_classifier` may differ.
        path: a ``.pth``, ``.pt`` or ``.ckpt`` file of torch, or a ``.safetensors`` file.

    Raises:
        ConfigurationError: if the file is missing, is not a state dict, or does not fit.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"module.weight": torch.ones(1, 2)}, f"{folder}/weights.pth")
        ...     network = nn.Linear(2, 1, bias=False)
        ...     load_backbone(network, f"{folder}/weights.pth")
        >>> network.weight.tolist()
        [[1.0, 1.0]]
    """
    expected = network.state_dict()
    found = {_strip(name, expected): tensor for name, tensor in read_tensors(path).items()}
    heads = tuple(f"{name}." for name in head_names(network))
    head = {name for name in found.keys() | expected.keys() if name.startswith(heads)}
    body = {
        name: tensor
        for name, tensor in found.items()
        if name not in head and not name.startswith(_PROJECTION_HEAD)
    }
    _resample_positions(network, body)
    _check(body, {name: t for name, t in expected.items() if name not in head}, path)
    ours = head & expected.keys()
    if all(name in found and found[name].shape == expected[name].shape for name in ours):
        body |= {name: found[name] for name in ours}
    network.load_state_dict(body, strict=False)


def read_tensors(path: str, option: str = "checkpoint_path") -> dict[str, Tensor]:
    """Return a checkpoint file's tensors by name; prefixes such as ``module.`` are kept.

    Args:
        path: path of a file as above.
        option: name of the option, for messages.

    Raises:
        ConfigurationError: if the file is missing, broken or not a state dict.
    """
    return _unwrap(_read(path, option), path, option)


def _read(path: str, option: str) -> Any:
    if not Path(path).is_file():
        raise ConfigurationError(
            f"{option}: there is no file {path!r}. Give the path of a .pth, .pt or "
            ".safetensors file on this machine."
        )
    try:
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file

            return load_file(path)
        # training checkpoints contain their command line: a Namespace is data and runs no code
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail with any exception
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigurationError(
            f"{option}: {path!r} could not be read as a file of tensors "
            f"({reason}). Give a state dict saved by torch.save or safetensors."
        ) from error


def _unwrap(content: Any, path: str, option: str) -> dict[str, Tensor]:
    """Return the state dict inside a loaded checkpoint file, which may nest it under keys such as ``model``."""
    wrapped = True
    while wrapped and isinstance(content, Mapping):
        inner = [content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)]
        wrapped = bool(inner)
        content = inner[0] if wrapped else content
    is_mapping = isinstance(content, Mapping) and bool(content)
    if not is_mapping or not all(isinstance(value, Tensor) for value in content.values()):
        held = f"a dict of {_some(map(str, content))}" if is_mapping else type(content).__name__
        raise ConfigurationError(
            f"{option}: {path!r} is not a state dict (a mapping of names to tensors): it holds {held}. "
            f"A state dict may also be in it under {', '.join(_WRAPPERS)}."
        )
    return {str(name): tensor for name, tensor in content.items()}


def _strip(name: str, expected: Mapping[str, Tensor]) -> str:
    """Remove prefixes such as ``module.`` from a tensor's name until the network has a tensor of that name."""
    while name not in expected and name.startswith(_PREFIXES):
        name = name.partition(".")[2]
    return name


def _resample_positions(network: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Resample a vision transformer's position embeddings (1, tokens, width) to the network's image size."""
    ours, theirs = getattr(network, "pos_embed", None), tensors.get("pos_embed")
    if not isinstance(ours, Tensor) or theirs is None or ours.shape == theirs.shape:
        return
    grid = getattr(getattr(network, "patch_embed", None), "grid_size", None)
    embeds_class = not getattr(network, "no_embed_class", False)
    num_prefix_tokens = int(getattr(network, "num_prefix_tokens", 1)) if embeds_class else 0
    is_table = theirs.ndim == 3 and theirs.shape[-1] == ours.shape[-1]
    num_patches = theirs.shape[1] - num_prefix_tokens if is_table else 0
    if grid is None or num_patches < 1 or math.isqrt(num_patches) ** 2 != num_patches:
        return  # no square grid of patches of our width: the check of shapes reports it
    from timm.layers.pos_embed import resample_abs_pos_embed

    tensors["pos_embed"] = resample_abs_pos_embed(
        theirs, new_size=list(grid), num_prefix_tokens=num_prefix_tokens
    )


def _check(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: str) -> None:
    """Raise ConfigurationError if names or shapes of a file's tensors differ from the network's."""
    differing = [
        f"{name} {tuple(found[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in expected
        if name in found and found[name].shape != expected[name].shape
    ]
    issues = {
        "missing": [name for name in expected if name not in found],
        "of another shape": differing,
        "unexpected": [name for name in found if name not in expected],
    }
    told = [f"{len(names)} {kind}: {_some(names)}" for kind, names in issues.items() if names]
    if told:
        raise ConfigurationError(
            f"checkpoint_path: {path!r} does not fit the network; {'; '.join(told)}. Give the file "
            "of the same architecture, or change network, in_chans and network_kwargs to the file's."
        )


def _some(names: Iterable[str], most: int = 3) -> str:
    every = list(names)
    return ", ".join(every[:most]) + (", …" if len(every) > most else "")
