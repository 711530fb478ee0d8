"""What a round over a network costs beyond training: ``python -m benchmarks.network``.

A server and three sites as real processes on this machine, through Flower with TLS and keys. First sites
send orders back, which is Flower's floor: nothing trains. Then a configuration trains, by default the
quickstart with 5 of 20 clients a round, and the same is simulated. Prints

- the median of seconds a round, of either, without the first round, in which sites load their data;
- and of seconds that a site was busy with an order, by its own log; the rest beyond the floor is ours;
- megabytes up, as they came and as the simulation had counted them.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
import yaml

from fl_lightning.cli.commands import resolve
from fl_lightning.flower.network.following import carry_out
from fl_lightning.flower.network.serving import demo

SITES = ("a", "b", "c")
ECHO = "benchmarks.echo"
UP = "round/total_bytes_up"


def floor(rounds: int) -> list[float]:
    """Return the seconds of rounds in which sites only send orders back."""
    said: list[str] = []
    with demo(SITES, print, process=f"{ECHO}:serve_echo") as running:
        options: dict[str, str | int | float] = {"sites": len(SITES), "rounds": rounds}
        carry_out(running.control, said.append, options=options, run=f"{ECHO}:exchange")
    return [
        float(found[1]) for line in said if (found := re.search(r"^round.*\(([\d.]+) s\)", line))
    ]


def trained(configuration: str, folder: Path) -> tuple[list[dict[str, float]], list[float]]:
    """Return what a run over the network logs of its rounds, and the seconds of sites' orders."""
    config = yaml.safe_load(configuration)
    parts = np.array_split(np.arange(config["data"]["init_args"]["num_clients"]), len(SITES))
    clients = {name: part.tolist() for name, part in zip(SITES, parts, strict=True)}
    own = yaml.safe_dump({"data": config["data"]})
    options: dict[str, str | int | float] = {
        "sites": len(SITES),
        "folder": str(folder),
        "words": "",
    }
    with demo(SITES, print, clients=clients, own=own) as running:
        carry_out(running.control, print, options=options, configuration=configuration)
        logs = [(site.folder / "log" / "resident.log").read_text() for site in running.sites]
    orders = [re.findall(r"order \w+: ([\d.]+) s", log)[1:] for log in logs]  # after the greeting
    return logged(folder), [float(seconds) for site in orders for seconds in site]


def simulated(configuration: str, folder: Path) -> list[dict[str, float]]:
    """Return what a simulation logs in its rounds."""
    (folder / "run.yaml").write_text(configuration)
    command = [sys.executable, "-m", "fl_lightning", "fit", f"--config={folder}/run.yaml"]
    subprocess.run(command, check=True, cwd=folder)
    return logged(folder)


def logged(folder: Path) -> list[dict[str, float]]:
    """Return the rounds of the run in a folder, where loggers write."""
    [file] = folder.rglob("rounds.jsonl")
    return [json.loads(line)["metrics"] for line in file.read_text().splitlines()]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="configs/quickstart.yaml", help="what trains")
    parser.add_argument("--rounds", type=int, default=8, help="of either")
    given = parser.parse_args()
    short = [
        f"--trainer.max_epochs={given.rounds}",
        "--trainer.devices=1",
        "--test_after_fit=false",
    ]
    short += ["--federation.engine=sequential"]
    configuration = resolve([f"--config={given.config}", *short])
    alone = median(floor(given.rounds)[1:])
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        rounds, training = trained(configuration, Path(one))
        counted = sum(each[UP] for each in simulated(configuration, Path(other)))
    ours = median(each["round/seconds"] for each in rounds[1:])
    up = sum(each[UP] for each in rounds)
    busy = median(training)
    print(f"an order sent back:  {alone:.2f} s a round, which is Flower's floor")
    print(f"training:            {ours:.2f} s a round, {busy:.2f} s of them at a site")
    print(f"beyond both:         {ours - alone - busy:+.2f} s a round")
    print(f"up:                  {up / 1e6:.3f} MB, counted by simulation {counted / 1e6:.3f} MB")


if __name__ == "__main__":
    main()
