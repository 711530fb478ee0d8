"""Payloads of every kind, for tests: by Hypothesis, and from a seed."""

import numpy as np
import torch
from hypothesis import strategies as st

from fl_lightning.updates.message import Agreement, Message
from fl_lightning.updates.payload import FLOATS, Dense, Quantised, Sparse, num_blocks

SPACE = "0123456789abcdef" * 2


def dense(rng, size, dtype):
    return Dense(torch.from_numpy(rng.standard_normal(size)).to(dtype))


def quantised(rng, size, bits, block=None, has_offsets=False):
    low, kind = (0, np.uint8) if has_offsets else (-(2 ** (bits - 1)), np.int8)
    codes = torch.from_numpy(rng.integers(low, low + 2**bits, size).astype(kind))
    if isinstance(block, float):  # so many cuts, at places of their own
        cuts = np.sort(rng.choice(size, min(int(block), size), replace=False)) if size else []
        block = tuple(int(n) for n in np.diff([0, *cuts, size]) if n)
    scales, offsets = torch.from_numpy(rng.random((2, num_blocks(size, block)), np.float32))
    return Quantised(codes, bits, scales, offsets - 0.5 if has_offsets else None, block)


def values_of(rng, size, form):
    """Return a payload of a form: a dtype, or (bits, block, has_offsets)."""
    if isinstance(form, torch.dtype):
        return dense(rng, size, form)
    return quantised(rng, size, *form)


def payload(rng, size, form, num_kept=None):
    if num_kept is None:
        return values_of(rng, size, form)
    indices = np.sort(rng.choice(size, num_kept, replace=False)).astype(np.int64)
    return Sparse(torch.from_numpy(indices), values_of(rng, num_kept, form), size)


forms = st.sampled_from(FLOATS) | st.tuples(
    st.integers(2, 8), st.none() | st.integers(1, 70) | st.sampled_from([1.0, 7.0]), st.booleans()
)
forms |= st.tuples(st.just(1), st.none() | st.integers(1, 70), st.just(True))


@st.composite
def payloads(draw, size):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return payload(rng, size, draw(forms), draw(st.none() | st.integers(0, size)))


def message(params, buffers=None, **fields):
    buffers = Dense(torch.tensor([1.0, 2.0])) if buffers is None else buffers
    names = {"metrics": {"train/loss": 0.25, "größe": 3.0}, "transforms": ("top-k 0.1",)}
    about = {"round_index": 4, "client_id": 77, "num_examples": 12, "num_steps": 3}
    return Message("update", SPACE, params=params, buffers=buffers, **{**names, **about, **fields})


def agreement(message, num_params):
    return Agreement(
        kind=message.kind,
        space=message.space,
        round_index=message.round_index,
        num_params=num_params,
        num_buffers=message.buffers.size,
        transforms=message.transforms,
    )


def assert_same(one, other):
    """Two payloads hold the same bits in the same form."""
    assert type(one) is type(other)
    for name, value in vars(one).items():
        found = getattr(other, name)
        if isinstance(value, torch.Tensor):
            assert value.dtype == found.dtype or not len(value)  # what is empty does not travel
            assert value.tolist() == found.tolist()
        elif isinstance(value, (Dense, Quantised)):
            assert_same(value, found)
        else:
            assert value == found
