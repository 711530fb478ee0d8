"""`EncryptedMean` over sites as processes: the simulation's model, and what happens where sites die."""

import csv

import pytest
from flower.site_processes import (
    OF_RUNS,
    Between,
    configuration,
    farthest,
    over_network,
    simulated,
    three_sites,
)
from flower.test_same_bits import ENCRYPTED, NOISE, Killing

from fl_lightning.core.errors import ClientFailure, ConfigurationError, RoundFailure
from fl_lightning.flower.messages import Answer, Order
from fl_lightning.flower.sums import KEY, MESSAGE, NONCE, TOTAL

pytest.importorskip("tenseal", reason="needs the extra he")
pytestmark = OF_RUNS


class Listening(Between):
    """A channel that counts what goes over it, round by round, and remembers it."""

    def __init__(self, sites):
        super().__init__(sites)
        self.up, self.down, self._round = {}, {}, 0
        self.orders, self.answers = [], []

    def send(self, site, message, ttl):
        order = Order.from_bytes(message, limit=2**30)
        self._round = order.round
        self.orders.append(message)
        if order.kind in ("train", "sum"):
            self.down[order.round] = self.down.get(order.round, 0) + len(message)
        self._channel.send(site, message, ttl)

    def receive(self, seconds):
        came = self._channel.receive(seconds)
        for _, answer in came:
            self.answers.append(answer)
            self.up[self._round] = self.up.get(self._round, 0) + len(answer)
        return came


def logging(root):
    logger = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": str(root)},
    }
    return configuration(trainer__max_epochs=2, trainer__logger=logger, **ENCRYPTED)


def test_a_run_over_sites_has_the_model_of_its_simulation(tmp_path):
    config = logging(tmp_path / "network")
    with three_sites(config) as sites:
        channel = Listening(sites)
        network = over_network(sites, config, tmp_path / "network", channel=channel)
        key = (sites.folder / "a.key").read_bytes()
    alone = simulated(logging(tmp_path / "alone"), tmp_path / "alone")
    assert network["epoch"] == alone["epoch"] == 1
    assert farthest(network, alone) <= NOISE
    for told, heard in (("up", channel.up), ("down", channel.down)):
        per_round = logged(tmp_path / "network", f"round/total_bytes_{told}")
        # a site's answer is shared out to its clients, and a byte may be left over
        assert per_round[1] == pytest.approx(heard[1], abs=20)
    # a float64 for each number of the sum, and what answers have around their messages
    predicted = logged(tmp_path / "alone", "round/total_bytes_up")[1]
    assert logged(tmp_path / "network", "round/total_bytes_up")[1] == pytest.approx(
        predicted, rel=0.03
    )
    heard = [*channel.orders, *channel.answers]
    assert not any(key in message or key.hex().encode() in message for message in heard)
    # of a client goes up what is encrypted and its nonce; one site gets one sum a round, and no client's message
    answers = [Answer.from_bytes(each, limit=2**30) for each in channel.answers]
    names = {name.partition("/")[2] for a in answers for name in a.tensors if name[0].isdigit()}
    assert names == {MESSAGE, NONCE}
    orders = [Order.from_bytes(each, limit=2**30) for each in channel.orders]
    given = [sorted(order.tensors) for order in orders if order.kind == "sum"]
    assert {name for names in given for name in names} == {KEY, TOTAL}
    assert sum(TOTAL in names for names in given) == 2


def logged(root, name):
    """Return what was logged in every round."""
    [file] = root.rglob("metrics.csv")
    with file.open() as opened:
        return [float(row[name]) for row in csv.DictReader(opened) if row[name]]


class Losing(Killing):
    """A channel on which sites die for good as they are asked for a stage of the first sum."""

    def __init__(self, sites, stage, only=None):
        super().__init__(sites)
        self._stage, self._only = stage, only

    def send(self, site, message, ttl):
        order = Order.from_bytes(message, limit=2**30)
        is_stage = order.kind == "sum" and order.options["stage"] == self._stage
        if is_stage and order.round == 0 and site not in self.killed and self._only in (None, site):
            self.killed.append(site)
            self._sites.kill(site)
        self._channel.send(site, message, ttl)


@pytest.mark.slow
@pytest.mark.parametrize("on_failure", ["skip", "raise"])
def test_a_site_that_does_not_come_back_is_left_out(on_failure, tmp_path):
    config = configuration(
        federation__on_client_failure=on_failure,
        federation__cohort={"class_path": "fl_lightning.AllClients"},
        trainer__max_epochs=1,
        **ENCRYPTED,
    )
    with three_sites(config) as sites:
        channel = Losing(sites, "encrypt", only="c")  # a opens
        if on_failure == "raise":
            with pytest.raises(
                ClientFailure, match="client 4: at site c: it left the encrypted sum"
            ):
                over_network(sites, config, tmp_path / "network", channel=channel, deadline=15.0)
            return
        network = over_network(sites, config, tmp_path / "network", channel=channel, deadline=15.0)
    whole = simulated(config, tmp_path / "alone")
    assert farthest(network, whole) > NOISE


OPENER = r"round 1: site . has not opened the encrypted sum: .*within 15 s\. .*--resume last"


@pytest.mark.slow
def test_an_opener_that_does_not_come_back_ends_the_run_with_a_sentence(tmp_path):
    config = configuration(trainer__max_epochs=1, **ENCRYPTED)
    with (
        three_sites(config) as sites,
        pytest.raises(RoundFailure, match=OPENER),
    ):
        over_network(
            sites, config, tmp_path / "network", channel=Losing(sites, "open"), deadline=15.0
        )


@pytest.mark.slow
def test_sites_with_different_keys_are_refused_at_the_door(tmp_path):
    config = configuration(**ENCRYPTED)
    with three_sites(config) as sites:
        sites.kill("b")
        (sites.folder / "b.key").write_bytes(bytes(32))
        sites.start("b")
        with pytest.raises(ConfigurationError, match="a has another sum_key than b"):
            over_network(sites, config, tmp_path / "network")
