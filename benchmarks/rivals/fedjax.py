"""FedJAX: its federated_averaging with its default backend, one jitted step after the other.

The networks that are plain sequences of layers are translated, with their initial weights; dropout
and transformers are not.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = (
    "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"  # read on import
)

from collections.abc import Callable
from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg
from torch import nn

from benchmarks.process import Column
from benchmarks.rivals import adapter, stopwatch
from benchmarks.workloads import SEED, Workload

Layer = Callable[[Any, Any], Any]  # from parameters and input to output


def translate(layer: nn.Module) -> tuple[Layer, list[Any]]:
    """Return a layer of torch as a function of its parameters, and their values."""
    params = [jnp.asarray(p.detach().numpy()) for p in layer.parameters()]
    if isinstance(layer, nn.Flatten):
        return lambda _, x: x.reshape(len(x), -1), params
    if isinstance(layer, nn.ReLU):
        return lambda _, x: jax.nn.relu(x), params
    if isinstance(layer, nn.Linear):
        return lambda p, x: x @ p[0].T + p[1], params
    if isinstance(layer, nn.MaxPool2d):
        window = (1, 1, 2, 2)
        return lambda _, x: jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, window, window, "VALID"
        ), params
    if isinstance(layer, nn.Conv2d):
        padding = [(int(layer.padding[0]),) * 2, (int(layer.padding[1]),) * 2]
        return (
            lambda p, x: (
                jax.lax.conv_general_dilated(x, p[0], (1, 1), padding) + p[1][:, None, None]
            ),
            params,
        )
    raise SystemExit(f"{type(layer).__name__} is not translated to JAX")


def train(work: Workload, num_rounds: int) -> Column:
    """Train so many rounds."""
    network = work.initial_network()
    if not isinstance(network, nn.Sequential):
        raise SystemExit(f"{type(network).__name__} is not translated to JAX")
    layers, params = zip(*map(translate, network), strict=True)
    data = work.data()
    x, y = (tensor.numpy() for tensor in data)

    def loss(params: Any, batch: dict[str, Any]) -> Any:
        output = batch["x"]
        for layer, own in zip(layers, params, strict=True):
            output = layer(own, output)
        logs = jax.nn.log_softmax(output)
        return -jnp.take_along_axis(logs, batch["y"][:, None], axis=1).mean()

    def gradient(params: Any, batch: dict[str, Any], key: Any) -> Any:
        gradients = jax.grad(loss)(params, batch)
        decay = work.weight_decay
        return jax.tree_util.tree_map(lambda g, p: g + decay * p, gradients, params)

    algorithm = fed_avg.federated_averaging(
        gradient,
        fedjax.optimizers.sgd(learning_rate=work.lr, momentum=work.momentum or None),
        fedjax.optimizers.sgd(learning_rate=1.0),
        fedjax.ShuffleRepeatBatchHParams(
            batch_size=work.batch_size,
            num_epochs=None if work.local_steps else 1,
            num_steps=work.local_steps,
            seed=SEED,
        ),
    )
    state = algorithm.init(list(params))
    watch = stopwatch(work, data)
    draws = np.random.default_rng(SEED)
    for number in range(num_rounds):
        ids = draws.choice(work.num_clients, work.cohort, replace=False).tolist()
        keys = jax.random.split(jax.random.PRNGKey(number), work.cohort)
        shards = [fedjax.ClientDataset({"x": x[s], "y": y[s]}) for s in map(work.shard, ids)]
        state, _ = algorithm.apply(state, list(zip(ids, shards, keys, strict=True)))
        jax.block_until_ready(state.params)
        watch.round_done()
    return watch.report()


if __name__ == "__main__":
    adapter(train)
