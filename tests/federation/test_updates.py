"""Updates on their way in a run: nothing where nothing is done, and real bytes, memories, refusals."""

from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from test_masks import Masked, NewMasks, some_masks
from toys import SaveEverywhere, ToyModule, federated, toy_data, weights

from fl_lightning import ConfigurationError, Federation, UniformCohort
from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.core.seeds import derive_seed
from fl_lightning.core.space import Space
from fl_lightning.core.update import ClientUpdate
from fl_lightning.server.server import Server
from fl_lightning.updates import QSGD, Affine, ErrorFeedback, PowerSGD, RandomK, Sign, TopK, path
from fl_lightning.updates.message import Message, encode
from fl_lightning.updates.path import UpdatePath
from fl_lightning.updates.payload import Dense
from fl_lightning.updates.transform import Chain, Transform

COMPRESSED = [ErrorFeedback([TopK(0.3), QSGD(4)])]


def run(updates, callbacks=(), ckpt_path=None, module=None, cohort=3, trainer=None, **options):
    options = {"local_steps": 2, "engine": "sequential", "updates": updates, **options}
    given = {"data": toy_data(batch_size=4, drop_last=True), "ckpt_path": ckpt_path}
    options |= {"cohort": UniformCohort(size=cohort), "trainer": trainer}
    module = module or partial(ToyModule, dropout=0.2)
    fitted = federated(module, ahead=callbacks, **given, **options)
    return fitted.module, fitted.federation


class NoteUpdates(Callback):
    """Notes what the server receives, and its model at every round's start."""

    def __init__(self, monkeypatch):
        self.received = []
        original = Server.receive

        def receive(server, updates):
            self.received.extend(updates)
            original(server, updates)

        monkeypatch.setattr(Server, "receive", receive)


@pytest.mark.parametrize("engine", ["sequential", "slots"])
def test_what_is_off_changes_no_bit(engine):
    """Each transform by itself is tried in `test_families_off`."""
    plain, _ = run(None, engine=engine)
    for off in ([], [ErrorFeedback([TopK(1.0), RandomK(1.0)])]):
        other, federation = run(off, engine=engine)
        assert torch.equal(weights(plain), weights(other)), off
        assert federation.rounds.record.facts().get("round/compression_error", 0.0) == 0.0


@pytest.mark.parametrize(
    "transforms",
    [
        [TopK(0.25)],
        [RandomK(0.5), Affine(8)],
        [QSGD(2)],
        [Sign(block=10)],
        [PowerSGD(1), QSGD(4, block=8)],
    ],
    ids=str,
)
def test_the_server_gets_what_a_real_message_brings_and_bytes_are_its_own(transforms, monkeypatch):
    sent = {}
    original = Chain.on_client

    def on_client(chain, payload, seed):
        sent[seed] = payload.to_dense().clone()
        return original(chain, payload, seed)

    monkeypatch.setattr(Chain, "on_client", on_client)
    noted = NoteUpdates(monkeypatch)
    module, federation = run(transforms, callbacks=[noted], trainer={"max_epochs": 1})
    shapes = Space.of_parameters(module).shapes
    chain, num_bytes = Chain(tuple(transforms)).with_shapes(shapes), 0
    assert len(noted.received) == 3
    for update in noted.received:
        seed = derive_seed(federation.seed, "update", 0, update.client_id)
        delta = sent[seed]
        payload = original(chain, Dense(delta), seed)
        arrived = chain.on_server(payload, seed, len(delta)).to_dense()
        assert torch.equal(update.delta, arrived)
        assert not torch.equal(arrived, delta)
        message = Message.of_update(
            update, space="0" * 32, round_index=0, params=payload, transforms=chain.names
        )
        num_bytes += len(encode(message))
    assert federation.rounds.record.total_bytes_up == num_bytes
    assert federation.rounds.record.facts()["round/compression_error"] > 0


