"""The app that Flower takes to the sites: six lines of code, and the configuration of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

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
    """Write an app's folder.

    Args:
        folder: new.
        run: what the server does, ``module:function``.
        options: of the run, which ``run`` gets.
        configuration: of the run, as YAML, which ``run`` finds as ``run.yaml`` in its folder.
    """
    code = folder / "fl_lightning_run"
    code.mkdir(parents=True)
    (code / "__init__.py").write_text('"""A run of fl-lightning over a network."""\n')
    (code / "client_app.py").write_text(CLIENT_APP)
    (code / "server_app.py").write_text(_SERVER_APP.format(run=run))
    (code / CONFIGURATION).write_text(configuration)
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in options.items()]
    (folder / "pyproject.toml").write_text(_PROJECT + "".join(lines))
