"""The command ``network demo``: trains over a network on this machine, and compares with a simulation."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from fl_lightning.cli.commands import resolve
from fl_lightning.client.clocks import FILE
from fl_lightning.core.errors import ConfigurationError, RoundFailure
from fl_lightning.core.processes import tied
from fl_lightning.flower.class_paths import named
from fl_lightning.flower.layers import shared_part
from fl_lightning.flower.network.following import carry_out
from fl_lightning.flower.network.serving import Demo, demo
from fl_lightning.flower.transport.resident import AUDIT_FILE

_SHORT = "--trainer.enable_model_summary=false --test_after_fit=false --report=false"
_QUIET = f"--trainer.enable_progress_bar=false {_SHORT}"
_NOISE = 1e-2  # largest difference of a weight that the noise of encryption explains
_OUTPUTS = ("save_dir", "dirpath")  # options of the Trainer's loggers, callbacks and profiler
Say = Callable[[str], None]


def compared_demo(words: Sequence[str], names: Sequence[str], rounds: int, say: Say) -> None:
    """Train over a server and sites in real processes, simulate the same run, and compare the weights bit by bit.

    Encrypted sums have fresh noise in every run, which training amplifies: the largest difference of the weights
    is printed instead. With ``secure_noise`` nothing is simulated, because its noise cannot be repeated. All
    processes run in the current folder, so that they find its modules and data; their files are written
    elsewhere. The sites allow the classes that the configuration names.

    Args:
        words: words of the command line after ``fit``.
        names: names of the sites, among which the clients are divided.
        rounds: number of rounds.
        say: function that prints a line.

    Raises:
        ConfigurationError: if the configuration has no ``federation`` block, or names a path on a site's
            disk outside ``data``.
        RoundFailure: if the run fails, or its weights differ from the simulation's.
    """
    text = resolve([*words, f"--trainer.max_epochs={rounds}", "--trainer.devices=1"])
    config: dict[str, Any] = yaml.safe_load(text)
    if not config.get("federation"):
        raise ConfigurationError(
            "config: a network needs a federation block, and the configuration has none: see "
            "configs/quickstart.yaml"
        )
    config["federation"]["engine"] = "sequential"  # as sites train
    settings = site_settings(config)
    with tempfile.TemporaryDirectory(prefix="fl-") as name:
        folder = Path(name)
        for part in ("network", "simulation"):
            (folder / part).mkdir()
        options: dict[str, str | int | float] = {
            "sites": len(names),
            "folder": os.getcwd(),
            "words": f"--trainer.default_root_dir={folder / 'network'} {_SHORT}",
        }
        began = time.monotonic()
        shared, own = _shared(config, names), _own_layer(config)
        is_recorded = bool(config["federation"].get("asynchronous"))
        is_fresh = "'secure_noise': True" in str(config["federation"].get("privacy"))
        with ExitStack() as simulations:
            simulate = partial(_simulating, folder / "simulation")
            text = written_to(folder / "network", config)
            if not (is_recorded or is_fresh):  # beside a network that mostly waits
                end = simulations.enter_context(simulate(config))
            with demo(names, say, settings=settings, clients=shared, own=own) as running:
                with _with_refusals(running, say):
                    carry_out(running.control, say, options=options, configuration=text)
                seconds = time.monotonic() - began
                say(f"{rounds} rounds over the network: {seconds:.0f} s with its start")
            if is_fresh:
                say("not compared: secure_noise gives every run its own noise; files are removed")
                return
            say("all processes have ended; the same is simulated")
            if is_recorded:
                end = simulations.enter_context(simulate(_recorded(config, folder / "network")))
            end()
        is_noisy = "EncryptedMean" in str(config["federation"].get("aggregator"))
        apart = _apart(folder)
    differing = [name for name in apart if not apart[name] <= _NOISE * is_noisy]  # NaN neither
    if differing:
        raise RoundFailure(f"the weights differ from the simulation's: {', '.join(differing[:3])}")
    told = f"weights within {max(apart.values()):.0e} of" if is_noisy else "bit-identical to"
    say(f"{told} the simulation; all files are removed")


def site_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return settings of ``site.yaml`` for the demo's sites, which allow whatever the configuration names.

    The sites allow all classes that the configuration names, and accept ``secure_noise: false``, as a
    simulation does.

    Raises:
        ConfigurationError: if the configuration names a path on a site's disk.
    """
    return {"seeded_noise": True, "classes": named(shared_part(config))}