def test_with_feedback_what_arrived_is_what_was_sent_but_for_the_memory(monkeypatch):
    """Of every client: Σ Δ = Σ Δ' + memory."""
    noted, deltas = NoteUpdates(monkeypatch), []
    original = path.with_memory

    def with_memory(chain, update, memory, seed):
        deltas.append(update.clone())
        return original(chain, update, memory, seed)

    monkeypatch.setattr(path, "with_memory", with_memory)
    options = {"cohort": 6, "trainer": {"max_epochs": 4}}
    _, federation = run(COMPRESSED, callbacks=[noted], **options)
    arrived, memories = {}, federation.rounds.memory
    for update in noted.received:
        arrived[update.client_id] = arrived.get(update.client_id, 0) + update.delta
    for client, total in arrived.items():
        sent = sum(deltas[1:][client::6])  # the first one told the cost
        assert torch.allclose(sent, total + memories.get("error feedback", client), atol=1e-5)


def test_another_compression_is_no_continuation(tmp_path):
    run(COMPRESSED, callbacks=[SaveEverywhere(tmp_path)], trainer={"max_epochs": 1})
    with pytest.raises(ConfigurationError, match=r"another updates.*top-k"):
        run([TopK(0.5)], ckpt_path=tmp_path / "0-end.ckpt")


def test_memories_follow_a_mask_that_changes():
    module, federation = run(COMPRESSED, callbacks=[NewMasks()], module=Masked, cohort=6)
    size = federation.rounds.clients.local.space.size
    assert weights(module).isfinite().all()
    assert {len(federation.rounds.memory.get("error feedback", c)) for c in range(6)} == {size}


class TestLowRank:
    """It looks at tensors, of which a run tells it the shapes."""

    def test_a_mask_that_changes(self):
        """The last bias is no matrix, and all others train in part: everything travels as it is."""
        options = {"callbacks": [NewMasks()], "module": Masked, "cohort": 6}
        plain, _ = run(None, **options)
        options["callbacks"] = [NewMasks()]
        other, federation = run([ErrorFeedback([PowerSGD(1)])], **options)
        assert torch.equal(weights(plain), weights(other))
        assert federation.rounds.record.facts()["round/compression_error"] == 0

    def test_whole_tensors_of_a_mask_are_matrices(self):
        def whole(module):
            masks = {"net.0.weight": torch.ones(8, 4, dtype=torch.bool)}
            return {**some_masks(module), **masks}

        _, federation = run([PowerSGD(1)], module=lambda: Masked(whole))
        space = federation.rounds.clients.local.space
        assert dict(zip(space.names, space.shapes, strict=True))["net.0.weight"] == (8, 4)
        assert federation.rounds.record.facts()["round/compression_error"] > 0

    @pytest.mark.parametrize("engine", ["sequential", "slots"])
    def test_a_block_a_tensor_gives_each_tensor_levels_of_its_own(self, engine, monkeypatch):
        noted, ways = NoteUpdates(monkeypatch), {"download": [QSGD(8, block="tensor")]}
        module, _ = run([Affine(2, block="tensor")], callbacks=[noted], engine=engine, **ways)
        space = Space.of_parameters(module)
        assert noted.received
        for update in noted.received:
            assert {len(part.unique()) for part in space.views(update.delta)} <= {1, 2, 3, 4}
            assert len(update.delta.unique()) > 4

    def test_models_on_their_way_down_have_no_low_rank(self):
        with pytest.raises(
            ConfigurationError, match=r"download: low rank 2 loses more than the rounding"
        ):
            Federation(download=[PowerSGD()])


class Halves(Transform):
    """A user's own transform."""

    name = "halves"

    def on_client(self, payload, seed):
        return Dense(payload.to_dense() / 2)

    def on_server(self, payload, seed, size):
        return Dense(payload.to_dense() * 2)


@pytest.mark.parametrize(
    "updates",
    [[Halves()], [ErrorFeedback([Halves()])]],
    ids=["alone", "with feedback"],
)
def test_a_transform_that_derives_from_nothing_takes_part(updates):
    plain, _ = run(None)
    module, _ = run(updates, download=[Halves()])
    assert torch.equal(weights(plain), weights(module))


