"""The two Flower apps of a run: the client app passes messages to the site, the server app trains.

At a site, every message has a process of its own, forked from one that imports this file. The file must be light,
so it imports neither PyTorch nor Lightning.

Below: the folder of the app that Flower sends to sites, with six lines of code and the configuration of the run.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fl_lightning.core.errors import ConfigurationError, RoundFailure
from fl_lightning.flower.transport.channel import Channel, ask, packed, state_of, unpacked

try:
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
except ImportError as error:
    raise ConfigurationError("a network needs Flower: install fl-lightning[flower]") from error

Options = Mapping[str, bool | int | float | str]
Run = Callable[[Channel, Options, Path], None]


def make_client_app() -> ClientApp:
    """Return a site's Flower app, which passes orders to the site's resident process."""
    app = ClientApp()
    app.train()(_forward)
    app.query()(_introduce)
    return app


def make_server_app(run: Run | str, folder: Path) -> ServerApp:
    """Return the server's Flower app, which trains over a channel to the sites.

    Args:
        run: function that trains, given a channel, the run's options and the app's folder; or its path,
            ``module:function``.
        folder: folder of the app, with the configuration of the run.
    """
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        from fl_lightning.flower.transport.grid import GridChannel, registered_names, turn

        options = {k: v for k, v in context.run_config.items() if not isinstance(v, bytes)}
        channel = GridChannel(grid, registered_names())
        with _logged(str(options.get("log", ""))), turn(channel, options):
            given = run
            if isinstance(given, str):
                module, _, name = given.partition(":")
                given = getattr(import_module(module), name)
            given(channel, options, folder)

    app.main()(main)
    return app


@contextmanager
def _logged(log: str) -> Iterator[None]:
    """Redirect stdout and stderr to a file inside this block, and lock the file; without a path, do nothing."""
    if not log:
        yield
        return
    before = os.dup(1), os.dup(2)
    with open(log, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
            yield
        except RoundFailure:  # whose reason was printed
            raise
        except Exception:
            traceback.print_exc()
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, original in enumerate(before, 1):
                os.dup2(original, descriptor)
                os.close(original)


def _forward(message: Message, context: Context) -> Message:
    """Pass an order to the site's resident process, and return its answer; an empty message if there is none.

    Nothing is raised here: Flower would send the error's text to the server.
    """
    order = unpacked(message.content)
    if order is None:
        answer = None
    else:
        answer = ask(Path(str(context.node_config["socket"])), order, message.metadata.ttl)
    return Message(RecordDict() if answer is None else packed(answer), reply_to=message)


def _introduce(message: Message, context: Context) -> Message:
    """Answer a query of the server by the site's name, the state of its resident process, and versions."""
    facts: dict[str, Any] = {
        "site": str(context.node_config["site"]),
        "state": state_of(Path(str(context.node_config["socket"]))) or "not there",
        "fl-lightning": version("fl-lightning"),
        "flwr": version("flwr"),
    }
    return Message(RecordDict({"site": ConfigRecord(facts)}), reply_to=message)


CONFIGURATION = "run.yaml"
CLIENT_APP = """\
from fl_lightning.flower import make_client_app

app = make_client_app()
"""
_SERVER_APP = """\
from pathlib import Path

from fl_lightning.flower import make_server_app

app = make_server_app({run!r}, Path(__file__).parent)
"""
_PROJECT = """\
[project]
name = "fl-lightning-run"
version = "1.0.0"
description = "A run of fl-lightning over a network."
dependencies = []

[tool.flwr.app]
publisher = "fl-lightning"

[tool.flwr.app.components]
serverapp = "fl_lightning_run.server_app:app"
clientapp = "fl_lightning_run.client_app:app"

[tool.flwr.app.config]
"""


def write_app(
    folder: Path, run: str, options: Mapping[str, str | int | float], configuration: str = ""
) -> None:
    """Write the folder of a run's Flower app: code, configuration and options.

    Args:
        folder: new folder.
        run: path of the function that the server runs, ``module:function``.
        options: options of the run, for the function.
        configuration: configuration of the run, as YAML, which is ``run.yaml`` in the folder.
    """
    code = folder / "fl_lightning_run"
    code.mkdir(parents=True)
    (code / "__init__.py").write_text('"""A run of fl-lightning over a network."""\n')
    (code / "client_app.py").write_text(CLIENT_APP)
    (code / "server_app.py").write_text(_SERVER_APP.format(run=run))
    (code / CONFIGURATION).write_text(configuration)
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in options.items()]
    (folder / "pyproject.toml").write_text(_PROJECT + "".join(lines))
