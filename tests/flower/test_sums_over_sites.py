"""A secure sum over sites: the sum of who stayed, and nothing else, whatever server and sites do."""

from dataclasses import replace
from secrets import token_bytes

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flower.made_up_messages import NUMBERS
from flower.sum_sites import CLIENTS, SITE_OF, SITES, SumSites, remote, training
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.flower.documents import document_of, read_document
from fl_lightning.flower.messages import Answer, Order, digest
from fl_lightning.flower.server.sums import SumOverSites
from fl_lightning.flower.site.ledger import PrivacyBudget
from fl_lightning.flower.sums import SecureStage, rules_of, trained_on
from fl_lightning.secure.protocol.session import AbortedError, ProtocolStage, Session
from fl_lightning.secure.secure_sum import SecureSum

pytestmark = pytest.mark.filterwarnings("ignore:client . at site")


def session(run="c" * 32, active=False, size=3, **options):
    given = {"round_index": 0, "num_clients": 6, "threshold": 5, "bits": 20}
    return Session(run=run, size=size, active=active, **given | options)


def public(key):
    return key.public_key().public_bytes_raw()


class Sites(SumSites):
    def __init__(self, folder, active=False, threshold=2 / 3, **policy):
        self.keys, self.silent = {}, {}
        files = {name: folder / f"{name}.key" for name in SITES}
        for name, file in files.items():
            file.write_bytes(token_bytes(32))
            self.keys[name] = public(Ed25519PrivateKey.from_private_bytes(file.read_bytes()))
        vectors = {c: np.array([c, 1, 2**20 - 1], np.uint32) for c in CLIENTS}
        rules = rules_of(SecureSum(bits=20, active=active, threshold=threshold))
        self._given = {name: {"signing_key": file} for name, file in files.items()}
        peers = {site: key.hex() for site, key in self.keys.items()}
        super().__init__(folder, vectors, rules, peers=peers, **policy)
        self.before = self._lose_keys

    def start(self, name):
        self.policies[name] |= self._given[name]
        super().start(name)

    def _lose_keys(self, site, asked):
        if self.silent.get(site, 9) <= asked.options["stage"]:
            self.start(site)


def added(sites, agreed, clients=CLIENTS, lr=0.1):
    lost = {}
    told = trained_on(training(lr))
    adds = SumOverSites(remote(sites), lost.__setitem__, sites.keys, lambda: told)
    return adds(agreed, clients), lost


@pytest.mark.parametrize(("active", "told"), [(False, 0.1), (True, 0.0)])
def test_sites_that_were_given_different_orders_are_in_no_sum(active, told, tmp_path):
    """The attack: rate 0 for all but one site, whose update then is the sum."""
    sites = Sites(tmp_path, active)
    for name in "bc":
        sites.train(name, lr=0.0)
    with pytest.raises(AbortedError, match=r"[24] clients answered at stage ADVERTISE"):
        added(sites, session(active=active), lr=told)


@pytest.mark.parametrize(
    "policy", [{"most_epsilon": PrivacyBudget(epsilon=1.0)}, {"fewest_in_secure_sum": 6}]
)
def test_what_a_sites_policy_forbids_is_no_sum(policy, tmp_path):
    """With a budget it is in no sum that believes the server; it says how few a sum may hide among."""
    sites = Sites(tmp_path, **policy)
    with pytest.raises(AbortedError, match="0 clients answered at stage ADVERTISE"):
        added(sites, session())


class TwoFaced:
    """A channel that tells each site of the purpose that it expects."""

    def __init__(self, sites, purposes):
        self._sites, self._purposes, self._sent = sites, purposes, {}
        self.sites, self.keys = sites.sites, sites.keys

    def receive(self, seconds):
        came = [(site, Answer.from_bytes(c, limit=10**6)) for site, c in self._sites.receive(0)]
        return [(site, replace(a, order=self._sent[site]).to_bytes()) for site, a in came]

    def send(self, site, message, ttl):
        order = Order.from_bytes(message, limit=10**6)
        self._sent[site] = digest(message)
        told = {**order.options["session"], "purpose": self._purposes[site]}
        options = {**order.options, "session": told}
        self._sites.send(site, replace(order, options=options).to_bytes(), ttl)


def test_a_server_that_tells_each_site_what_it_expects_has_no_sum_either(tmp_path):
    sites = Sites(tmp_path, active=True)
    purposes = {name: trained_on(training(0.1 if name == "a" else 0.0)) for name in SITES}
    for name in "bc":
        sites.train(name, lr=0.0)
    with pytest.raises(AbortedError, match="clients answered at stage"):
        added(TwoFaced(sites, purposes), session(active=True))


@pytest.mark.parametrize(
    ("stage", "active"),
    [
        *((s, False) for s in list(ProtocolStage)[1:] if s != ProtocolStage.AGREE),
        (ProtocolStage.MASK, True),
        (ProtocolStage.AGREE, True),
    ],
)
def test_a_site_that_is_killed_between_stages_is_left_out_or_counted(stage, active, tmp_path):
    sites = Sites(tmp_path, active, threshold=2 / 3 if active else 1 / 2)
    sites.silent = {"c": stage}
    agreed = session(active=active, num_clients=6, threshold=5 if active else 4)
    if active:  # four of six are too few against a server that may lie
        with pytest.raises(AbortedError, match=f"4 clients answered at stage {stage.name}"):
            added(sites, agreed)
        return
    outcome, lost = added(sites, agreed)
    stayed = CLIENTS if stage > ProtocolStage.MASK else [0, 1, 2, 3]
    assert outcome.total.tolist() == [sum(stayed), len(stayed), 2**20 - len(stayed)]
    assert sorted(lost) == sorted(set(CLIENTS) - set(stayed))
    assert all(f"at site c: it left the secure sum at stage {stage.name}" in lost[c] for c in lost)


