"""Orders and answers for tests: some of each kind, and any that Hypothesis makes up."""

import torch
from hypothesis import strategies as st

from fl_lightning.core.container import DTYPES
from fl_lightning.flower.messages import CATEGORIES, KINDS, Answer, ClientAnswer, Failure, Order

RUN, CONFIGURATION = "0123456789abcdef" * 2, "fedcba9876543210" * 4
LIMIT = 100_000


def orders():
    about = {"run": RUN, "configuration": CONFIGURATION}
    yield Order(kind="hello", round=0, **about)
    yield Order(
        kind="train",
        round=7,
        clients=(4, 2),
        counted={2: 6, 4: -1, 9: 0},
        options={"optimizer": [{"lr": 0.1, "betas": [0.9, 0.999]}], "größe": None, "clip": True},
        tensors={
            "model": torch.linspace(-1, 1, 33),
            "stage/part/buffers": torch.tensor([-0.0, float("nan")]).bfloat16(),
            "stage/mask/bits": torch.tensor([True, False]),
            "stage/clock/layers.0/größe": torch.tensor(2**62),
        },
        **about,
    )
    yield Order(kind="evaluate", round=7, clients=(2,), tensors={"model": torch.zeros(3)}, **about)
    session = {"run": RUN, "num_clients": 3, "active": False, "graph_seed": 2**62}
    yield Order(
        kind="sum",
        round=7,
        clients=(2, 4),
        options={"session": session, "clients": [2, 4, 5], "sites": ["a", "a", "b"], "stage": 1},
        tensors={"stage/sum/2": torch.arange(9, dtype=torch.uint8)},
        **about,
    )


def answers():
    about = {"site": "hospital_a", "order": CONFIGURATION}
    clients = (
        ClientAnswer(
            client=4,
            num_examples=12,
            num_steps=3,
            optimizer_steps=(3, 2),
            effective_steps=2.5,
            metrics={"train/loss": torch.tensor(0.1), "n": torch.tensor(3)},
            facts={"seconds": 1.5},
        ),
        ClientAnswer(client=2, failure="not_finite"),
    )
    tensors = {"4/payload": torch.arange(40, dtype=torch.uint8), "4/stage/c/x": torch.ones(2, 3)}
    yield Answer(clients=clients, tensors=tensors, options={"a": [1, {}]}, **about)
    yield Answer(failure=Failure("training", "0123456789abcdef"), **about)
    said = {"2/stage/sum/message": torch.arange(5, dtype=torch.uint8)}
    left = ClientAnswer(client=4, failure="sum")
    yield Answer(clients=(ClientAnswer(client=2), left), tensors=said, **about)
    yield Answer(tensors={"stage/sums/x": torch.tensor(1.0)}, **about)


# where bytes or other numbers are waited for
NUMBERS = {
    "bf16": torch.ones(3, dtype=torch.bfloat16),
    "float8": torch.ones(3, dtype=torch.float8_e4m3fn),
    "complex": torch.ones(3, dtype=torch.complex64),
    "bool": torch.ones(3, dtype=torch.bool),
    "uint64": torch.ones(3, dtype=torch.uint64),
    "nothing": torch.empty(0),
    "one number": torch.ones(1),
    "a scalar": torch.tensor(0.0),
    "a table": torch.ones(2, 3),
    "bytes": torch.ones(9, dtype=torch.uint8),
    "no bytes": torch.empty(0, dtype=torch.uint8),
    "infinite": torch.full((3,), torch.inf),
}


names = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=9)
jsons = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
options = st.dictionaries(names, jsons, max_size=3)


some_shapes = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def tensors(draw, shapes=some_shapes, dtypes=None):
    """Any bits, NaN with payloads and -0.0 among them."""
    dtype = draw(st.sampled_from(dtypes or list(DTYPES.values())))
    shape = draw(shapes)
    size = torch.Size(shape).numel() * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype == torch.bool:
        data = bytearray(byte & 1 for byte in data)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def stage_tensors(prefix=""):
    keys = names.filter(lambda key: "/" not in key)
    places = st.builds(lambda key, name: f"{prefix}stage/{key}/{name}", keys, names)
    return st.dictionaries(places, tensors(), max_size=3)


numbers = st.integers(0, 2**63 - 1)


@st.composite
def any_order(draw):
    clients = tuple(draw(st.lists(numbers, min_size=1, max_size=3, unique=True)))
    round_index = draw(numbers)
    return Order(
        kind=draw(st.sampled_from(KINDS)),
        run=RUN,
        configuration=CONFIGURATION,
        round=round_index,
        clients=clients,
        counted={client: draw(st.integers(-1, round_index)) for client in clients},
        options=draw(options),
        tensors=draw(stage_tensors()) | {"model": draw(tensors())},
    )


scalars = tensors(shapes=st.just([]))
client_answers = st.builds(
    ClientAnswer,
    client=numbers,
    num_examples=numbers,
    num_steps=numbers,
    optimizer_steps=st.none() | numbers | st.lists(numbers, max_size=2).map(tuple),
    effective_steps=st.none() | st.floats(0, allow_infinity=False),
    metrics=st.dictionaries(names, scalars, max_size=3),
    facts=st.dictionaries(names, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
) | st.builds(ClientAnswer, client=numbers, failure=st.sampled_from(list(CATEGORIES)))


@st.composite
def any_answer(draw):
    clients = draw(st.lists(client_answers, max_size=3, unique_by=lambda each: each.client))
    found = draw(stage_tensors())
    for each in clients:
        if each.failure is None:
            found |= draw(stage_tensors(f"{each.client}/"))
            found[f"{each.client}/payload"] = draw(
                tensors(st.lists(st.integers(0, 9), min_size=1, max_size=1), [torch.uint8])
            )
    return Answer(
        site="hospital_a",
        order=CONFIGURATION,
        clients=tuple(clients),
        options=draw(options),
        tensors=found,
    )
