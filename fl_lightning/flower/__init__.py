"""Training over a real network, through Flower.

What a process of Flower's imports for every message must be light: names are imported when first
asked for (PEP 562), and those of an app need neither PyTorch nor Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_lightning.flower.transport.apps import make_client_app, make_server_app
    from fl_lightning.flower.transport.channel import Channel

__all__ = ["Channel", "make_client_app", "make_server_app"]

_MODULES = {
    "Channel": "fl_lightning.flower.transport.channel",
    "make_client_app": "fl_lightning.flower.transport.apps",
    "make_server_app": "fl_lightning.flower.transport.apps",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
