"""Which parameters of a module may be masked at all.

By default weights and biases of linear, attention, convolution and norm layers of the backbone.
Embeddings (of patches, positions, classes) and the classifier are left out.

Source: Iurada et al. 2025, ICLR (TaLoS), appendix A: Linear, Attention, LayerNorm and Conv layers;
embeddings and the final projection are frozen.
Differs: batch norm and the other norms belong to it too, so that convolutional networks do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.heads import head_names
from fl_lightning.sparsity.masks.mask import some

_LAYERS = (
    nn.Linear,
    nn.Bilinear,
    nn.MultiheadAttention,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
# Other libraries' layers are known by their names: timm's RmsNorm, BatchNormAct2d, EvaAttention, …
_LAYER_WORDS = ("norm", "attention")
_EMBEDDING_WORDS = ("embed", "token", "position", "rel_pos")


def maskable_names(
    module: nn.Module,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
) -> list[str]:
    """Return the names of the parameters that a mask may cover, in the module's order.

    Only parameters that train (``requires_grad``) are among them. The classifier is what timm's
    `get_classifier` returns, of the module or of a network inside it; a module without one needs
    ``exclude`` to keep its last layer out of the mask.

    Args:
        module: any module.
        include: instead of the default layers, all parameters whose names match one of these
            patterns (`fnmatch`: ``*`` matches dots as well).
        exclude: without those that match one of these.

    Raises:
        ConfigurationError: if a pattern matches no parameter, or nothing is left.

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
    if not chosen:
        raise ConfigurationError(
            f"of the {len(trained)} parameters of {type(module).__name__} that train none may be "
            f"masked: {some(trained)}. Name them with include."
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
        raise ConfigurationError(f"{option} is a list of patterns, got {patterns!r}: write a list")
    if idle := [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]:
        raise ConfigurationError(
            f"{option}: {some(idle)} matches no parameter"
            f"{' that trains' if option == 'include' else ''}; there are {some(names)}"
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
