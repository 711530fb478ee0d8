"""Three sites as processes of their own, and one configuration over them and simulated."""

import multiprocessing
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

import pytest
import torch
import yaml

from fl_lightning.cli.commands import run_lightning
from fl_lightning.cli.network.server import run_server
from fl_lightning.cli.network.site import serve_site
from fl_lightning.flower.messages import Answer, Order, digest
from fl_lightning.flower.policy import Policy
from fl_lightning.flower.server.correspondence import Correspondence
from fl_lightning.flower.transport.channel import LoopbackChannel
from fl_lightning.flower.transport.resident import log_to
from fl_lightning.models import ImageClassifier

# of tests that train: Lightning warns of small data, of a missing logger, ...
OF_RUNS = [
    pytest.mark.usefixtures("in_an_empty_folder"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]


class WarmClassifier(ImageClassifier):
    """Warms up over local steps; logs sums, largest and smallest values."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 9))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}

    def training_step(self, batch, batch_idx):
        for reduction in ("sum", "max", "min"):
            self.log(f"train/{reduction}", float(len(batch[0])), reduce_fx=reduction)
        return super().training_step(batch, batch_idx)


CLIENTS = {"a": (0, 1), "b": (2, 3), "c": (4, 5)}  # of each site
BASE = """
seed_everything: 0
num_threads: 1
report: false
model:
  class_path: fl_lightning.ImageClassifier
  init_args:
    network: vit_tiny_patch16_224
    network_kwargs:
      {patch_size: 4, embed_dim: 16, depth: 1, num_heads: 2, global_pool: avg, class_token: false}
    num_classes: 10
    in_chans: 1
    image_size: 8
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
data:
  class_path: fl_lightning.FederatedDataModule
  init_args:
    source: {class_path: fl_lightning.data.Digits, init_args: {batch_size: 32}}
    num_clients: 6
federation:
  cohort: {class_path: fl_lightning.UniformCohort, init_args: {size: 4}}
  local_epochs: 1
  engine: sequential
trainer:
  max_epochs: 3
  accelerator: cpu
  devices: 1
  enable_progress_bar: false
  enable_model_summary: false
  num_sanity_val_steps: 0
  logger: false
test_after_fit: false
"""


def configuration(**options):
    """Return the base with options by path, ``__`` for a dot."""
    config = yaml.safe_load(BASE)
    for path, value in options.items():
        *above, name = path.split("__")
        place = config
        for part in above:
            place = place.setdefault(part, {})
        place[name] = value
    return yaml.safe_dump(config, sort_keys=False)


def own_layer(config):
    """Return what of a configuration is a site's own."""
    given = yaml.safe_load(config)
    trainer = given["trainer"]
    own = {name: trainer[name] for name in ("accelerator", "precision") if name in trainer}
    return {"data": given["data"], "trainer": own}


def _site(name, folder, own, clients, policy):
    sys.argv = ["fl-lightning"]
    log = (folder / f"{name}.log").open("a")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    log_to(folder / f"{name}.log")
    clients = {client: client for client in clients}
    socket, memory = folder / f"{name}.socket", folder / name
    key = folder / f"{name}.key"
    given = {"clients": clients, "socket": socket, "memory": memory, "sum_key": key}
    serve_site(Policy(name=name, **given, **policy), own)


class Sites:
    """The processes of some sites."""

    def __init__(self, folder, own, clients, policy):
        self.folder, self.own, self.clients, self.policy = folder, own, clients, policy
        self.processes = {}
        shared = os.urandom(32)
        for name in clients:
            (folder / f"{name}.key").write_bytes(shared)
            self.start(name)

    def start(self, name):
        """Start a site, or start it again."""
        fork = multiprocessing.get_context("fork")
        given = [name, self.folder, self.own, self.clients[name], self.policy]
        self.processes[name] = fork.Process(target=_site, args=given, daemon=True)
        self.processes[name].start()

    def kill(self, name):
        """Kill a site as a power cut does."""
        self.processes[name].kill()
        self.processes[name].join()

    def channel(self):
        return LoopbackChannel({name: self.folder / f"{name}.socket" for name in self.clients})


class Between:
    """A channel to sites; tests replace a part of it.

    Args:
        sites: the processes.
    """

    def __init__(self, sites):
        self._sites, self._channel = sites, sites.channel()
        self.sites = self._channel.sites

    def send(self, site, message, ttl):
        self._channel.send(site, message, ttl)

    def receive(self, seconds):
        return self._channel.receive(seconds)


class LyingServer:
    """Somebody at the server who sends one site what he likes.

    Args:
        sites: that run.
        name: of the one.
    """

    def __init__(self, sites, name="a"):
        self._channel, self._name = sites.channel(), name
        self._log = sites.folder / f"{name}.log"
        self.run = token_hex(16)

    def ask(self, kind, config, *, options=None, tensors=None, round_index=0, clients=(0,)):
        """Return the site's answer."""
        asked = {"configuration": config} if kind == "hello" else {"num_clients": 6}
        order = Order(
            kind=kind,
            run=self.run,
            configuration=digest(config.encode()),
            round=round_index,
            clients=() if kind == "hello" else clients,
            counted=dict.fromkeys(clients, -1),
            options=asked | (options or {}),
            tensors=tensors or {},
        )
        while self._name not in self._channel.sites():
            time.sleep(0.1)
        self._channel.send(self._name, order.to_bytes(), 300)
        while not (came := self._channel.receive(300)):
            pass
        return Answer.from_bytes(came[0][1], limit=2**30)

    def refusal(self, kind, config, **given):
        """Return why the site refuses, by its own log; the server gets a category only."""
        failure = self.ask(kind, config, **given).failure
        assert failure is not None, f"{kind} was followed"
        assert failure.category == "policy", self._log.read_text()
        return self._log.read_text().partition(failure.id)[2]


@contextmanager
def three_sites(config, clients=CLIENTS, **policy):
    with tempfile.TemporaryDirectory(prefix="fl-") as folder:
        sites = Sites(Path(folder), own_layer(config), clients, policy)
        try:
            yield sites
        finally:
            for name in sites.processes:
                sites.kill(name)


def over_network(sites, config, root, *words, channel=None, deadline=400.0):
    """Train over the sites and return the last checkpoint."""
    correspondence = Correspondence(channel or sites.channel(), deadline=deadline)
    run_server(
        config,
        [f"--trainer.default_root_dir={root}", *words],
        correspondence,
        wanted=len(sites.clients),
    )
    return last(root)


def simulated(config, root, *words):
    """Train in this process alone and return the last checkpoint."""
    root.mkdir(parents=True)
    (root / "run.yaml").write_text(config)
    run_lightning(
        ["fit", f"--config={root}/run.yaml", f"--trainer.default_root_dir={root}", *words]
    )
    return last(root)


def last(root):
    [file] = root.rglob("last.ckpt")
    return torch.load(file, weights_only=False)


def farthest(one, other):
    """Return the largest difference of a weight in two checkpoints."""
    ours, theirs = one["state_dict"], other["state_dict"]
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def differing(one, other):
    """Return the names of weights that differ in two checkpoints."""
    ours, theirs = one["state_dict"], other["state_dict"]
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]
