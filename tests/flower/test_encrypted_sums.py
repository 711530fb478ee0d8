"""Encrypted sums over sites: only the sum of enough clients is ever opened, whatever the server asks for."""

from dataclasses import replace
from secrets import token_bytes

import numpy as np
import pytest
import torch
from flower.made_up_messages import NUMBERS
from flower.sum_sites import CLIENTS, RUN, SITE_OF, SITES, SumSites, order, remote
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fl_lightning import ConfigurationError, RoundFailure
from fl_lightning.core.container import as_tensor
from fl_lightning.flower.documents import document_of, read_document
from fl_lightning.flower.messages import OrderRefused
from fl_lightning.flower.policy import Refused
from fl_lightning.flower.server import sums as server_sums
from fl_lightning.flower.server.remote_clients import SiteFacts
from fl_lightning.flower.server.sums import EncryptedOverSites
from fl_lightning.flower.site import sums as site_sums
from fl_lightning.flower.sums import (
    KEY,
    MESSAGE,
    NONCE,
    OPENED,
    TOTAL,
    EncryptedStage,
    SumKey,
    check_encrypted,
)
from fl_lightning.secure.encrypted_mean import EncryptedSum
from fl_lightning.secure.encryption.ciphertext_numbers import CKKSParameters, Sender
from fl_lightning.secure.encryption.ckks import FLOOD, CKKSServer, ciphertext_bytes
from fl_lightning.secure.encryption.encrypted_update import CKKSLayout

pytest.importorskip("tenseal", reason="needs the extra he")
SIZE = 20
RULES = {"scheme": "ckks", "degree": 8192}


class Sites(SumSites):
    def __init__(self, folder, **policy):
        folder.mkdir(exist_ok=True)
        (folder / "sum.key").write_bytes(token_bytes(32))
        generator = torch.Generator().manual_seed(0)
        values = torch.rand(6, SIZE, generator=generator, dtype=torch.float64)
        vectors = {c: values[c].numpy() for c in CLIENTS}
        super().__init__(folder, vectors, RULES, sum_key=folder / "sum.key", **policy)


def added(sites, clients=CLIENTS, round_index=0):
    lost = {}
    adds = EncryptedOverSites(remote(sites), lost.__setitem__)
    return adds(CKKSLayout(SIZE, round_index=round_index), clients), lost


def expected(sites, clients=CLIENTS):
    return torch.from_numpy(sum(sites.vectors[c] for c in clients))


def test_the_opened_sum_is_that_of_the_vectors_and_shows_neither_them_nor_keys(tmp_path):
    sites = Sites(tmp_path)
    opened, lost = added(sites)
    assert (opened.total - expected(sites)).abs().max() < 6 * FLOOD
    assert opened.survivors == frozenset(CLIENTS)
    assert lost == {}
    ciphertext = 213_000
    assert all(ciphertext < opened.cost.bytes_up[c] < 2.5 * ciphertext for c in CLIENTS)
    told = [*opened.cost.bytes_up.values(), *opened.cost.bytes_down.values()]
    assert sum(told) == pytest.approx(sum(map(len, sites.heard)), abs=len(sites.heard))
    # neither a key nor a vector is ever on the wire
    sealed = (tmp_path / "a" / "sealed.key").read_bytes()
    keys = SumKey(tmp_path / "sum.key").run_key(sealed, RUN, CKKSParameters())
    secret = [
        (tmp_path / "sum.key").read_bytes(),
        keys.tags,
        keys.secret[100:132],
        keys.secret[-32:],
    ]
    for vector in sites.vectors.values():
        for kind in (np.float64, np.float32):
            data = vector.astype(kind).tobytes()
            secret += [data[:8], data[-8:]]
    heard = b"".join(sites.heard)
    assert sealed in heard  # so that it would be found
    assert not any(each in heard for each in secret)
    assert not any(each.hex().encode() in heard for each in secret)


def test_many_large_vectors_are_asked_for_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr(server_sums, "MOST_BYTES", 1)
    sites = Sites(tmp_path)
    opened, _ = added(sites)
    assert (opened.total - expected(sites)).abs().max() < 6 * FLOOD
    assert max(map(len, sites.heard)) < 2 * 213_000


