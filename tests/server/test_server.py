"""The server's step: FedAvg and momentum by their formulas; buffers; what processes add up."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.update import ClientUpdate, GlobalModel
from fl_lightning.server.attacks import Forged, SignFlip
from fl_lightning.server.means.mean import Mean, OverlapMean
from fl_lightning.server.robust.krum import Bulyan, Krum
from fl_lightning.server.robust.reweighted import GeometricMedian
from fl_lightning.server.robust.rule import Median, NearestNeighbourMixing, TrimmedMean
from fl_lightning.server.server import Server, added_up, as_aggregator

X0 = [1.0, -2.0, 0.5, 0.0]
MOVES = [[0.1, -0.2, 0.0, 0.3], [-0.05, 0.1, 0.02, 0.3], [0.2, 0.0, -0.01, -0.1]]  # end - start

numbers = st.floats(-10, 10, width=32)
rounds = st.lists(
    st.tuples(st.lists(numbers, min_size=2, max_size=2), st.integers(1, 99)), min_size=1, max_size=5
)


def model(params, buffers=()):
    return GlobalModel(torch.tensor(params), torch.tensor(buffers))


def update(delta, num_examples=1, buffers=(), client_id=0):
    return ClientUpdate(client_id, torch.tensor(delta), torch.tensor(buffers), num_examples, 1)


def play(server, *updates):
    server.open_round()
    for each in updates:
        server.receive(each)
    return server.close_round()


def sgd(**options):
    return lambda params: torch.optim.SGD(params, **options)


def adam(params):
    return torch.optim.Adam(params, lr=0.1, betas=(0.8, 0.95), eps=1e-3)


def saved(state):
    """Return the state as a checkpoint would bring it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@given(start=st.lists(numbers, min_size=2, max_size=2), entries=rounds)
def test_fedavg_is_start_minus_mean_delta(start, entries):
    server, mean = Server(model(start)), Mean()
    mean.open(torch.empty(2))
    for delta, num_examples in entries:
        mean.add(update(delta, num_examples))
    norm = play(server, *(update(*entry) for entry in entries))
    assert torch.equal(server.model.params, torch.tensor(start) - mean.close())
    assert float(norm) == pytest.approx(float(mean.close().norm()))


def test_one_client_brings_its_own_model():
    start, end = [3.0, -1.0], torch.tensor([2.5, 7.0])
    server = Server(model(start))
    play(server, update((torch.tensor(start) - end).tolist(), 4))
    assert torch.equal(server.model.params, end)


