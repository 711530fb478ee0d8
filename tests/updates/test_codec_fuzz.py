"""Strangers' bytes: damaged, made up, or damaged with care so that the checksum fits."""

import random
import struct
import zlib
from contextlib import suppress

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from updates.payloads import agreement, dense, message, payload, quantised

from fl_lightning.updates.wire.coding import DecodeError
from fl_lightning.updates.wire.message import decode, encode

HOSTILE = [0, 1, 2**8 - 1, 2**15, 2**16 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]
SIZE = 40


def messages():
    rng = np.random.default_rng(0)
    params = [dense(rng, SIZE, dtype) for dtype in (torch.float32, torch.bfloat16)]
    params += [quantised(rng, SIZE, 3), quantised(rng, SIZE, 1, 9, True)]
    params += [quantised(rng, SIZE, 5, 4.0)]
    params += [payload(rng, SIZE, torch.float16, 7), payload(rng, SIZE, (4, None, False), 20)]
    return [message(each) for each in params]


# what may happen to some bytes behind a place: what stands there instead
CHANGES = (
    lambda rng, there, _: bytes([there[0] ^ 1 << rng.randrange(8)]) + there[1:],
    lambda rng, there, _: rng.randbytes(len(there)),
    lambda rng, there, _: struct.pack("<Q", rng.choice(HOSTILE)) + there[8:],
    lambda rng, there, _: rng.randbytes(rng.randrange(1, 9)) + there,
    lambda rng, there, _: there[rng.randrange(1, 9) :],
    lambda rng, there, _: b"",
    lambda rng, _, other: other,
)


def damaged(rng, data, other):
    """Return the bytes after one to three changes of any kind, behind places or between them."""
    for _ in range(rng.randrange(1, 4)):
        if data:
            at = rng.randrange(len(data))
            end = rng.choice((at + 8, len(data)))
            data = data[:at] + rng.choice(CHANGES)(rng, data[at:end], other[at:]) + data[end:]
    return data


def with_checksum(data):
    if len(data) < 21:
        return data
    body = bytearray(data[:-4])
    body[9:17] = struct.pack("<Q", len(data))
    return bytes(body) + struct.pack("<I", zlib.crc32(body))


def outcomes(count, seed):
    """Decode ``count`` strings; return how many were accepted and changed."""
    rng = random.Random(seed)  # ten times as fast as NumPy's for single numbers
    sent = messages()
    encoded = [encode(each) for each in sent]
    agreed = agreement(sent[0], SIZE)
    accepted = 0
    for number in range(count):
        original, other = rng.choices(encoded, k=2)
        made_up = number % 5 == 0
        data = rng.randbytes(rng.randrange(300)) if made_up else damaged(rng, original, other)
        careful = number % 4 == 1
        if careful:
            data = with_checksum(data)
        try:
            received = decode(data, agreed)
        except DecodeError:
            continue
        # what is accepted is a message that someone may have sent, in its only form
        assert encode(received) == data
        assert received.params.to_dense().isfinite().all()
        assert received.params.to_dense().shape == (SIZE,)
        assert careful or data in encoded
        accepted += data not in encoded
    return accepted


def test_fuzz():
    accepted = outcomes(100_000, seed=0)
    assert 0 < accepted < 50_000  # care pays: other numbers in the same places are a message


@given(st.binary(max_size=400), st.integers(0, 7))
def test_whatever_hypothesis_makes_up_is_refused_with_a_reason(data, which):
    sent = messages()
    real = encode(sent[which % len(sent)])
    middle = len(real) // 2
    for made_up in (data, real[:65] + data, real[:middle] + data, real[:-4] + data):
        for each in (made_up, with_checksum(made_up)):
            with suppress(DecodeError):
                received = decode(each, agreement(sent[0], SIZE))
                assert encode(received) == each