def test_a_site_that_was_started_again_goes_on(tmp_path):
    sites = Sites(tmp_path)
    sites.before = lambda site, asked: sites.start(site)  # ahead of every order
    opened, lost = added(sites)
    assert (opened.total - expected(sites)).abs().max() < 6 * FLOOD
    assert lost == {}
    again, _ = added(sites)  # by a server that was started again
    assert (again.total - expected(sites)).abs().max() < 6 * FLOOD


def test_one_sum_is_not_opened_until_the_mean_of_its_noise_is_gone(tmp_path, monkeypatch):
    assert site_sums.MOST_OPENINGS < 100
    monkeypatch.setattr(site_sums, "MOST_OPENINGS", 3)
    sites = Sites(tmp_path)
    opened = [added(sites)[0].total for _ in range(3)]
    assert len({tuple(each.tolist()) for each in opened}) == 3
    sites.start("a")
    with pytest.raises(RoundFailure, match="site a has not opened the encrypted sum"):
        added(sites)


def fails_at(sites, name, stage):
    def before(site, asked):
        if site == name and asked.options["stage"] == stage:
            raise OrderRefused("lost" if stage == "open" else "sum", "it is not there")

    sites.before = before


def test_clients_of_a_site_that_is_gone_are_left_out_and_named(tmp_path):
    sites = Sites(tmp_path)
    fails_at(sites, "b", "encrypt")
    opened, lost = added(sites)
    assert (opened.total - expected(sites, (0, 1, 4, 5))).abs().max() < 6 * FLOOD
    assert sorted(lost) == [2, 3]
    assert all("at site b: it left the encrypted sum" in reason for reason in lost.values())
    sites.before = lambda site, asked: None  # the server would learn what b's vectors are
    with pytest.raises(RoundFailure, match="site a has not opened the encrypted sum"):
        added(sites)


@pytest.mark.parametrize("numbers", ["bf16", "a table", "bytes", "no bytes", "infinite"])
def test_numbers_in_place_of_a_message_leave_the_site_out_or_end_the_run(numbers, tmp_path):
    sites, lies = Sites(tmp_path), {"b": "encrypt"}

    def change(asked, answer):
        if answer.failure or lies.get(answer.site) != asked.options["stage"]:
            return answer
        return replace(answer, tensors=dict.fromkeys(answer.tensors, NUMBERS[numbers]))

    sites.change = change
    opened, lost = added(sites)
    assert opened.survivors == {0, 1, 4, 5}
    assert sorted(lost) == [2, 3]
    lies["a"] = "open"
    with pytest.raises(RoundFailure, match=r"site a has not opened the encrypted sum: its answer"):
        added(sites)
    fresh = Sites(tmp_path / "fresh")
    fresh.change, lies["a"] = change, "key"
    with pytest.raises(RoundFailure, match=r"did not make the encryption key|0 vectors are left"):
        added(fresh)


def test_a_site_that_requires_more_clients_than_there_are_is_left_out(tmp_path):
    sites = Sites(tmp_path)

    def change(asked, answer):
        is_lie = answer.site == "b" and asked.options["stage"] == "encrypt"
        return replace(answer, options={"fewest": 10**6}) if is_lie else answer

    sites.change = change
    opened, lost = added(sites)
    assert opened.survivors == {0, 1, 4, 5}
    assert sorted(lost) == [2, 3]
    assert all(
        "requires 1000000 clients in a sum, and 6 have trained" in why for why in lost.values()
    )


def test_too_few_clients_are_not_added_or_not_opened(tmp_path):
    sites = Sites(tmp_path)
    fails_at(sites, "b", "encrypt")
    with pytest.raises(RoundFailure, match="1 vectors are left for the encrypted sum"):
        added(sites, (0, 2, 3))
    sites = Sites(tmp_path / "wary", fewest_in_secure_sum=6)
    fails_at(sites, "b", "encrypt")
    with pytest.raises(RoundFailure, match=r"round 1: site a has not opened .* policy forbids"):
        added(sites)


# A server that asks for what it should not.


@pytest.fixture
def round_of_a(tmp_path):
    """Sites that have encrypted for a, with what the server knows then."""
    return Encrypted(Sites(tmp_path))