def written_to(folder: Path, config: dict[str, Any]) -> str:
    """Return a configuration as YAML, changed so that loggers and callbacks write into a folder."""

    def placed(value: Any) -> Any:
        if isinstance(value, list):
            return [placed(each) for each in value]
        if not isinstance(value, dict):
            return value
        return {
            name: str(folder / inner)
            if name in _OUTPUTS and isinstance(inner, str)
            else placed(inner)
            for name, inner in value.items()
        }

    return yaml.safe_dump(config | {"trainer": placed(config["trainer"])}, sort_keys=False)


@contextmanager
def _with_refusals(running: Demo, say: Say) -> Iterator[None]:
    """If the run inside this context fails, print from the sites' logs why they refused the server's orders."""
    try:
        yield
    except RoundFailure:
        for site in running.sites:
            file = site.folder / "log" / AUDIT_FILE
            lines = file.read_text().splitlines() if file.exists() else []
            reasons = [json.loads(line).get("refusal") for line in lines]
            for reason in dict.fromkeys(filter(None, reasons)):
                say(f"{site.name}: {reason}")
        raise


def _recorded(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a configuration that simulates an asynchronous run with the order of updates recorded over the network."""
    [file] = folder.rglob(FILE)
    devices = {
        "class_path": "fl_lightning.client.RecordedArrivals",
        "init_args": {"file": str(file)},
    }
    federation = config["federation"] | {"devices": devices}
    return config | {"federation": federation}


def _shared(config: dict[str, Any], names: Sequence[str]) -> dict[str, list[int]]:
    count = config["data"]["init_args"].get("num_clients")
    if not count or count < len(names):
        raise ConfigurationError(
            f"data.num_clients must be at least {len(names)}, one client per site, got {count}"
        )
    parts = np.array_split(np.arange(count), len(names))
    return {name: part.tolist() for name, part in zip(names, parts, strict=True)}


def _own_layer(config: dict[str, Any]) -> str:
    """Return a demo site's own options as YAML: data, accelerator and precision, the same for all sites."""
    trainer = {n: config["trainer"].get(n) for n in ("accelerator", "precision")}
    return yaml.safe_dump({"data": config["data"], "trainer": trainer}, sort_keys=False)


@contextmanager
def _simulating(folder: Path, config: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """Simulate a configuration in a child process, and yield a function that waits for the end of the process."""
    file = folder / "run.yaml"
    file.write_text(written_to(folder, config))
    command = [sys.executable, "-m", "fl_lightning", "fit", f"--config={file}"]
    command += [f"--trainer.default_root_dir={folder}", *_QUIET.split()]
    log = folder / "log.txt"
    with log.open("w") as words:
        process = subprocess.Popen(
            tied(command), stdin=subprocess.DEVNULL, stdout=words, stderr=words
        )

    def end() -> None:
        if process.wait():
            said = log.read_text().strip().splitlines() or ["without a message"]
            raise RoundFailure(f"the simulation failed: {said[-1]}")

    try:
        yield end
    finally:
        process.kill()
        process.wait()


def _apart(folder: Path) -> dict[str, float]:
    """Return each tensor's largest difference between the checkpoints of network and simulation; 0 if bit-identical."""
    found = [sorted((folder / part).rglob("last.ckpt")) for part in ("network", "simulation")]
    if not all(found):
        raise RoundFailure(
            "one of the two runs has written no checkpoint, so they cannot be compared"
        )
    one, other = (torch.load(f[-1], map_location="cpu", weights_only=False) for f in found)
    theirs = other["state_dict"]
    return {name: _distance(ours, theirs.get(name)) for name, ours in one["state_dict"].items()}


def _distance(one: torch.Tensor, other: torch.Tensor | None) -> float:
    if other is None or one.shape != other.shape:
        return math.inf
    if torch.equal(one, other):
        return 0.0
    return float((one.double() - other.double()).abs().max()) or math.inf  # -0.0 and 0.0 differ
