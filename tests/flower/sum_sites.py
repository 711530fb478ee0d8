"""Three sites of two clients each in this process, which add their vectors up."""

from fl_lightning.flower.messages import (
    Answer,
    Failure,
    Order,
    OrderRefused,
    category_of,
    digest,
)
from fl_lightning.flower.policy import Policy, Refused
from fl_lightning.flower.server.correspondence import Correspondence
from fl_lightning.flower.server.remote_clients import ClientsAtSites, Counted
from fl_lightning.flower.site.sums import SiteSums

RUN = "a" * 32
SITES = {"a": (0, 1), "b": (2, 3), "c": (4, 5)}
SITE_OF = {client: site for site, clients in SITES.items() for client in clients}
CLIENTS = tuple(sorted(SITE_OF))


def order(kind, clients=(), options=None, tensors=None, round_index=0):
    return Order(
        kind=kind,
        run=RUN,
        configuration="b" * 64,
        round=round_index,
        clients=clients,
        counted=dict.fromkeys(clients, -1),
        options=options or {},
        tensors=tensors or {},
    )


def training(lr=0.1, round_index=0):
    return order("train", (0,), {"optimizers": [[{"lr": lr}]]}, {}, round_index)


class SumSites:
    """A channel to them; each holds the vectors of a round. It listens to all.

    Args:
        folder: of all.
        vectors: by client.
        rules: of the configuration.
        policy: options of all sites' policies.
    """

    def __init__(self, folder, vectors, rules, **policy):
        self.folder, self.vectors, self.rules = folder, vectors, rules
        self.policies = {name: dict(policy) for name in SITES}
        self.sums, self.waiting, self.heard, self.round = {}, [], [], 0
        self.before = lambda site, asked: None  # something that happens to an order, or a failure
        self.change = lambda asked, answer: answer
        self.sent = lambda content: content
        for name in SITES:
            self.start(name)
            self.train(name)

    def train(self, name, lr=0.1, round_index=0):
        """Have a site keep its vectors of a round, as after an order to train."""
        self.round = round_index
        vectors = {c: self.vectors[c] for c in SITES[name]}
        self.sums[name].keep(vectors, self.rules, training(lr, round_index))

    def start(self, name):
        policy = Policy(
            name=name,
            clients={c: c for c in SITES[name]},
            socket=self.folder / "socket",
            memory=self.folder / name,
            **self.policies[name],
        )
        self.sums[name] = SiteSums(self.folder / name, policy)

    def sites(self):
        return sorted(SITES)

    def send(self, site, message, ttl):
        self.heard.append(message)
        asked = Order.from_bytes(message, limit=10**7)
        about = {"site": site, "order": digest(message)}
        try:
            self.before(site, asked)
            done = self.sums[site].follow(asked)
        except (OrderRefused, Refused) as error:
            answer = Answer(**about, failure=Failure(category_of(error)))
        else:
            given = {"options": done.options, "tensors": done.tensors}
            answer = Answer(**about, clients=tuple(done.answers), **given)
        self.heard.append(self.sent(self.change(asked, answer).to_bytes()))
        self.waiting.append((site, self.heard[-1]))

    def receive(self, seconds):
        came, self.waiting = self.waiting, []
        return came


def remote(sites):
    """Return the clients of a run as a server asks them."""
    asked = Correspondence(sites, deadline=5.0)
    clients = ClientsAtSites(asked, "seed_everything: 0", Counted(RUN), None, lambda: None)
    clients.site_of |= SITE_OF
    return clients
