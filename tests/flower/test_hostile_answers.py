"""Answers in the right form that say what no site could mean: the server does without them, and goes on."""

import tracemalloc
import warnings
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
import torchmetrics
from flower.made_up_messages import NUMBERS
from flower.site_processes import OF_RUNS, Between, configuration, last, over_network, three_sites
from flower.test_same_bits import CALIBRATION, SPARSE_SGD, built

from fl_lightning.cli.network.server import run_server
from fl_lightning.core.container import as_tensor, bytes_of, read, write
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.plain_json import MessageError
from fl_lightning.data import Digits, FederatedDataModule
from fl_lightning.flower.documents import document_of, read_document
from fl_lightning.flower.messages import Answer, Order
from fl_lightning.flower.packing import read_metrics
from fl_lightning.flower.server.correspondence import Correspondence
from fl_lightning.flower.server.elsewhere import DataElsewhere, WorkElsewhere
from fl_lightning.flower.server.remote_clients import SiteFacts, facts_of

pytestmark = OF_RUNS
LARGEST = 2**63 - 1
VALUES = [None, True, -1, 0, LARGEST, 1e308, "", "x", [], [[]], [[[]]], [[1, 2, 3]], {}, {"x": []}]


class Lying(Between):
    """A channel on which every answer of one kind from one site is another one: the next of some lies."""

    def __init__(self, sites, kind, lies, site="b"):
        super().__init__(sites)
        self._kind, self._site = kind, site
        self.lies, self.told, self._asked = list(lies), [], {}

    def send(self, site, message, ttl):
        self._asked[site] = Order.from_bytes(message, limit=2**30).kind
        super().send(site, message, ttl)

    def receive(self, seconds):
        return [(site, self._said(site, came)) for site, came in self._channel.receive(seconds)]

    def _said(self, site, came):
        if site != self._site or came is None:
            return came
        answer = Answer.from_bytes(came, limit=2**30)
        if self._asked[site] != self._kind or answer.failure or not self.lies:
            return came
        name, lie = self.lies.pop(0)
        self.told.append(name)
        return lie(answer).to_bytes()


def of_tensors(change, end=""):
    """A lie that changes the tensors of an answer whose names end so; one changed to None is left out."""

    def lie(answer):
        told = {n: change(t) if n.endswith(end) else t for n, t in answer.tensors.items()}
        return replace(answer, tensors={n: t for n, t in told.items() if t is not None})

    return lie


def of_clients(**fields):
    """A lie in fields of every client's answer."""
    return lambda answer: replace(
        answer, clients=tuple(replace(client, **fields) for client in answer.clients)
    )


def with_numbers(payload, at, number):
    """Return an update that says another number of examples or steps than its answer."""
    fields, tensors = read(bytes_of(payload), "update")
    tensors["numbers"][at] = number
    return as_tensor(write("update", fields, tensors))


def with_entries(payload, value):
    """Return an update whose entries are one number."""
    fields, tensors = read(bytes_of(payload), "update")
    entries = {n: torch.full_like(t, value) for n, t in tensors.items() if t.is_floating_point()}
    return as_tensor(write("update", fields, tensors | entries))


def in_place_of_memory(numbers):
    """A lie about all tensors but the update."""
    return lambda answer: replace(
        answer,
        tensors={n: t if n.endswith("payload") else numbers for n, t in answer.tensors.items()},
    )


