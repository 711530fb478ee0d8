"""Strangers' bytes: damaged, made up, or damaged with care so that the checksum fits."""

import random
import struct
import zlib

import numpy as np
import torch
from updates.payloads import agreement, dense, message, payload, quantised

from fl_lightning.updates.codec import decode, encode
from fl_lightning.updates.reader import DecodeError

HOSTILE = [0, 1, 2**8 - 1, 2**15, 2**16 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]
SIZE = 40


def messages():
    rng = np.random.default_rng(0)
    params = [dense(rng, SIZE, dtype) for dtype in (torch.float32, torch.bfloat16)]
    params += [quantised(rng, SIZE, 3), quantised(rng, SIZE, 1, 9, True)]
    params += [payload(rng, SIZE, torch.float16, 7), payload(rng, SIZE, (4, None, False), 20)]
    return [message(each) for each in params]


def damaged(rng, data, other):
    """Return the bytes after one to three changes of any kind."""
    data = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 1)
        end = at + rng.randrange(1, 9)
        first, last, put = rng.choice(
            [
                (at, at + 1, bytes(b ^ 1 << end % 8 for b in data[at : at + 1])),
                (at, end, rng.randbytes(end - at)),
                (at, at + 8, struct.pack("<Q", rng.choice(HOSTILE))),
                (at, at, rng.randbytes(end - at)),
                (at, end, b""),
                (at, len(data), b""),
                (at, len(data), other[at:]),
            ]
        )
        data[first:last] = put
    return bytes(data)


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
