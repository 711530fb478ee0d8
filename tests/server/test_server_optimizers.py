"""Adaptive server optimizers against the papers' recursions in NumPy.

Those of Flower (v₀ = 0, another bias correction) differ in the second digit.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_server import model, play, saved, sgd, update

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.server.optimizers import FedAdagrad, FedAdam, FedLion, FedYogi
from fl_lightning.server.server import Server, fedavg_optimizer

# subnormal numbers have no relative precision
numbers = st.floats(-2, 2, width=32, allow_subnormal=False)
deltas = st.lists(st.lists(numbers, min_size=2, max_size=2), min_size=1, max_size=6)


def make(kind, **options):
    return lambda params: kind(params, **options)


def recursion(kind, deltas, lr, beta1, beta2, tau):
    x, first, second = np.array([1.0, -1.0]), np.zeros(2), np.full(2, tau**2)
    for delta in np.array(deltas):
        first = beta1 * first + (1 - beta1) * delta
        square = delta**2
        second = {
            FedAdagrad: lambda v, s: v + s,
            FedAdam: lambda v, s: beta2 * v + (1 - beta2) * s,
            FedYogi: lambda v, s: v - (1 - beta2) * s * np.sign(v - s),
        }[kind](second, square)
        x = x - lr * first / (np.sqrt(second) + tau)
    return x


@settings(max_examples=25)
@given(deltas=deltas, beta1=st.floats(0, 0.95), beta2=st.floats(0.5, 0.999))
@pytest.mark.parametrize("kind", [FedAdagrad, FedAdam, FedYogi])
def test_any_rounds_are_the_papers(kind, deltas, beta1, beta2):
    options = {"lr": 0.1, "beta1": beta1, "tau": 0.1}
    if kind is not FedAdagrad:
        options["beta2"] = beta2
    server = Server(model([1.0, -1.0]), None, make(kind, **options))
    for delta in deltas:
        play(server, update(delta))
    expected = recursion(kind, deltas, 0.1, beta1, beta2, 0.1)
    np.testing.assert_allclose(server.model.params.numpy(), expected, rtol=1e-3, atol=1e-4)


@settings(max_examples=25)
@given(deltas=deltas)
def test_lion_moves_by_its_rate_whatever_the_scale(deltas):
    kind = make(FedLion, lr=0.25, weight_decay=0.0)
    plain, scaled = Server(model([1.0, -1.0]), None, kind), Server(model([1.0, -1.0]), None, kind)
    x, momentum = np.array([1.0, -1.0], np.float32), np.zeros(2, np.float32)
    for delta in np.array(deltas, np.float32):
        play(plain, update(delta.tolist()))
        play(scaled, update((delta * 1024).tolist()))
        direction = torch.lerp(torch.tensor(momentum), torch.tensor(delta), 1 - 0.9).sign().numpy()
        x = x - 0.25 * direction
        momentum = torch.lerp(torch.tensor(momentum), torch.tensor(delta), 1 - 0.99).numpy()
    assert plain.model.params.tolist() == x.tolist() == scaled.model.params.tolist()


def test_lions_decay_is_decoupled():
    server = Server(model([2.0]), None, make(FedLion, lr=0.1, weight_decay=0.5))
    play(server, update([1.0]))
    assert server.model.params.tolist() == pytest.approx([2.0 * 0.95 - 0.1])


@pytest.mark.parametrize(
    ("kind", "key", "start"),
    [
        (make(FedAdam, tau=0.5), "second", 0.25),
        (make(FedYogi, tau=0.5), "first", 0.0),
        (make(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.3), "sum", 0.3),
        (sgd(lr=1.0, momentum=0.9), "momentum_buffer", 0.0),
    ],
)
def test_a_coordinate_that_joins_starts_as_those_before_it_did(kind, key, start):
    server = Server(model([1.0, 2.0]), None, kind)
    play(server, update([1.0, 3.0]))
    [before] = server.optimizer.state.values()
    kept = float(before[key][1])
    server.relocate(model([2.0, 7.0]), torch.tensor([1, -1]))
    [after] = server.optimizer.state.values()
    assert after[key].tolist() == pytest.approx([kept, start])
    play(server, update([1.0, 1.0]))


# outside of a fit nothing silences PyTorch's warning about rounds in which the optimizer takes no step
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
class TestSchedule:
    def steps(self, server, count):
        params = [float(server.model.params)]
        for _ in range(count):
            play(server, update([1.0]))
            params.append(float(server.model.params))
        return -np.diff(params)

    def test_the_rate_follows_it_round_by_round(self):
        server = Server(
            model([0.0]), None, sgd(lr=1.0), lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5)
        )
        play(server)  # a round without reply counts as well
        assert self.steps(server, 4).tolist() == [1.0, 0.5, 0.5, 0.25]

    def test_that_of_fedavg_follows_it_with_the_bits_of_sgd(self):
        def schedule(optimizer):
            return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.3)

        moved = []
        for make in (fedavg_optimizer, sgd(lr=1.0)):
            server = Server(model([0.1, -3e7, 0.0]), None, make, schedule)
            for _ in range(5):
                play(server, update([1 / 3, 0.7, 1e-30]))
            moved.append(server)
        assert torch.equal(*(server.model.params for server in moved))
        assert saved(moved[0].state_dict()) == saved(moved[1].state_dict())

    def test_that_of_fedavg_takes_over_what_a_checkpoint_says(self):
        moved = []
        for make in (fedavg_optimizer, sgd(lr=1.0)):
            before = Server(model([0.0]), None, sgd(lr=0.5, momentum=0.9))
            play(before, update([1.0]))
            server = Server(before.model, None, make)
            server.load_state_dict(saved(before.state_dict()))
            moved.append(self.steps(server, 3).tolist())
        assert moved[0] == moved[1]
        assert moved[0] == pytest.approx([0.95, 1.355, 1.7195])

    @pytest.mark.parametrize("cut", [1, 2, 3])
    def test_it_goes_on_from_its_state(self, cut):
        def server():
            make_schedule = lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)
            return Server(model([0.0]), None, make(FedAdam), make_schedule)

        whole, first, resumed = server(), server(), server()
        self.steps(first, cut)
        resumed.replace_model(first.model)
        resumed.load_state_dict(saved(first.state_dict()))
        self.steps(resumed, 5 - cut)
        self.steps(whole, 5)
        assert torch.equal(resumed.model.params, whole.model.params)

    def test_one_that_waits_for_a_metric_is_refused(self):
        with pytest.raises(ConfigurationError, match="needs a metric"):
            Server(model([0.0]), None, sgd(lr=1.0), torch.optim.lr_scheduler.ReduceLROnPlateau)
