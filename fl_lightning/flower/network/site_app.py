"""Runner of a site's client app: the site runs its own app, whatever app the server has submitted.

Flower's node only carries messages (``--isolation process``), and passes its tasks to this program. It runs the
site's own app for each message, if the client app of the run has the same SHA-256. No code of the server's is
written to disk, imported or run. Refusals are written to the site's audit log. Each message has a process of its
own, forked from this one, because to import Flower costs 2 s of CPU time.
"""

from __future__ import annotations

import io
import json
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fl_lightning.core.processes import end_with_parent
from fl_lightning.flower.transport.apps import CLIENT_APP, make_client_app
from fl_lightning.flower.transport.resident import AUDIT_FILE

_LARGEST = 1_000_000  # bytes of a file that is read
_APP = "flwr.supernode.runtime.run_clientapp"


class AppRefused(Exception):  # noqa: N818 - says what happened
    """Raised at a site that refuses an app or a task from the server; the server gets the error's message."""


def check_app(folder: Path, fab: bytes, **options: Any) -> None:
    """Raise unless a Flower app from the server has the same client app as this site's fl_lightning.

    Args:
        folder: folder of the site.
        fab: app from the server, a ZIP file.
        options: options of the function of Flower's that this one replaces; nothing is installed.

    Raises:
        AppRefused: after the audit log has got a line.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(fab)) as files:
            project = tomllib.loads(_read(files, "pyproject.toml").decode())
            module = str(project["tool"]["flwr"]["app"]["components"]["clientapp"]).partition(":")[
                0
            ]
            client_app = _read(files, f"{module.replace('.', '/')}.py").decode()
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
        refuse(folder, fab, f"the app cannot be read: {error!r}")
    if _hash(client_app) != _hash(CLIENT_APP):
        refuse(folder, fab, f"its client app {module} is not that of fl_lightning")


def refuse(folder: Path, about: bytes, reason: str) -> None:
    """Write to the site's audit log that an app or a task is refused, and raise `AppRefused`."""
    told = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "kind": "app"}
    told |= {"app": sha256(about).hexdigest(), "refusal": f"policy: {reason}"}
    file = folder / "log" / AUDIT_FILE
    file.parent.mkdir(exist_ok=True)
    with file.open("a") as log:
        log.write(json.dumps(told) + "\n")
    raise AppRefused("this site runs no client app but that of fl_lightning")


def _read(files: zipfile.ZipFile, name: str) -> bytes:
    if files.getinfo(name).file_size > _LARGEST:
        raise ValueError(f"{name} is larger than {_LARGEST} bytes")
    return files.read(name)


def _hash(text: str) -> str:
    """Return the SHA-256 of a Python file's text, without comment lines and empty lines."""
    lines = [line.rstrip() for line in text.splitlines()]
    return sha256("\n".join(each for each in lines if each and each[0] != "#").encode()).hexdigest()


class _Executor:
    """Replacement of Flower's executor that starts this site's own app instead of a command."""

    def __init__(self, folder: str) -> None:
        base = import_module("flwr.supercore.superexec.executor.subprocess_executor")
        self._folder, self._flower = folder, base.SubprocessExecutor()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flower, name)

    def launch(self, spec: Any) -> Any:
        """Start this site's app for a message; refuse tasks of other kinds."""
        result = import_module("flwr.supercore.superexec.executor.types").LaunchResult
        if spec.task_type != "flwr-clientapp":
            try:
                refuse(Path(self._folder), spec.task_type.encode(), f"a task {spec.task_type}")
            except AppRefused as error:
                return result.failed(str(error))
        given = [spec.runtime_api_address, spec.token]
        get_context("fork").Process(target=_follow, args=given, daemon=True).start()
        return result.accepted()


def _follow(address: str, token: str) -> None:
    """Run this site's app for a message, in a process of its own."""
    end_with_parent()
    _put(import_module("flwr.supercore.exit.exit_handler"), registered_exit_handlers=[])
    import_module(_APP).run_clientapp(address, token, insecure=True)


def _put(module: Any, **functions: Any) -> None:
    """Replace functions in one of Flower's modules; raise if the module lacks one of these names."""
    for name, function in functions.items():
        getattr(module, name)
        setattr(module, name, function)


def main(words: Sequence[str]) -> None:
    """Run this site's app for each message that Flower's node passes on."""
    folder, address = words
    _put(
        import_module(_APP),
        install_from_fab=partial(check_app, Path(folder)),
        get_project_dir=lambda *_: folder,
        get_load_client_app_fn=lambda **_: lambda *_: make_client_app(),
        install_app_dependencies=None,
    )
    flower = import_module("flwr.supercore.superexec.run_superexec")
    _put(flower, get_executor=lambda *_, **__: _Executor(folder))
    secret = (Path(folder) / "superexec.secret").read_bytes()
    flower.run_superexec(address, True, superexec_auth_secret=secret)


if __name__ == "__main__":
    main(sys.argv[1:])
