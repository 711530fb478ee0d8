"""A network that is cut for a minute, and messages of many megabytes: the run goes on to the same bits."""

import socket
import sys
import tempfile
import threading

import pytest
import yaml

pytest.importorskip("flwr")

from flower.site_processes import (
    CLIENTS,
    OF_RUNS,
    configuration,
    differing,
    last,
    own_layer,
    simulated,
)

from fl_lightning.flower.network.following import carry_out
from fl_lightning.flower.network.serving import demo

SECONDS = 60.0
LARGE = {"patch_size": 4, "embed_dim": 192, "depth": 7, "num_heads": 2, "class_token": False}
pytestmark = [pytest.mark.slow, *OF_RUNS]


class Wire:
    """Forwards connections to a port; while it is cut, nothing gets through, and nobody is told."""

    def __init__(self):
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._is_whole = threading.Event()
        self.times_cut = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def lead_to(self, port):
        self._target = port
        self._is_whole.set()

    def cut(self, seconds):
        self.times_cut += 1
        self._is_whole.clear()
        threading.Timer(seconds, self._is_whole.set).start()

    def _accept(self):
        while True:
            one, _ = self._listening.accept()
            threading.Thread(target=self._join, args=[one], daemon=True).start()

    def _join(self, one):
        self._is_whole.wait()
        other = socket.create_connection(("127.0.0.1", self._target))
        for ends in ((one, other), (other, one)):
            threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source, target):
        try:
            while piece := source.recv(2**16):
                self._is_whole.wait()
                target.sendall(piece)
        except OSError:
            pass  # as one end has closed
        finally:
            source.close()
            target.close()


def test_large_messages_through_a_network_that_is_cut_for_a_minute(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")  # sockets allow about a hundred bytes
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    config = configuration(
        model__init_args__network_kwargs={**LARGE, "global_pool": "avg"},
        trainer__enable_progress_bar=True,  # which says when a round is over
    )
    wire, said = Wire(), []

    def say(line):
        said.append(line)
        if "| round 1/3" in line:
            wire.cut(SECONDS)

    folder = tmp_path / "network"
    folder.mkdir()
    options = {
        "sites": len(CLIENTS),
        "folder": str(folder),
        "words": f"--trainer.default_root_dir={folder}",
    }
    settings = {"server": f"127.0.0.1:{wire.port}"}
    own = yaml.safe_dump(own_layer(config))
    with demo(list(CLIENTS), print, settings=settings, clients=CLIENTS, own=own) as running:
        wire.lead_to(running.network.port)
        carry_out(running.control, say, options=options, configuration=config)
    assert wire.times_cut == 1
    assert any("a client sends about 12.5 MB and receives 12.5 MB a round" in line for line in said)
    network = last(folder)
    assert network["epoch"] == 2
    assert differing(network, simulated(config, tmp_path / "alone")) == []
