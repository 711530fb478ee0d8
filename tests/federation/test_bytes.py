"""The bytes of a round are those of messages that are really encoded."""

import pytest
import torch
from toys import ToyModule, toy_data, toy_trainer

from fl_lightning import FedDyn, Federation, FedProx, Scaffold, UniformCohort
from fl_lightning.core.update import ClientUpdate
from fl_lightning.updates.message import Message, encode
from fl_lightning.updates.payload import Dense
from fl_lightning.updates.quantisers import Cast


def encoded_bytes(module, record, dtype):
    """Encode a client's update and the model, both with that module's sizes and metrics."""
    sizes = (
        sum(p.numel() for p in module.parameters()),
        sum(b.numel() for b in module.buffers() if b.is_floating_point()),
    )
    params, buffers = (torch.randn(size).to(dtype) for size in sizes)
    metrics = {name: torch.randn(()) for name in record.means.names}
    update = ClientUpdate(5, params, buffers, num_examples=3, num_steps=2, metrics=metrics)
    up = Message.of_update(update, space="0" * 32, round_index=1)
    down = Message("model", "0" * 32, 1, 5, Dense(params), Dense(buffers))
    return len(encode(up)), len(encode(down))


@pytest.mark.parametrize(
    ("engine", "dtype"), [("sequential", torch.float64), ("slots", torch.float32)]
)
def test_what_is_counted_is_what_would_be_encoded(engine, dtype):
    precision = "64-true" if dtype == torch.float64 else "32-true"
    batch_norm = engine == "sequential"  # buffers travel as well
    module = ToyModule(batch_norm=batch_norm)
    data = toy_data(num_clients=6, batch_size=4, drop_last=True)
    federation = Federation(cohort=UniformCohort(size=3), local_steps=1, engine=engine)
    toy_trainer(federation, max_epochs=1, precision=precision).fit(module, datamodule=data)
    record = federation.rounds.record
    up, down = encoded_bytes(module, record, dtype)
    assert len(record.means.names) == 2
    assert record.total_bytes_up == 3 * up
    assert record.total_bytes_down == 3 * down
    assert record.facts()["round/bytes_up"] == up


@pytest.mark.parametrize(
    ("engine", "correction", "vectors_up", "vectors_down"),
    [
        ("slots", FedProx(mu=0.1), 0, 0),
        ("slots", Scaffold(), 0, 1),
        ("sequential", Scaffold("I"), 1, 1),
        ("sequential", FedDyn(), 0, 0),
    ],
)
def test_what_a_correction_needs_travels_as_well(engine, correction, vectors_up, vectors_down):
    def told(**options):
        federation = Federation(local_steps=1, engine=engine, correction=correction, **options)
        toy_trainer(federation, max_epochs=1).fit(ToyModule(), datamodule=toy_data())
        return federation.rounds.record

    record = told()
    k = sum(p.numel() for p in ToyModule().parameters())
    up, down = encoded_bytes(ToyModule(), record, torch.float32)
    up, down = up + 4 * k * vectors_up, down + 4 * k * vectors_down
    assert (record.total_bytes_up, record.total_bytes_down) == (6 * up, 6 * down)
    # the server cannot work out from a rounded update what the client has learnt of its own
    rounded = told(updates=[Cast("float16")])
    saved = record.total_bytes_up - rounded.total_bytes_up
    grown = 4 if correction.needs_mean and not vectors_up else 0
    assert saved == pytest.approx(6 * (2 - grown) * k, abs=6 * 40)  # but for the header
    assert rounded.total_bytes_down == record.total_bytes_down