class Numbers:
    """Has site c answer with numbers at a stage of the protocol."""

    def __init__(self, stage, numbers):
        self.stage, self.numbers, self.answers = stage, numbers, 0

    def __call__(self, content):
        answer = Answer.from_bytes(content, limit=10**6)
        self.answers += answer.site == "c"
        if answer.site != "c" or self.answers != self.stage:
            return content
        return replace(answer, tensors=dict.fromkeys(answer.tensors, self.numbers)).to_bytes()


@pytest.mark.parametrize(
    ("numbers", "place"), [*zip(NUMBERS, [0, 1, 2, 3, 1, 2, 3, 0, 2, 3, 0, 1], strict=True)]
)
def test_numbers_in_place_of_a_message_leave_the_site_out(place, numbers, tmp_path):
    sites = Sites(tmp_path, threshold=1 / 2)
    sites.sent = Numbers(place + 1, NUMBERS[numbers])
    agreed = session(threshold=4)
    stage = agreed.stages[place]
    outcome, lost = added(sites, agreed)
    stayed = CLIENTS if stage > ProtocolStage.MASK else [0, 1, 2, 3]
    assert outcome.total.tolist() == [sum(stayed), len(stayed), 2**20 - len(stayed)]
    assert sorted(lost) == sorted(set(CLIENTS) - set(stayed))


def test_a_round_that_is_added_again_gives_the_same_sum_and_no_other(tmp_path):
    sites = Sites(tmp_path, threshold=1 / 2)
    first, _ = added(sites, session(run="1" * 32, threshold=4))
    for name in SITES:
        sites.start(name)  # what they have told is on their disks
    with pytest.raises(AbortedError, match="0 clients answered at stage ADVERTISE"):
        added(sites, session(run="1" * 32, threshold=4))  # a run of the protocol is used once
    again, _ = added(sites, session(run="2" * 32, threshold=4))
    assert again.total.tolist() == first.total.tolist()
    with pytest.raises(AbortedError, match="0 clients answered at stage ADVERTISE"):
        added(sites, session(run="4" * 32, threshold=3, num_clients=4), [0, 1, 2, 3])
    sites.silent = {"c": ProtocolStage.MASK}  # the server would learn what c's vectors are
    with pytest.raises(AbortedError, match="0 clients answered at stage REVEAL"):
        added(sites, session(run="3" * 32, threshold=4))


@pytest.mark.parametrize(
    "change",
    [
        {"threshold": 4},
        {"active": False},
        {"bits": 19},
        {"min_survivors": 6},
        {"num_neighbours": 4, "threshold": 3},
    ],
)
def test_a_server_cannot_change_what_the_configuration_says(change, tmp_path):
    sites, agreed = Sites(tmp_path, active="active" in change), {"active": "active" in change}
    with pytest.raises(AbortedError, match="0 clients answered at stage ADVERTISE"):
        added(sites, session(**agreed | change))
    outcome, lost = added(sites, session(**agreed))  # and nothing has been used up
    assert outcome.total.tolist() == [15, 6, 2**20 - 6]
    assert (outcome.survivors, lost) == (frozenset(range(6)), {})
    assert min(outcome.cost.bytes_up.values()) > 0


def test_keys_that_a_site_does_not_know_are_refused(tmp_path):
    sites = Sites(tmp_path, active=True)
    sites.keys["c"] = public(
        Ed25519PrivateKey.generate()
    )  # the server says so, a and b know better
    with pytest.raises(AbortedError, match="answered at stage"):
        added(sites, session(active=True))


@settings(max_examples=20)
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7), site=st.sampled_from(sorted(SITES)))
def test_a_changed_answer_is_never_added(place, bit, site, tmp_path_factory):
    sites = Sites(tmp_path_factory.mktemp("sums"), threshold=1 / 2)

    def change(content):
        changed = bytearray(content)
        if content.find(b'"site":"' + site.encode()) >= 0:
            changed[place % len(content)] ^= 1 << bit
        return bytes(changed)

    sites.sent = change
    try:
        outcome, _ = added(sites, session(threshold=4))
    except AbortedError:
        return
    stayed = sorted(outcome.survivors)
    assert outcome.total.tolist() == [sum(stayed), len(stayed), 2**20 - len(stayed)]


AGREED = SecureStage(2, session(), tuple(CLIENTS), tuple(SITE_OF[c] for c in CLIENTS))


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("", {"stage": 9}),
        ("", {"session": None}),
        ("", {"clients": [0, 1]}),
        ("", {"sites": "abcdef"}),
        ("session", {"size": "3"}),
        ("session", {"bits": 65}),
        ("session", {"more": 1}),
    ],
)
def test_what_is_not_agreed_is_refused(place, change):
    options = document_of(AGREED)
    assert read_document(SecureStage, options) == AGREED
    (options[place] if place else options).update(change)
    with pytest.raises(ValueError, match=r"."):
        read_document(SecureStage, options)
