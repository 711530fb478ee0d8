"""Bytes over Flower's messages, and a channel over a grid that answers as Flower does."""

import asyncio
import os
import re
import threading
import time

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Error, RecordDict
from flwr.app.message import make_message
from flwr.app.metadata import Metadata
from flwr.supercore.task_identity import TaskIdentity

from fl_lightning.flower.network.folder import make_network
from fl_lightning.flower.network.gate import make_gate
from fl_lightning.flower.transport.channel import packed, unpacked
from fl_lightning.flower.transport.grid import NAMES_VARIABLE, GridChannel, turn


class Grid:
    """Nodes that answer queries at once, and orders when a test has them do so."""

    def __init__(self, names):
        self.names = dict(names)
        self.online = set(names)
        self.replies, self.orders, self.sent, self.state = {}, [], 0, "idle"

    def get_node_ids(self):
        return sorted(self.online)

    def push_messages(self, messages):
        ids = []
        for message in messages:
            self.sent += 1
            ids.append(str(self.sent))
            node = message.metadata.dst_node_id
            if message.metadata.message_type == "query":
                told = ConfigRecord({"site": self.names[node], "state": self.state})
                self.reply(ids[-1], RecordDict({"site": told}))
            else:
                self.orders.append((ids[-1], node, unpacked(message.content)))
        return ids

    def reply(self, id_, content):
        metadata = Metadata(
            run_id=1,
            message_id="",
            src_node_id=1,
            dst_node_id=1,
            reply_to_message_id=id_,
            group_id="",
            created_at=time.time(),
            ttl=1.0,
            message_type="train",
        )
        if isinstance(content, Error):
            self.replies[id_] = make_message(metadata=metadata, error=content)
        else:
            self.replies[id_] = make_message(metadata=metadata, content=content)

    def pull_messages(self, ids):
        return [self.replies.pop(id_) for id_ in ids if id_ in self.replies]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    for name in ("_run_id", "_node_id", "_task_id"):  # of the process that Flower starts
        monkeypatch.setattr(TaskIdentity, name, 1, raising=False)
    monkeypatch.setattr("fl_lightning.flower.transport.grid._LOOK_SECONDS", 0.0)
    monkeypatch.setattr("fl_lightning.flower.transport.grid._POLL_SECONDS", 0.01)


def channel_of(grid, known=None, names=None):
    """A channel that knows by now who is there."""
    channel = GridChannel(grid, known)
    channel.sites()
    assert channel.sites() == (names or sorted(grid.names.values()))
    return channel


def test_bytes_are_carried_as_they_are_and_each_order_has_one_outcome():
    message = bytes(range(256)) * 10
    assert unpacked(packed(message)) == message
    assert unpacked(RecordDict({"message": ConfigRecord({"a": 1})})) is None
    grid = Grid({7: "a", 9: "b"})
    channel = channel_of(grid)
    channel.send("a", b"x", 60)
    channel.send("b", b"y", 60)
    assert channel.sites() == []
    for id_, _, content in grid.orders:
        grid.reply(id_, packed(content * 2))
    assert sorted(channel.receive(5)) == [("a", b"xx"), ("b", b"yy")]
    for id_, _, content in grid.orders:
        grid.reply(id_, packed(content))  # once more: nobody asks for it
    assert channel.receive(0.05) == []
    assert channel.sites() == ["a", "b"]


def test_an_order_that_is_given_up_is_not_answered_any_more():
    grid = Grid({7: "a"})
    channel = channel_of(grid)
    for content in (b"x", b"y"):
        channel.send("a", content, 60)
    for id_, _, content in grid.orders:
        grid.reply(id_, packed(content * 2))
    assert channel.receive(5) == [("a", b"yy")]


@pytest.mark.parametrize("reply", [Error(2, "patient 17"), RecordDict()])
def test_an_error_of_flowers_and_an_empty_answer_are_losses(reply, caplog):
    grid = Grid({7: "a"})
    channel = channel_of(grid)
    channel.send("a", b"x", 60)
    grid.reply(grid.orders[0][0], reply)
    assert channel.receive(1) == [("a", None)]
    assert "site a: no reply to its order" in caplog.text
    assert "patient 17" not in caplog.text
    channel.sites()
    assert channel.sites() == ["a"]  # it has answered a query since
    grid.online.clear()
    assert channel.sites() == []


def test_an_order_that_got_lost_on_its_way_is_lost_and_not_waited_for(monkeypatch):
    """A run waited for an hour after a kill of the program that had the message in its hands."""
    monkeypatch.setattr("fl_lightning.flower.transport.grid._DOUBT_SECONDS", 0.0)
    grid = Grid({7: "a"})
    channel = channel_of(grid)
    channel.send("a", b"x", 3600)
    grid.state = "busy"
    assert channel.receive(0.2) == []
    grid.state = "idle"
    assert channel.receive(5) == [("a", None)]


def test_an_answer_that_comes_before_its_site_says_it_is_idle_counts(monkeypatch):
    monkeypatch.setattr("fl_lightning.flower.transport.grid._DOUBT_SECONDS", 0.0)
    grid = Grid({7: "a"})
    channel = channel_of(grid)
    channel.send("a", b"x", 3600)
    channel.sites()
    channel.sites()  # the site has said once that it is idle
    grid.reply(grid.orders[0][0], packed(b"y"))
    assert channel.receive(5) == [("a", b"y")]


def test_a_second_run_waits_for_its_turn(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(NAMES_VARIABLE, str(tmp_path / "nodes.json"))
    began = threading.Event()

    def second():
        with turn(GridChannel(Grid({})), {"user": "bob", "folder": "/b"}):
            began.set()

    with turn(GridChannel(Grid({})), {"user": "alice", "folder": "/a"}):
        thread = threading.Thread(target=second)
        thread.start()
        assert not began.wait(1.5)
    assert began.wait(10)
    thread.join()
    said = capsys.readouterr().out
    busy = rf"busy: the sites train for process {os.getpid()} of alice, in /a, since \d\d:\d\d; this run"
    assert re.search(busy, said), said
    assert said.count("busy") == 1


def test_a_node_cannot_pose_as_another_site():
    channel = channel_of(Grid({7: "a", 9: "a"}), {7: "a", 9: "b"}, names=["a"])
    channel.send("b", b"x", 60)
    assert channel.receive(1) == [("b", None)]


REQUESTS = [
    ("/v1/control/start-run", "POST", 404),
    ("/v1/runtime/acquire-task", "POST", 404),
    ("/v1/fleet/../control/start-run", "POST", 404),
    ("/v1/fleet/%2e%2e/control/start-run", "POST", 404),
    ("/v1/fleet/get-run/../../control/start-run", "POST", 404),
    ("/v1/fleet/get-run", "GET", 405),
    ("/v1/fleet/get-run", "POST", 503),  # let through, to where nobody is
]


def test_the_gate_lets_sites_requests_through_and_nothing_else(tmp_path):
    network = make_network(tmp_path / "n", "localhost:1", ["a"])
    gate = make_gate("https://127.0.0.1:1", str(network.server / "ca.crt"))
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "query_string": b"", "headers": [], "scheme": "https"}
    scope["server"] = ("localhost", 1)
    for path, method, code in REQUESTS:
        sent.clear()
        asked = {**scope, "method": method, "path": path, "raw_path": path.encode()}
        asyncio.run(gate(asked, receive, send))
        assert sent[0]["status"] == code, path
