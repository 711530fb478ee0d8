"""Strangers' bytes: damaged, made up, or damaged with care so that the checksum fits."""

import struct
import zlib

import numpy as np
import pytest
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
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, len(data) + 1))
        end = at + int(rng.integers(1, 9))
        changes = (
            (at, at + 1, bytes(b ^ 1 << end % 8 for b in data[at : at + 1])),
            (at, end, rng.bytes(end - at)),
            (at, at + 8, struct.pack("<Q", HOSTILE[int(rng.integers(len(HOSTILE)))])),
            (at, at, rng.bytes(end - at)),
            (at, end, b""),
            (at, len(data), b""),
            (at, len(data), other[at:]),
        )
        first, last, put = changes[int(rng.integers(len(changes)))]
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
    rng = np.random.default_rng(seed)
    sent = messages()
    encoded = [encode(each) for each in sent]
    agreed = agreement(sent[0], SIZE)
    accepted = 0
    for number in range(count):
        one, other = rng.integers(0, len(encoded), 2)
        original = encoded[one]
        data = (
            rng.bytes(int(rng.integers(0, 300)))
            if number % 10 == 0
            else (damaged(rng, original, encoded[other]))
        )
        careful = number % 2
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_more_fuzz(seed):
    outcomes(100_000, seed)