OF_TENSORS = {
    **{name: in_place_of_memory(numbers) for name, numbers in NUMBERS.items()},
    "no tensors": of_tensors(lambda tensor: None),
    "half of it": of_tensors(lambda payload: payload[: len(payload) // 2], "payload"),
    "nothing in it": of_tensors(lambda payload: payload[:0], "payload"),
    "other bytes": of_tensors(torch.zeros_like, "payload"),
    "twice": of_tensors(lambda payload: torch.cat([payload, payload]), "payload"),
    "a billion examples": of_tensors(lambda p: with_numbers(p, 2, 10**9), "payload"),
    "numbers of 1e30": of_tensors(partial(with_entries, value=1e30), "payload"),
    "a billion steps": of_tensors(lambda p: with_numbers(p, 3, 10**9), "payload"),
}
# entries, and the change of a correction's memory: finite, and too large for an exact sum
TOO_LARGE = {
    "numbers of 1e15": of_tensors(partial(with_entries, value=1e15), "payload"),
    "a memory of 1e15": of_tensors(lambda t: torch.full_like(t, 1e15), "change"),
}


def with_loss(name, value):
    metrics = {"train/loss": torch.tensor(1.0)} | {name: torch.tensor(value)}
    return of_clients(metrics=metrics)


WEIGHT = "train/loss per example"
LOSSES = [("train/loss", torch.nan), ("train/loss", torch.inf)]
LOSSES += [(WEIGHT, value) for value in (torch.nan, torch.inf, -1.0, 1e30)]
OF_LOSSES = {f"a {name} of {value}": with_loss(name, value) for name, value in LOSSES}
STRANGE = ("round/seconds", "val/loss", "epoch", "train/loss_std", "lr-SGD", "a/b c", "ß")
OF_METRICS = {
    **{
        f"a loss of {name}": of_clients(
            metrics=dict.fromkeys(("train/loss", "other"), numbers.reshape(-1)[0])
        )
        for name, numbers in NUMBERS.items()
        if numbers.numel()
    },
    "no metrics": of_clients(metrics={}),
    "strange metrics": of_clients(metrics=dict.fromkeys(STRANGE, torch.tensor(1.0))),
}
OF_CLIENTS = {
    **{
        f"{field} {value}": of_clients(**{field: value})
        for field, values in (
            ("num_examples", (0, 1, LARGEST)),
            ("num_steps", (0, 1, LARGEST)),
            ("optimizer_steps", (0, 1, LARGEST, (), (1, 2, 3), None)),
            ("effective_steps", (0.0, 1e-300, 1e308, None)),
        )
        for value in values
    },
    **OF_METRICS,
    "facts": of_clients(facts={"round/client_update_norm": 1e308, "epoch": 1.0}),
    "no facts": of_clients(facts={}),
    "no clients": lambda answer: replace(answer, clients=(), tensors={}),
}
LOGGED = [*VALUES, [[1, [], "x"]], [["x", [], []]], [["x", [], "accuracy"]]]
OF_OPTIONS = {
    f"logged {value}": lambda answer, value=value: replace(answer, options={"logged": value})
    for value in LOGGED
} | {"no options": lambda answer: replace(answer, options={})}

SKIPPING = {
    "federation__on_client_failure": "skip",
    "federation__cohort": built("AllClients"),
    "federation__min_replies": 1,
}
SCAFFOLD = {"federation__correction": built("Scaffold")}
FAIR = {"federation__aggregator": built("server.QFedAvg")}
EXACT = SCAFFOLD | {"federation__aggregator": built("Mean", exact=True)}
NOVA = {"federation__aggregator": built("NormalisedMean")}
LOSSY = {"federation__updates": [built("updates.QSGD", bits=8)]}


USED = {  # lies that could be true
    *("optimizer_steps 0", "optimizer_steps 1", "optimizer_steps ()"),
    *("optimizer_steps (1, 2, 3)", "optimizer_steps None", "a loss of bf16", "a loss of bool"),
    *("a loss of one number", "a loss of a scalar", "a loss of a table", "a loss of bytes"),
    *("no metrics", "strange metrics", "facts", "no facts"),
    # which a module may log
    *("a train/loss of nan", "a train/loss of inf"),
}


def is_refused(lie, options):
    by_losses = options is FAIR and lie.startswith("a train/loss of")
    return by_losses or (lie not in USED and not lie.startswith("logged") and lie != "no options")


@pytest.mark.parametrize(
    ("options", "lies"),
    [
        pytest.param(SCAFFOLD, OF_TENSORS | OF_LOSSES, id="tensors"),
        pytest.param(FAIR, dict([*OF_LOSSES.items()][:1]), id="losses"),
        pytest.param(EXACT, TOO_LARGE, id="exact sums"),
        pytest.param(NOVA | LOSSY, OF_CLIENTS, id="clients", marks=pytest.mark.slow),
        pytest.param({}, OF_OPTIONS, id="options", marks=pytest.mark.slow),
    ],
)
def test_what_is_no_update_is_left_out(options, lies, tmp_path, recwarn):
    config = configuration(**SKIPPING, **options, trainer__max_epochs=len(lies))
    with three_sites(config) as sites:
        channel = Lying(sites, "train", lies.items())
        over_network(sites, config, tmp_path, channel=channel)
    assert channel.told == [*lies]
    network = last(tmp_path)
    assert network["epoch"] == len(lies) - 1
    assert all(bool(weight.isfinite().all()) for weight in network["state_dict"].values())
    skipped = [line for line in map(str, (each.message for each in recwarn)) if "at site b" in line]
    refused = [lie for lie in channel.told if is_refused(lie, options)]
    assert len(skipped) == 2 * len(refused), "\n".join(skipped)


# of other dtypes than the same metric of other sites
OF_EVALUATIONS = {
    f"a val/loss of {value.dtype}": of_clients(metrics={"val/loss": value})
    for value in (
        torch.tensor(1 + 1j),
        torch.tensor(1.0).to(torch.float8_e4m3fn),
        torch.tensor(1, dtype=torch.uint64),
    )
}


@pytest.mark.parametrize(
    "lies", [OF_EVALUATIONS, pytest.param(OF_METRICS, marks=pytest.mark.slow)], ids=len
)
def test_metrics_of_an_evaluation_that_no_site_could_mean_are_left_out(lies, tmp_path, recwarn):
    evaluated = built("ClientEvaluation", every_n_rounds=1)
    config = configuration(
        data__init_args__client_val_fraction=0.2,
        trainer__callbacks=[evaluated],
        trainer__max_epochs=len(lies),
    )
    with three_sites(config) as sites:
        channel = Lying(sites, "evaluate", lies.items())
        over_network(sites, config, tmp_path, channel=channel)
    assert channel.told == [*lies]
    assert last(tmp_path)["epoch"] == len(lies) - 1
    left_out = [str(each.message) for each in recwarn if "without client" in str(each.message)]
    assert lies is OF_METRICS or len(left_out) == 2 * len(lies), left_out


def facts():
    return SiteFacts(
        clients={2: 90, 3: 80},
        held_out={"validation": {2: 0, 3: 0}, "test": {2: 1, 3: 1}},
        batch_size=32,
        drop_last=False,
        precision="32-true",
        signing="1f" * 32,
        sum_key="",
        most_bytes=1000,
        largest="",
    )


def test_a_site_that_claims_a_billion_examples_a_client_costs_no_memory():
    data = FederatedDataModule(Digits(batch_size=32), num_clients=100)
    sizes = dict.fromkeys(range(100), 10**9)
    none = dict.fromkeys(range(100), 0)
    held = {"validation": none, "test": none}
    elsewhere = DataElsewhere(
        data, num_examples=sizes, held_out=held, batch_size=32, drop_last=False
    )
    tracemalloc.start()
    work = WorkElsewhere(elsewhere, seed=0).of(range(0, 100, 2), 3)
    told = elsewhere.summary().as_line()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 10**6  # bytes
    assert (len(work), work[1].client_id, work[1].num_examples) == (50, 2, 10**9)
    assert work.rounds.tolist() == [3] * 50
    assert "100 clients with 1,000,000,000 examples" in told


class Largest(torchmetrics.MaxMetric):
    """Its state is -inf without examples, which a site may report."""


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_states_of_metrics_that_are_not_finite_are_refused(value):
    module = torch.nn.ModuleDict({"sum": torchmetrics.SumMetric(), "largest": Largest()})
    for place, state in (("sum", "sum_value"), ("largest", "max_value")):
        logged, name = [["x", "x", place]], f"stage/metrics/{place}/{state}"
        none = module[place].metric_state[state].clone()
        assert read_metrics(logged, {name: none}, module).states == {place: {state: none}}
        with pytest.raises(ValueError, match=f"state {state} of its metric x is not finite"):
            read_metrics(logged, {name: torch.full_like(none, value)}, module)


@pytest.mark.parametrize(
    ("place", "name", "said"),
    [("all", "x", "metric x has no sum value"), ("sum", "\x1b[2Jx", "printable")],
)
def test_a_state_with_values_of_single_examples_and_a_name_of_escape_codes_are_refused(
    place, name, said
):
    module = torch.nn.ModuleDict({"sum": torchmetrics.SumMetric(), "all": torchmetrics.CatMetric()})
    told = {f"stage/metrics/{place}/{state}": torch.ones(3) for state in ("value", "sum_value")}
    with pytest.raises(ValueError, match=said):
        read_metrics([[name, name, place]], told, module)


def test_what_a_site_says_of_itself_comes_back_and_nothing_else_is_taken():
    told = document_of(facts())
    assert read_document(SiteFacts, told) == facts()
    for name in (field.name for field in fields(SiteFacts)):
        for value in VALUES:
            if type(value) is type(told[name]) and value in (True, "", "x", LARGEST):
                continue
            with pytest.raises(MessageError):
                read_document(SiteFacts, told | {name: value})
        with pytest.raises(MessageError, match=f"has no {name}"):
            read_document(SiteFacts, {n: value for n, value in told.items() if n != name})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"clients": [[2, 10**10], [3, 1]]},
            "client 2 must be a whole number.* at most 1000000000",
        ),
        ({"clients": [[2, 1], [2, 1]]}, "clients must name every client once"),
        (
            {"held_out": {"validation": [], "test": []}},
            "held_out: validation must have the same clients",
        ),
        ({"signing": "x" * 64}, "signing must be 64 hexadecimal digits"),
        ({"largest": 1}, "largest must be a text"),
        ({"batch_size": 0}, "batch_size must be a whole number, at least 1"),
    ],
)
def test_a_site_that_says_nonsense_of_itself_is_named(change, said):
    answer = Answer(site="b", order="0" * 64, options=document_of(facts()) | change)
    with pytest.raises(
        ConfigurationError, match=f"site b: its facts about itself are not valid: .*{said}"
    ):
        facts_of({"b": answer})


