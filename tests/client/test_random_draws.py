"""What a training step draws is known, and drawn again and put in its place gives the same bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fl_lightning.engines.functional import CannotStack
from fl_lightning.engines.functional.draws import DrawRecorder, ReplayedDraws
from fl_lightning.engines.slots.inputs import DrawnRows

generator = torch.Generator().manual_seed(1)
IMAGES = torch.randn(4, 6, 5, 5, generator=generator)
ROWS = torch.randn(4, 6, generator=generator)
HEADS = torch.randn(4, 2, 7, 8, generator=generator)
WORDS = torch.randn(4, 7, 8, generator=generator)
ATTENTION = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
MASK = torch.randn(7, 7, generator=generator)


def attention(**options):
    return F.scaled_dot_product_attention(HEADS, HEADS, HEADS, dropout_p=0.3, **options)


def grouped_attention():
    query = torch.cat([HEADS, HEADS + 1], 1)
    return F.scaled_dot_product_attention(query, HEADS, HEADS, dropout_p=0.3, enable_gqa=True)


RANDOM = {
    "dropout": lambda: F.dropout(ROWS, 0.3),
    "dropout in place": lambda: F.dropout(ROWS.clone(), 0.3, inplace=True),
    "torch.dropout": lambda: torch.dropout(ROWS, 0.3, True),
    "everything dropped": lambda: F.dropout(ROWS, 1.0),
    "channels last": lambda: F.dropout(IMAGES.to(memory_format=torch.channels_last), 0.3),
    "dropout1d": lambda: F.dropout1d(IMAGES[:, :, 0], 0.3),
    "dropout1d of one": lambda: F.dropout1d(IMAGES[0, :, 0], 0.3),
    "dropout2d": lambda: F.dropout2d(IMAGES, 0.3),
    "dropout3d": lambda: F.dropout3d(IMAGES[:, :, None], 0.3),
    "alpha dropout": lambda: F.alpha_dropout(ROWS, 0.3, True),
    "alpha dropout in place": lambda: F.alpha_dropout(ROWS.clone(), 0.3, True, True),
    "feature alpha dropout": lambda: F.feature_alpha_dropout(IMAGES, 0.3, True),
    "path": lambda: ROWS * ROWS.new_empty(4, 1).bernoulli_(0.8).div_(0.8),
    "gumbel": lambda: F.gumbel_softmax(ROWS),
    "rand": lambda: torch.rand(4, 6),
    "rand_like": lambda: torch.rand_like(ROWS),
    "randn": lambda: torch.randn(4, 1, 2),
    "randn_like": lambda: torch.randn_like(ROWS),
    "randint": lambda: torch.randint(5, (4, 6)),
    "randint from": lambda: torch.randint(2, 5, (4, 6)),
    "randint_like": lambda: torch.randint_like(ROWS, 2, 5),
    "random_": lambda: torch.empty(4).random_(2, 5),
    "uniform_": lambda: torch.empty(4, 6).uniform_(2, 3),
    "normal_": lambda: torch.empty(4, 6).normal_(std=3),
    "attention": attention,
    "causal attention": lambda: attention(is_causal=True),
    "masked attention": lambda: attention(attn_mask=MASK, scale=0.5),
    "attention with a yes-no mask": lambda: attention(attn_mask=MASK > -1),
    "grouped attention": grouped_attention,
    "module": lambda: ATTENTION(WORDS, WORDS, WORDS)[0],
    "module without weights": lambda: ATTENTION(WORDS, WORDS, WORDS, need_weights=False)[0],
}


@pytest.mark.parametrize("name", RANDOM)
def test_replayed_draws_are_those_of_torch(name):
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        expected, after = RANDOM[name](), torch.get_rng_state()
        torch.manual_seed(0)
        with DrawRecorder() as recorder:
            RANDOM[name]()
        torch.manual_seed(0)
        draws = [draw.again() for draw in recorder.draws]
        assert torch.equal(torch.get_rng_state(), after)
        torch.manual_seed(1)
        with ReplayedDraws(draws):
            found = RANDOM[name]()
    close = {"rtol": 1e-5, "atol": 1e-6} if "attention" in name or "module" in name else {}
    torch.testing.assert_close(found, expected, **close or {"rtol": 0, "atol": 0})


@pytest.mark.parametrize(
    "draw", [lambda: F.dropout(ROWS, 0.0), lambda: F.dropout(ROWS, 0.5, False)]
)
def test_what_is_switched_off_draws_nothing(draw):
    with DrawRecorder() as recorder:
        draw()
    assert recorder.draws == []
    with ReplayedDraws([]):
        assert torch.equal(draw(), ROWS)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: torch.multinomial(ROWS.abs(), 2), "multinomial"),
        (lambda: torch.randperm(4), "randperm"),
        (lambda: torch.bernoulli(ROWS.sigmoid()), "bernoulli"),
        (lambda: torch.rand(4, generator=torch.Generator()), "rand with a generator of its own"),
    ],
)
def test_other_draws_are_named(draw, name):
    with pytest.raises(CannotStack, match=f"training_step draws by {name}$"), DrawRecorder():
        draw()


LAYOUTS = {
    "rows": lambda batch: (batch, 3),
    "one a row": lambda batch: (batch, 1, 1),
    "columns": lambda batch: (3, batch),
    "heads": lambda batch: (2 * batch, 3),
    "weights": lambda batch: (5, 3),
}


@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    batch_size=st.integers(2, 6),
    size=st.integers(1, 6),
    seed=st.integers(0, 2**31),
)
def test_rows_are_the_batch_drawn_at_once(layout, batch_size, size, seed):
    shape, size = LAYOUTS[layout], min(size, batch_size)
    with torch.random.fork_rng():
        recorded = []
        for count in (batch_size, 1):
            with DrawRecorder() as recorder:
                torch.rand(shape(count))
            recorded.append(recorder.draws)
        rows = DrawnRows(*recorded, num_slots=3, batch_size=batch_size)
        others = [rows.numbers[0][slot].clone() for slot in (0, 2)]
        torch.manual_seed(seed)
        rows.fill(1, size)
        torch.manual_seed(seed)
        expected = torch.rand(shape(size))
    found = rows.numbers[0][1]
    if layout == "weights":
        assert rows.axes == [None]
        assert torch.equal(found, expected)
    else:
        axis = 1 if layout == "columns" else 0
        assert torch.equal(torch.cat([*found[:size]], axis), expected)
        assert all(torch.equal(row, found[size - 1]) for row in found[size:])
    assert torch.equal(rows.numbers[0][0], others[0])
    assert torch.equal(rows.numbers[0][2], others[1])


def test_draws_that_belong_to_pairs_of_examples_are_refused():
    recorded = []
    for count in (4, 1):
        with DrawRecorder() as recorder:
            torch.rand(count, count)
        recorded.append(recorder.draws)
    with pytest.raises(
        CannotStack, match=r"of shape \(4, 4\) for 4 examples and of shape \(1, 1\)"
    ):
        DrawnRows(*recorded, num_slots=2, batch_size=4)
    assert DrawnRows(recorded[0], None, 2, 4).axes == [None]
