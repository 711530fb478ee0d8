"""The two apps that Flower runs: at a site one that hands bytes on, at the server one that trains.

At a site every message has a process of its own, forked from one that imports this file, which must be
light: neither PyTorch nor Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.transport.channel import Channel, Lost, ask, status
from fl_lightning.flower.transport.carried import packed, unpacked

try:
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
except ImportError as error:
    raise ConfigurationError("a network needs Flower: install fl-lightning[flower]") from error

Options = Mapping[str, bool | int | float | str]
Run = Callable[[Channel, Options, Path], None]


def make_client_app() -> ClientApp:
    """Return a site's app, which hands orders to the site's resident process."""
    app = ClientApp()
    app.train()(_forward)
    app.query()(_introduce)
    return app


def make_server_app(run: Run | str, folder: Path) -> ServerApp:
    """Return the server's app.

    Args:
        run: trains over a channel, given the run's options and the app's folder; ``module:function``.
        folder: of the app, with what came along with it.
    """
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        from fl_lightning.flower.transport.grid import GridChannel, registered_names, turn

        given = run
        if isinstance(given, str):
            module, _, name = given.partition(":")
            given = getattr(import_module(module), name)
        options = {k: v for k, v in context.run_config.items() if not isinstance(v, bytes)}
        channel = GridChannel(grid, registered_names())
        with turn(channel, options):
            given(channel, options, folder)

    app.main()(main)
    return app


def _forward(message: Message, context: Context) -> Message:
    """Pass an order to the resident process, and return its answer.

    Nothing is raised here: Flower would send the error's text to the server.
    """
    order = unpacked(message.content)
    answer: bytes | Lost
    if order is None:
        answer = Lost("its app failed")
    else:
        answer = ask(Path(str(context.node_config["socket"])), order, message.metadata.ttl)
    if isinstance(answer, Lost):
        content = RecordDict({"lost": ConfigRecord({"category": answer.category})})
    else:
        content = packed(answer)
    return Message(content, reply_to=message)


def _introduce(message: Message, context: Context) -> Message:
    """Say which site this is, and what its resident process does, which need not wake up for it."""
    told = status(Path(str(context.node_config["socket"]))) or {"state": "not there"}
    facts: dict[str, Any] = {
        "site": str(context.node_config["site"]),
        "state": str(told.get("state")),
        "fl-lightning": version("fl-lightning"),
        "flwr": version("flwr"),
    }
    return Message(RecordDict({"site": ConfigRecord(facts)}), reply_to=message)
