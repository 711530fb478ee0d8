"""Lines of orders: a site has one at a time, each is answered once, and what is lost is asked again."""

import re
import time

import pytest

from fl_lightning.flower.messages import Answer, ClientAnswer, Order, digest
from fl_lightning.flower.server.correspondence import Correspondence

RUN, CONFIGURATION = "a" * 32, "b" * 64


def order(number, kind="train", client=0):
    return Order(
        kind=kind,
        run=RUN,
        configuration=CONFIGURATION,
        round=number,
        clients=() if kind == "hello" else (client,),
        counted={} if kind == "hello" else {client: -1},
    )


def answer(site, content, **given):
    return Answer(site=site, order=digest(content), **given).to_bytes()


class Sites:
    """A channel whose sites have the outcomes of a script, and answer when it is at its end."""

    def __init__(self, **scripts):
        self._scripts = scripts
        self.sent, self._came = [], []

    def sites(self):
        return sorted(self._scripts)

    def send(self, site, message, ttl):
        given = Order.from_bytes(message, limit=2**20)
        self.sent.append((site, given.kind, given.round))
        script = self._scripts[site]
        outcome = script.pop(0) if script else "answers"
        if outcome == "answers":
            self._came.append((site, answer(site, message)))
        elif outcome is not None:
            self._came.append((site, None if outcome == "lost" else outcome))

    def receive(self, seconds):
        if not self._came:
            time.sleep(min(seconds, 0.05))
        came, self._came = self._came[:1], self._came[1:]
        return came


def asked(replies):
    return [(reply.site, reply.order.round, reply.answer is not None) for reply in replies]


def test_posted_orders_stand_in_line_and_are_answered_once():
    channel = Sites(a=[], b=[])
    correspondence = Correspondence(channel)
    for number in (3, 3, 5):
        correspondence.post("a", order(number, client=number))
    correspondence.post("b", order(4))
    assert channel.sent == [("a", "train", 3), ("b", "train", 4)]  # one at a time
    replies = [correspondence.next_reply() for _ in range(4)]
    assert sorted(asked(replies)) == [
        ("a", 3, True),
        ("a", 3, True),
        ("a", 5, True),
        ("b", 4, True),
    ]
    assert [n for site, _, n in channel.sent if site == "a"] == [3, 3, 5]


def test_a_question_comes_next_and_no_reply_is_lost_over_it():
    channel = Sites(a=[], b=[])
    correspondence = Correspondence(channel)
    for number in (1, 2):
        correspondence.post("a", order(number))
    [reply] = correspondence.ask({"a": order(7, kind="evaluate")})
    assert reply.order.round == 7
    assert [n for _, _, n in channel.sent] == [1, 7, 2]
    assert [correspondence.next_reply().order.round for _ in range(2)] == [1, 2]


def test_a_site_that_is_lost_is_greeted_and_asked_again_while_others_go_on():
    channel = Sites(a=["answers", "lost"], b=[])
    correspondence = Correspondence(channel)
    correspondence.greet(lambda: order(0, kind="hello"), wanted=2)
    correspondence.post("a", order(1))
    correspondence.post("b", order(2))
    assert asked([correspondence.next_reply()]) == [("b", 2, True)]
    assert asked([correspondence.next_reply()]) == [("a", 1, True)]
    told = [(kind, number) for site, kind, number in channel.sent if site == "a"]
    assert told == [("hello", 0), ("train", 1), ("hello", 0), ("train", 1)]


def test_a_site_that_does_not_answer_a_greeting_holds_up_no_other_and_has_one_deadline():
    channel = Sites(a=["answers", None], b=[], c=[])
    correspondence, hello = Correspondence(channel, deadline=1.0), order(0, kind="hello")
    correspondence.greet(lambda: hello, wanted=3)
    channel.sent.clear()
    began = time.monotonic()
    *others, last = correspondence.ask({"a": order(1), "b": order(1), "c": hello}, greet=True)
    assert sorted(asked(others)) == [("b", 1, True), ("c", 0, True)]
    assert asked([last]) == [("a", 1, False)]
    assert time.monotonic() - began < 2.0
    assert [kind for site, kind, _ in channel.sent if site == "a"] == ["hello"]
    assert [kind for site, kind, _ in channel.sent if site == "b"] == ["hello", "train"]
    assert [kind for site, kind, _ in channel.sent if site == "c"] == ["hello"]


def test_silence_ends_at_the_deadline_of_each_order_and_a_late_answer_is_not_another_ones():
    late = answer("a", order(1).to_bytes())
    channel = Sites(a=["answers", None, late], b=[])
    correspondence = Correspondence(channel, deadline=2.5)
    correspondence.greet(lambda: order(0, kind="hello"), wanted=2)
    correspondence.post("a", order(1))
    correspondence.post("a", order(2))
    first = correspondence.next_reply()
    assert asked([first]) == [("a", 1, False)]
    assert first.reason == "it did not answer within 2.5 s"
    assert asked([correspondence.next_reply()]) == [("a", 2, True)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"site": "b"}, "its answer has the name of site b"),
        ({"clients": (ClientAnswer(client=9),)}, r"for clients that were not asked: \[9\]"),
    ],
)
def test_an_answer_of_another_site_or_for_other_clients_is_none(given, said):
    content = order(1).to_bytes()
    channel = Sites(a=[answer(given.pop("site", "a"), content, **given)])
    [reply] = Correspondence(channel).ask({"a": order(1)})
    assert reply.answer is None
    assert re.search(said, reply.reason)


def test_what_nobody_wants_to_know_any_more_is_not_sent_and_leaves_the_lines_free():
    channel = Sites(a=[None])
    correspondence = Correspondence(channel)
    for number in (1, 2):
        correspondence.post("a", order(number))
    correspondence.forget_posted()
    [reply] = correspondence.ask({"a": order(9, kind="evaluate")})
    assert [n for _, _, n in channel.sent] == [1, 9]
    assert reply.order.round == 9
    correspondence = Correspondence(Sites(a=[], b=[None]))
    replies = correspondence.ask({site: order(1) for site in "ab"})
    assert next(replies).site == "a"
    replies.close()
    assert [r.order.round for r in correspondence.ask({"b": order(5)})] == [5]