@pytest.mark.parametrize(
    ("updates", "says"),
    [
        ([RandomK(0.5), ErrorFeedback([PowerSGD()])], r"federation\.updates: .*put it before"),
        ([QSGD(), Sign()], r"federation\.updates: .*use one quantiser"),
        ([ErrorFeedback([TopK(0.1)]), QSGD()], "one ErrorFeedback is allowed, as the last entry"),
    ],
)
def test_orders_that_make_no_sense_are_refused_at_once(updates, says):
    with pytest.raises(ConfigurationError, match=says):
        Federation(updates=updates)


def test_the_cost_is_told_before_the_first_client_trains(caplog):
    with caplog.at_level("INFO"):
        run([TopK(0.1)], trainer={"max_epochs": 1})
    told = [r.message for r in caplog.records if r.message.startswith("bytes: a client sends")]
    assert len(told) == 1
    assert "3 clients in 1 round:" in told[0]


def test_clients_with_masks_of_their_own_send_their_own_coordinates():
    active = torch.tensor([True, False, True, True])
    update = ClientUpdate(
        0, torch.tensor([4.0, 0.0, 1.0, 2.0]), torch.empty(0), 1, 1, active=active
    )
    path = UpdatePath([ErrorFeedback([TopK(1 / 3)])], seed=0)
    memory = torch.tensor([0.0, 9.0, 5.0, 0.0])
    arrival = path.send(update, 0, memory)
    assert arrival.update.delta.tolist() == [0.0, 0.0, 6.0, 0.0]
    assert arrival.memory.tolist() == [4.0, 9.0, 0.0, 2.0]


class TestDownload:
    """Clients begin from a rounded model; the server keeps its own."""

    @pytest.mark.parametrize("engine", ["sequential", "slots"])
    def test_the_server_moves_its_own_model_by_what_clients_moved_theirs(self, engine):
        """With local steps of rate 0 nobody moves, whatever the rounding."""
        module, federation = run(
            None, download=[Affine(2)], module=lambda: ToyModule(lr=0.0), engine=engine
        )
        seed_everything(0, verbose=False)
        assert torch.equal(weights(module), weights(ToyModule(lr=0.0)))
        assert federation.rounds.record.update_norm == 0

    @pytest.fixture
    def begun(self, monkeypatch):
        """Models from which clients began."""
        models, original = [], LocalTrainer.train

        def train(trainer, start, **options):
            models.append(start.params.clone())
            return original(trainer, start, **options)

        monkeypatch.setattr(LocalTrainer, "train", train)
        return models

    def test_clients_train_from_what_arrives_and_bytes_are_those_of_the_message(self, begun):
        seed_everything(0, verbose=False)
        params = Space.of_parameters(ToyModule(dropout=0.2)).read()
        _, federation = run(None, download=[QSGD(4)], trainer={"max_epochs": 1})
        payload = QSGD(4).on_client(
            Dense(params),
            derive_seed(derive_seed(federation.seed, "broadcast", 0), QSGD(4).name, 0),
        )
        assert all(torch.equal(start, payload.to_dense()) for start in begun)
        message = Message(
            "model", "0" * 32, 0, 0, payload, Dense(torch.empty(0)), transforms=(QSGD(4).name,)
        )
        assert federation.rounds.record.total_bytes_down == 3 * len(encode(message))

    def test_what_leaves_numbers_out_is_refused(self):
        with pytest.raises(ConfigurationError, match=r"top-k 0.1 leaves numbers out"):
            Federation(download=[TopK(0.1)])

    def test_what_a_hook_changes_before_the_first_round_is_what_arrives(self, begun):
        """The cost of the run is told by the model, which a hook may change after it is built."""

        class Zeros(Callback):
            def on_train_epoch_start(self, trainer, module):
                for parameter in module.parameters():
                    torch.nn.init.zeros_(parameter)

        run(None, callbacks=[Zeros()], download=[Affine(8)], trainer={"max_epochs": 1})
        assert begun
        assert not any(start.any() for start in begun)
