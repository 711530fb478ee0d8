"""Names of the parameters that a mask may cover, and freezing of parameters without an entry that trains.

By default a mask covers weights and biases of linear, attention, convolution and norm layers of the backbone,
but not embeddings (of patches, positions, classes) and the classifier.

Source: Iurada et al. 2025, ICLR (TaLoS), appendix A: Linear, Attention, LayerNorm and Conv layers;
embeddings and the final projection are frozen.
Differs: batch norm and other norms are included, for convolutional networks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.modules import head_names
from fl_lightning.sparsity.masks.mask import some

_LAYERS = (
    nn.Linear,
    nn.Bilinear,
    nn.MultiheadAttention,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
# Layers of other libraries are recognised by name: timm's RmsNorm, BatchNormAct2d, EvaAttention, …
_LAYER_WORDS = ("norm", "attention")
_EMBEDDING_WORDS = ("embed", "token", "position", "rel_pos")


def maskable_names(
    module: nn.Module,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
) -> list[str]:
    """Return the names of the parameters that a mask may cover, in the module's order.

    They are trainable (``requires_grad``). The classifier is the layer that a method `get_classifier` of the
    module, or of a network inside it, returns, as in timm; for other modules name it in ``exclude``.

    Args:
        module: any module.
        include: patterns of names, instead of the default layers (`fnmatch`: ``*`` matches dots too).
        exclude: patterns of names to leave out.

    Raises:
        ConfigurationError: if a pattern matches no parameter, or no parameter is left.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2))
        >>> maskable_names(network, exclude=["2.*"])
        ['0.weight', '0.bias', '1.weight', '1.bias']
    """
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    if include is None:
        layers, heads = set(_in_layers(module)), tuple(f"{n}." for n in head_names(module))
        chosen = [n for n in trained if n in layers and not n.startswith(heads)]
    else:
        _check_patterns("include", include, trained)
        chosen = [name for name in trained if _matches(name, include)]
    _check_patterns("exclude", exclude, [name for name, _ in module.named_parameters()])
    chosen = [name for name in chosen if not _matches(name, exclude)]
    if not trained:
        raise ConfigurationError(
            f"{type(module).__name__} has no trainable parameters to mask: unfreeze those to train"
        )
    if not chosen:
        raise ConfigurationError(
            f"no parameter of {type(module).__name__} is left for a mask; its {len(trained)} trainable parameters "
            f"are {some(trained)}: name those to mask in include"
        )
    return chosen


def _in_layers(module: nn.Module) -> Iterator[str]:
    for layer_name, layer in module.named_modules():
        kind = type(layer).__name__.lower()
        if isinstance(layer, _LAYERS) or any(word in kind for word in _LAYER_WORDS):
            for name, _ in layer.named_parameters(layer_name, recurse=False):
                if not any(word in name.lower() for word in _EMBEDDING_WORDS):
                    yield name


def _check_patterns(option: str, patterns: Sequence[str], names: list[str]) -> None:
    if isinstance(patterns, str):
        raise ConfigurationError(
            f"{option} must be a list of patterns, got {patterns!r}: write [{patterns!r}]"
        )
    if idle := [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]:
        raise ConfigurationError(
            f"{option}: {some(idle)} matches no parameter"
            f"{' that trains' if option == 'include' else ''}; there are {some(names)}"
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def freeze_masked(module: nn.Module, masks: Mapping[str, Tensor]) -> list[str]:
    """Disable gradients of parameters of which no entry trains (mask all False); return their names.

    If these are the first layers of a network, the backward pass ends above them. Before you set a
    mask by which some of them train again, enable their gradient with ``requires_grad_(True)``.

    Args:
        module: module, whose parameters are changed in place.
        masks: masks by parameter name, True for entries that train.

    Raises:
        ValueError: if a name is no parameter of the module.

    Example:
        >>> import torch
        >>> layer = nn.Linear(2, 1)
        >>> freeze_masked(layer, {"weight": torch.tensor([[False, False]])})
        ['weight']
        >>> layer.weight.requires_grad, layer.bias.requires_grad
        (False, True)
    """
    params = dict(module.named_parameters())
    unknown = [name for name in masks if name not in params]
    if unknown:
        raise ValueError(f"masks: the module has no parameter {', '.join(unknown[:3])}")
    frozen = [name for name, mask in masks.items() if not bool(mask.any())]
    for name in frozen:
        params[name].requires_grad_(False)
        params[name].grad = None
    return frozen
