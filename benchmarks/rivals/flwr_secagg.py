"""Flower's SecAgg+ on the vectors of `benchmarks.secure`: its client mod, its server's workflow.

Both run in this process and hand each other messages over a grid of our own, which lets clients
drop when their vector is due and counts CPU seconds and the bytes of what would be sent. This is
the protocol alone, as in our own rows, with Flower's quantisation: its mod takes floats.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters
from flwr.common import parameters_to_ndarrays as numbers_of
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.compat.common import recorddict_compat as compat
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.supercore.task_identity import TaskIdentity


def context_of(node: int) -> Context:
    """Return what a node keeps between messages."""
    return Context(
        run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={}, series_id=1
    )


class CountingGrid:
    """Hands messages to the clients' mod, and answers to the workflow.

    Args:
        num_clients: nodes 1 to n.
        num_dropped: the first ones are silent from the third exchange on.
        vector: what every client contributes.
    """

    def __init__(self, num_clients: int, num_dropped: int, vector: np.ndarray) -> None:
        self._contexts = {node: context_of(node) for node in range(1, num_clients + 1)}
        self._dropped = frozenset(range(1, num_dropped + 1))
        self._vector, self._exchanges = vector, 0
        self.client_seconds = self.grid_seconds = 0.0
        self.bytes_up = dict.fromkeys(self._contexts, 0)
        self.bytes_down = dict.fromkeys(self._contexts, 0)

    def send_and_receive(self, messages: Iterable[Message], **_: Any) -> list[Message]:
        """Return an answer to every message."""
        began, self._exchanges = time.process_time(), self._exchanges + 1
        answers = [self._answer(message) for message in messages]
        self.grid_seconds += time.process_time() - began
        return answers

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        self.bytes_down[node] += _sent(message)
        if node in self._dropped and self._exchanges > 2:
            return Message(Error(code=1, reason="dropped"), reply_to=message)
        began = time.process_time()
        answer = secaggplus_mod(message, self._contexts[node], self._train)
        self.client_seconds += time.process_time() - began
        self.bytes_up[node] += _sent(answer)
        return answer

    def _train(self, message: Message, _: Context) -> Message:
        parameters = ndarrays_to_parameters([self._vector])
        result = FitRes(Status(Code.OK, ""), parameters, num_examples=1, metrics={})
        return Message(compat.fitres_to_recorddict(result, True), reply_to=message)


class OneCohort:
    """What of Flower's strategies the workflow needs: everyone takes part, the sum is kept."""

    def __init__(self, num_clients: int) -> None:
        self._proxies = [SimpleNamespace(node_id=node) for node in range(1, num_clients + 1)]
        self.mean = np.empty(0)

    def configure_fit(self, *_: Any) -> list[tuple[Any, FitIns]]:
        """Return whom to ask for what; no model travels, so that bytes are the protocol's."""
        nothing = ndarrays_to_parameters([])
        return [(proxy, FitIns(nothing, {})) for proxy in self._proxies]

    def aggregate_fit(self, _: int, results: Any, failures: Any) -> tuple[Any, dict[str, Any]]:
        """Keep the mean, which every result has."""
        self.mean = numbers_of(results[0][1].parameters)[0]
        return None, {}


def _sent(message: Message) -> int:
    """Replace the content by what would arrive of it; return its bytes."""
    proto = recorddict_to_proto(message.content)
    message.content = recorddict_from_proto(proto)
    return int(proto.ByteSize())


def main() -> None:
    """Run one round and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("clients", "dropped", "size", "shares", "threshold"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 0  # of the server
    vector = np.random.default_rng(0).uniform(-1, 1, options.size).astype(np.float32)
    grid = CountingGrid(options.clients, options.dropped, vector)
    cohort = OneCohort(options.clients)
    context = LegacyContext(
        context_of(0), strategy=cohort, client_manager=SimpleNamespace(num_available=lambda: 0)
    )
    context.state.config_records["config"] = ConfigRecord({"current_round": 1})
    empty = compat.parameters_to_arrayrecord(ndarrays_to_parameters([]), True)
    context.state.array_records["parameters"] = empty
    workflow = SecAggPlusWorkflow(options.shares, options.threshold, max_weight=1.0)
    began = time.process_time()
    workflow(grid, context)
    seconds = time.process_time() - began
    if not np.allclose(cohort.mean, vector, atol=1e-4):
        raise SystemExit("Flower's secure mean is not the mean")
    report = {
        "client_seconds": grid.client_seconds / options.clients,
        "server_seconds": seconds - grid.grid_seconds,
        "bytes_up": grid.bytes_up[options.clients],
        "bytes_down": grid.bytes_down[options.clients],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