class Encrypted:
    """What a server has of a round: the run's key, everybody's messages, and what it agreed on."""

    def __init__(self, sites, clients=CLIENTS, opener="a", round_index=0):
        self.sites = sites
        self.agreed = EncryptedStage("key", opener, clients)
        self.layout = CKKSLayout(SIZE, round_index=round_index)
        self.key = self.ask(opener, "key", ()).tensors[KEY]
        self.messages, self.senders = {}, {}
        for site in sorted({SITE_OF[c] for c in clients}):
            self.encrypt(site)

    def encrypt(self, site):
        done = self.ask(site, "encrypt", SITES[site])
        for client in SITES[site]:
            data = done.tensors[f"{client}/{MESSAGE}"].numpy().tobytes()
            nonce = done.tensors[f"{client}/{NONCE}"].numpy().tobytes()
            self.messages[client] = self.layout.decoded(data)
            self.senders[client] = Sender(client, nonce, done.options["fewest"])

    def ask(self, site, stage, clients, senders=(), **tensors):
        given = {KEY: self.key, **tensors} if stage != "key" else {}
        options = document_of(replace(self.agreed, stage=stage, senders=senders))
        about = options, given, self.layout.round_index
        return self.sites.sums[site].follow(order("sum", clients, *about))

    def total(self, clients):
        return CKKSServer(self.layout).sum([self.messages[c] for c in clients])

    def opened(self, site="a", clients=CLIENTS, total=None, senders=None):
        total = self.total(clients) if total is None else total
        named = [self.senders[c] for c in clients] if senders is None else senders
        tensors = {TOTAL: as_tensor(total.encode())}
        return self.ask(site, "open", (), tuple(named), **tensors).tensors[OPENED]


def test_no_clients_own_vector_is_opened(round_of_a):
    for client in CLIENTS:
        alone = round_of_a.messages[client]
        with pytest.raises(OrderRefused, match="not the sum"):
            round_of_a.opened(total=alone)
        with pytest.raises(OrderRefused, match="not the sum"):
            round_of_a.opened(total=alone, senders=[round_of_a.senders[client]] * 6)
        with pytest.raises(Refused, match="the sum is over 1 clients"):
            round_of_a.opened(clients=(client,))
    with pytest.raises(OrderRefused, match="not the sum"):  # of two, called three
        round_of_a.opened(total=round_of_a.total((0, 1)), clients=(0, 1, 2))


def test_one_sum_of_a_round_is_opened_and_by_one_site(round_of_a):
    values = round_of_a.opened()
    assert (values - expected(round_of_a.sites)).abs().max() < 6 * FLOOD
    assert not torch.equal(values, round_of_a.opened())  # the same sum, under new noise
    round_of_a.sites.start("a")
    for clients in (CLIENTS[1:], CLIENTS[:3]):
        with pytest.raises(OrderRefused, match="opened the sum of"):
            round_of_a.opened(clients=clients)
    with pytest.raises(OrderRefused, match="site a opens this sum"):
        round_of_a.opened("b", CLIENTS[1:])
    round_of_a.agreed = replace(round_of_a.agreed, opener="b")
    with pytest.raises(OrderRefused, match="not the sum"):  # the messages are for a
        round_of_a.opened("b", CLIENTS[1:])
    with pytest.raises(OrderRefused, match="encrypted for a to open it"):
        round_of_a.encrypt("c")


def test_messages_of_another_round_are_not_opened(round_of_a):
    sites, before = round_of_a.sites, round_of_a
    with pytest.raises(OrderRefused, match="vectors of round 0 here"):
        Encrypted(sites, round_index=1)
    for name in SITES:
        sites.train(name, round_index=1)
    later = Encrypted(sites, opener="a", round_index=1)
    mixed = CKKSServer(later.layout).sum(
        [before.messages[0], *map(later.messages.get, CLIENTS[1:])]
    )
    for total in (before.total(CLIENTS), mixed):
        for senders in (before.senders, later.senders, {**later.senders, 0: before.senders[0]}):
            with pytest.raises(OrderRefused, match="not the sum"):
                later.opened(total=total, senders=[senders[c] for c in CLIENTS])
    with pytest.raises(OrderRefused, match="vectors of round 1 here"):
        before.opened()
    later.opened()


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_changed_sum_is_not_opened(round_of_a, place, bit):
    total = round_of_a.total(CLIENTS)
    changed = bytearray(total.ciphertexts[0])
    changed[place % len(changed)] ^= 1 << bit
    with pytest.raises(OrderRefused, match=r"not the sum|not below its modulus"):
        round_of_a.opened(total=replace(total, ciphertexts=(bytes(changed),)))