# a CPU does not train in 16-mixed
GREETINGS = [
    (lambda told: {}, "site b: its facts about itself are not valid: it has no"),
    (lambda told: {**told, "precision": "16-mixed"}, r"16-mixed: b\. .* bf16-mixed or 32-true"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "said"), GREETINGS)
def test_a_greeting_of_what_cannot_be_ends_the_run_before_it_begins(change, said, tmp_path):
    config = configuration()
    lies = [("hello", lambda answer: replace(answer, options=change(answer.options)))]
    with three_sites(config) as sites:
        channel = Lying(sites, "hello", lies)
        with pytest.raises(ConfigurationError, match=said):
            over_network(sites, config, tmp_path, channel=channel)


CALIBRATED = {
    "model__init_args__optimizer": SPARSE_SGD,
    "trainer__callbacks": [
        built("MaskCalibration", **CALIBRATION, head=built("sparsity.RidgeHead"))
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(("answers", "name"), [(0, "bf16"), (2, "one number")])
def test_a_calibration_ends_with_a_sentence_on_whose_sums_are_none(answers, name, tmp_path):
    """The sums for the head come in one order, the scores in two."""
    config = configuration(**CALIBRATED)
    lies = [("nothing", lambda answer: answer)] * answers + [(name, OF_TENSORS[name])]
    with three_sites(config) as sites:
        channel = Lying(sites, "calibrate", lies)
        with pytest.raises(ConfigurationError, match="calibration: client 2 at site b: "):
            over_network(sites, config, tmp_path, channel=channel)
    assert channel.lies == []


def test_a_site_decides_neither_how_metrics_are_reduced_nor_what_the_server_measures(tmp_path):
    def summed(answer):
        told = {"train/loss": "sum", "train/examples": "sum"}
        own = {"val/best": torch.tensor(1.0), "privacy/epsilon": torch.tensor(0.0)}
        clients = [replace(each, metrics={**each.metrics, **own}) for each in answer.clients]
        options = {**answer.options, "reductions": told}
        return replace(answer, options=options, clients=tuple(clients))

    config, losses = configuration(**SKIPPING, trainer__max_epochs=1), []
    with three_sites(config) as sites:
        for lies in ([], [("sum", summed)]):
            words = [f"--trainer.default_root_dir={tmp_path}/{len(lies)}"]
            asking = Correspondence(Lying(sites, "train", lies), deadline=400.0)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                trainer = run_server(config, words, asking, wanted=3)
            losses.append(float(trainer.callback_metrics["train/loss"]))
            found = [
                str(each.message) for each in said if "reduces train/loss" in str(each.message)
            ]
            assert len(found) >= len(lies)
            assert "privacy/epsilon" not in trainer.callback_metrics
            assert "val/best" not in trainer.callback_metrics
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
