"""Means over clients: pooled examples, spread over clients, state."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.core.metrics import ClientMeans

clients = st.lists(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=9), min_size=1, max_size=8
)


def add(means, values, num_examples):
    means.add_rows({name: torch.tensor(v) for name, v in values.items()}, [num_examples], [0])


def filled(entries):
    means = ClientMeans()
    for values, num_examples in entries:
        add(means, values, num_examples)
    return means


@given(examples=clients)
def test_the_mean_is_that_of_the_pooled_examples(examples):
    means = ClientMeans()
    for values in examples:
        means.add_rows(
            {"loss": torch.tensor(values, dtype=torch.float64).mean()}, [len(values)], [0]
        )
    pooled = np.concatenate(examples)
    assert means.reduced()["loss"] == pytest.approx(pooled.mean(), abs=1e-9)


@given(examples=clients)
def test_the_spread_counts_every_client_once(examples):
    means = ClientMeans()
    for values in examples:
        add(means, {"loss": values[0]}, len(values))
    assert means.stds()["loss_std"] == pytest.approx(np.std([v[0] for v in examples]), abs=1e-9)


def test_a_metric_that_some_clients_lack_is_averaged_over_the_others():
    means = filled([({"loss": 1.0}, 1), ({"loss": 2.0, "extra": 8.0}, 3)])
    assert means.names == ["loss", "extra"]
    assert means.reduced()["loss"] == 1.75
    assert means.reduced()["extra"] == 8.0


def test_values_keep_no_graph():
    means = ClientMeans()
    means.add_rows({"loss": torch.tensor(1.0, requires_grad=True) * 2}, [1], [0])
    values = means.state_dict()["loss"]["values"]
    assert (values.requires_grad, values.dtype) == (False, torch.float64)


def test_half_precision_values_are_summed_in_double():
    means = ClientMeans()
    for _ in range(4097):  # bfloat16 cannot count so far
        means.add_rows({"loss": torch.tensor(1.0, dtype=torch.bfloat16)}, [1], [0])
    assert means.reduced()["loss"] == 1.0


def test_state_round_trip_in_the_middle(tmp_path):
    entries = [({"loss": 0.1 * i, "accuracy": i / 7}, i + 1) for i in range(6)]
    first, whole = filled(entries[:3]), filled(entries)
    torch.save(first.state_dict(), tmp_path / "state")
    resumed = ClientMeans()
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for values, num_examples in entries[3:]:
        add(resumed, values, num_examples)
    assert resumed.names == whole.names
    assert resumed.reduced() == whole.reduced()
    assert resumed.stds() == whole.stds()


def test_a_state_does_not_change_afterwards():
    means = filled([({"loss": 1.0}, 1)])
    state = means.state_dict()
    add(means, {"loss": 3.0}, 1)
    assert state["loss"]["weights"] == [1]
    assert state["loss"]["values"].tolist() == [1.0]


def test_a_value_may_be_infinite():
    means = filled([({"perplexity": float("inf")}, 1), ({"perplexity": 1.0}, 3)])
    assert means.reduced()["perplexity"] == float("inf")
    assert np.isnan(means.stds()["perplexity_std"])