def test_clients_that_were_given_other_options_are_in_no_sum_together(tmp_path):
    sites = Sites(tmp_path)
    for name in ("b", "c"):
        sites.train(name, lr=0.0)  # their updates would be nothing
    with pytest.raises(RoundFailure, match="site a has not opened"):
        added(sites)


def test_every_sites_fewest_counts_wherever_the_sum_is_opened(tmp_path):
    sites = Sites(tmp_path)
    sites.policies["c"]["fewest_in_secure_sum"] = 6
    sites.start("c")
    taken = Encrypted(sites)
    four = (1, 2, 4, 5)
    with pytest.raises(OrderRefused, match="requires 6 clients in a sum, and it has 4"):
        taken.opened(clients=four)
    lower = [replace(taken.senders[c], fewest=2) for c in four]
    with pytest.raises(OrderRefused, match="not the sum"):
        taken.opened(clients=four, senders=lower)
    taken.opened()


def test_keys_that_no_site_has_made_for_the_run_are_refused(round_of_a):
    (round_of_a.sites.folder / "other.key").write_bytes(token_bytes(32))
    stranger = SumKey(round_of_a.sites.folder / "other.key")
    own = SumKey(round_of_a.sites.folder / "sum.key")
    parameters = CKKSParameters()
    for sealed in (
        stranger.new_run_key(RUN, parameters),
        own.new_run_key("f" * 32, parameters),
        b"",
    ):
        round_of_a.key = as_tensor(sealed)
        with pytest.raises(OrderRefused, match="not encrypted for this run"):
            round_of_a.encrypt("b")
    round_of_a.key = as_tensor(own.new_run_key(RUN, parameters))  # another one of this run
    with pytest.raises(OrderRefused, match="not the sum"):
        round_of_a.opened()


def test_vectors_for_another_scheme_are_not_encrypted(tmp_path):
    sites = Sites(tmp_path)
    sites.sums["b"].keep(sites.vectors, {"bits": 20}, order("train", SITES["b"]))
    with pytest.raises(OrderRefused, match="has no encrypted sum"):
        Encrypted(sites)


SENDER = {"client": 0, "nonce": "00" * 16, "fewest": 2}
CHANGES = [
    {"stage": "decrypt"},
    {"senders": [SENDER | {"nonce": "zz"}]},
    {"senders": [SENDER | {"nonce": "0A" * 16}]},
    {"senders": [SENDER | {"fewest": 1}]},
    {"senders": [0]},
    {"clients": [0, 0]},
    {"opener": "../x"},
    {"more": 1},
]


def test_what_is_not_agreed_is_refused(tmp_path):
    stage = EncryptedStage("open", "a", (0, 4), (Sender(4, bytes(16), 3),))
    assert read_document(EncryptedStage, document_of(stage)) == stage
    sites = Sites(tmp_path)
    options = document_of(EncryptedStage("key", "a", CLIENTS))
    for change in CHANGES:
        with pytest.raises(OrderRefused) as refused:
            sites.sums["a"].follow(order("sum", (), options | change))
        assert refused.value.category == "message", change


ONE, OTHER = "1f" * 8, "2f" * 8  # fingerprints of keys


def test_sites_must_share_one_key():
    check({"a": ONE, "b": ONE})
    with pytest.raises(
        ConfigurationError, match=r"sites without a sum_key: b\. EncryptedMean needs"
    ):
        check({"a": ONE, "b": ""})
    with pytest.raises(ConfigurationError, match="a has another sum_key than c"):
        check({"a": ONE, "b": ONE, "c": OTHER})


def test_a_sum_that_is_larger_than_a_site_takes_is_refused_at_the_door():
    size = 10_000  # three ciphertexts
    needed = 3 * ciphertext_bytes(CKKSParameters())
    check({"a": ONE, "b": ONE}, size, most_bytes=needed)
    with pytest.raises(
        ConfigurationError, match=rf"site b takes orders .*10000 numbers has {needed}"
    ):
        check({"a": ONE, "b": ONE}, size, most_bytes=needed - 1)


def check(keys, size=10, most_bytes=10**9):
    about = {"batch_size": 1, "drop_last": False, "precision": "32-true", "signing": ""}
    about["largest"] = ""
    none = {"clients": {}, "held_out": {"validation": {}, "test": {}}}
    sites = {
        site: SiteFacts(sum_key=key, most_bytes=most_bytes, **about, **none)
        for site, key in keys.items()
    }
    check_encrypted(sites, EncryptedSum(8192), size)