@given(
    deltas=st.lists(st.lists(numbers, min_size=2, max_size=2), min_size=1, max_size=6),
    lr=st.floats(0.01, 2),
    momentum=st.floats(0.01, 0.99),
    nesterov=st.booleans(),
)
def test_momentum_is_the_heavy_ball(deltas, lr, momentum, nesterov):
    server = Server(model([1.0, -1.0]), None, sgd(lr=lr, momentum=momentum, nesterov=nesterov))
    x, velocity = np.array([1.0, -1.0]), np.zeros(2)
    for delta in deltas:
        play(server, update(delta, 2), update(delta, 2))
        velocity = momentum * velocity + np.array(delta)
        x = x - lr * (momentum * velocity + np.array(delta) if nesterov else velocity)
    np.testing.assert_allclose(server.model.params.numpy(), x, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("make_optimizer", [sgd(lr=1.0, momentum=0.9, weight_decay=0.1), adam])
def test_a_round_without_reply_changes_nothing(make_optimizer):
    server = Server(model(X0, [5.0]), None, make_optimizer)
    play(server, update(MOVES[0], buffers=[6.0]))
    params, state = server.model.params.clone(), saved(server.state_dict())
    assert play(server) == 0
    assert torch.equal(server.model.params, params)
    assert server.model.buffers.tolist() == [6.0]
    assert str(server.state_dict()) == str(state)


class TestBuffers:
    @pytest.mark.parametrize("make_optimizer", [sgd(lr=0.1, momentum=0.9, weight_decay=1.0), adam])
    def test_are_means_by_examples_whatever_the_optimizer(self, make_optimizer):
        server = Server(model([0.0], [1.0, 1.0]), Mean(weight_by_examples=False), make_optimizer)
        replies = [update([1.0], 1, [2.0, 0.0]), update([1.0], 3, [6.0, 4.0])]
        for _ in range(2):
            play(server, *replies)
            assert server.model.buffers.tolist() == [5.0, 3.0]

    @pytest.mark.parametrize(
        ("rule", "expected"),
        [
            (Median(), [2.0, 5.0]),
            (TrimmedMean(0), [20.0, 4.0]),  # of clients that count alike
            (TrimmedMean(1), [7 / 3, 4.0]),
            # rules that judge whole updates take the median
            *((rule, [2.0, 5.0]) for rule in (Krum(1), Bulyan(0), GeometricMedian())),
            (NearestNeighbourMixing(Median(), 1), [2.0, 5.0]),
        ],
    )
    @pytest.mark.parametrize("forged", [False, True])
    def test_of_a_robust_rule_withstand_poison(self, rule, expected, forged):
        aggregator = Forged(as_aggregator(rule), SignFlip(), [4], 0) if forged else rule
        server = Server(model([0.0], [0.0, 0.0]), aggregator)
        buffers = [[1.0, 5.0], [2.0, 5.0], [3.0, 7.0], [2.0, 2.0], [92.0, 1.0]]
        replies = [update([1.0], n + 1, b, n) for n, b in enumerate(buffers)]
        play(server, *replies)
        assert server.model.buffers.tolist() == pytest.approx(expected)


class TestModel:
    def test_is_a_copy_of_what_came_in(self):
        start = model([1.0], [2.0])
        server = Server(start)
        play(server, update([1.0], 1, [3.0]))
        assert (start.params.tolist(), start.buffers.tolist()) == ([1.0], [2.0])
        assert not server.model.params.requires_grad

    def test_can_be_replaced_under_the_same_optimizer(self):
        server = Server(model([1.0]), None, sgd(lr=1.0, momentum=0.5))
        play(server, update([4.0]))
        server.replace_model(model([10.0]))
        play(server, update([0.0]))
        assert server.model.params.tolist() == [8.0]


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.SparseAdam, lambda p: None, list])
def test_optimizers_that_cannot_step_on_a_vector_are_refused(make):
    with pytest.raises(ConfigurationError, match="server_optimizer"):
        Server(GlobalModel(torch.zeros(3), torch.empty(0)), make_optimizer=make)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    ],
)
def test_what_no_client_of_a_round_may_move_stays_whatever_the_optimizer_remembers(optimizer):
    server = Server(model(X0), OverlapMean(), optimizer)
    for round_, allowed in enumerate([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 0]]):
        active = torch.tensor(allowed) > 0
        before = server.model.params.clone()
        server.open_round(round_)
        values = torch.tensor(MOVES[0]) * active, torch.empty(0), 3, 1
        server.receive(ClientUpdate(0, *values, active=active))
        server.close_round()
        assert torch.equal(server.model.params[~active], before[~active])
    assert not torch.equal(server.model.params, torch.tensor(X0))


@pytest.mark.parametrize(
    ("size", "dtypes"),
    [(3, [torch.float64, torch.int64]), (100_000, [torch.float32, torch.float64, torch.int64])],
)
def test_what_processes_add_up_travels_together(size, dtypes):
    """A sum of few numbers is that of double precision, rounded once."""
    own = [torch.full((size,), 1.0), torch.tensor(2.0, dtype=torch.float64), torch.tensor([3, 4])]
    sent = []

    def with_another(vector):
        sent.append(vector.dtype)
        vector += vector / 2**24 if vector.is_floating_point() else vector

    result = added_up(own, with_another)
    assert sent == dtypes
    assert [total.dtype for total in result] == [tensor.dtype for tensor in own]
    assert [total.shape for total in result] == [tensor.shape for tensor in own]
    assert result[0].unique().tolist() == [1.0]
    assert float(result[1]) == 2.0 + 2.0**-23
    assert result[2].tolist() == [6, 8]
    assert own[2].tolist() == [3, 4]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_half_precisions_travel_in_one_that_holds_both(order):
    own = [torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.bfloat16)]
    sent = []
    result = added_up([own[i] for i in order], lambda vector: sent.append(vector.dtype))
    assert sent == [torch.float32]
    assert [total.dtype for total in result] == [own[i].dtype for i in order]
