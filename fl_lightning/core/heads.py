"""Where a network's classifier is: what timm calls `get_classifier`, found inside any module."""

from __future__ import annotations

from torch import nn


def head_names(module: nn.Module) -> list[str]:
    """Return the names of the classifier modules: usually one, none where nobody can tell.

    Args:
        module: a network with timm's `get_classifier`, or a module that holds such networks.

    Example:
        >>> class Network(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)
        ...     def get_classifier(self):
        ...         return self.head
        >>> head_names(Network()), head_names(nn.ModuleDict({"network": Network()}))
        (['head'], ['network.head'])
    """
    get_classifier = getattr(module, "get_classifier", None)
    if get_classifier is None:
        inner = [(name, head_names(child)) for name, child in module.named_children()]
        return [f"{name}.{head}" for name, heads in inner for head in heads]
    classifier = get_classifier()
    heads = classifier if isinstance(classifier, (tuple, list)) else (classifier,)
    return [name for name, part in module.named_modules() if any(part is head for head in heads)]
