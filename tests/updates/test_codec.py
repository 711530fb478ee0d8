"""The codec: what is sent arrives bit for bit, its size is known before, all else is refused."""

import struct
import time
import tracemalloc
import zlib
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from updates.payloads import (
    SPACE,
    agreement,
    assert_same,
    dense,
    message,
    payload,
    payloads,
    quantised,
)

from fl_lightning.core.update import ClientUpdate
from fl_lightning.updates.payload import FLOATS, Dense, Quantised, Sparse
from fl_lightning.updates.wire.coding import DecodeError
from fl_lightning.updates.wire.message import (
    VERSION,
    Agreement,
    Message,
    decode,
    encode,
    encoded_size,
)

HEADER = 65  # bytes before the transforms; the kind of params then follows the names
FLOAT32 = torch.float32


def rng(seed=0):
    return np.random.default_rng(seed)


def plain(params, buffers=None):
    """A message without names: the params' payload stands right behind the header."""
    empty = Dense(torch.empty(0)) if buffers is None else buffers
    return message(params, empty, metrics={}, transforms=())


def repaired(data):
    """The same bytes with their length and checksum put right."""
    body = bytearray(data[:-4])
    body[9:17] = struct.pack("<Q", len(data))
    return bytes(body) + struct.pack("<I", zlib.crc32(body))


class TestRoundTrip:
    @settings(deadline=None)
    @given(data=st.data(), size=st.integers(0, 300))
    def test_every_payload_arrives_bit_for_bit_and_its_size_is_known(self, data, size):
        sent = message(data.draw(payloads(size)), data.draw(payloads(size % 7)))
        encoded = encode(sent)
        assert len(encoded) == encoded_size(sent)
        received = decode(encoded, agreement(sent, size))
        assert_same(sent.params, received.params)
        assert_same(sent.buffers, received.buffers)
        for name in ("kind", "space", "round_index", "client_id", "num_examples", "num_steps"):
            assert getattr(sent, name) == getattr(received, name)
        assert received.metrics == sent.metrics
        assert received.transforms == sent.transforms
        assert encode(received) == encoded

    def test_an_update_stays_an_update(self):
        update = ClientUpdate(
            3, torch.randn(50), torch.randn(4), 20, 5, {"train/loss": torch.tensor(0.1)}
        )
        sent = Message.of_update(update, space=SPACE, round_index=2)
        received = decode(encode(sent), agreement(sent, 50)).to_update()
        assert torch.equal(received.delta, update.delta)
        assert torch.equal(received.buffers, update.buffers)
        assert (received.client_id, received.num_examples, received.num_steps) == (3, 20, 5)
        assert float(received.metrics["train/loss"]) == float(update.metrics["train/loss"])

    def test_extreme_numbers_and_metrics(self):
        numbers = [torch.finfo(FLOAT32).max, -torch.finfo(FLOAT32).tiny / 4, -0.0]
        largest = 2**63 - 1
        sent = message(
            Dense(torch.tensor(numbers)),
            client_id=largest,
            num_examples=largest,
            metrics={"": float("inf"), "x" * 65535: -float("inf")},
        )
        received = decode(encode(sent), agreement(sent, 3))
        assert received.params.values.view(torch.int32).tolist() == (
            sent.params.values.view(torch.int32).tolist()
        )
        assert received.client_id == received.num_examples == largest
        assert received.metrics == sent.metrics

    def test_the_receiver_may_write_to_what_it_got(self):
        sent = plain(Dense(torch.ones(3)))
        data = encode(sent)
        decode(data, agreement(sent, 3)).params.values.zero_()
        assert decode(data, agreement(sent, 3)).params.values.tolist() == [1.0] * 3

    def test_bytes_are_those_of_version_1(self):
        """Kept from one release to the next: other bytes need another version."""
        values = Quantised(torch.tensor([-2, 1, 3], dtype=torch.int8), 3, torch.tensor([0.5]))
        sent = message(
            Sparse(torch.tensor([1, 2, 40]), values, 50),
            Dense(torch.tensor([1.0]).bfloat16()),
            metrics={"a": 2.0},
            transforms=("t",),
        )
        header = (
            "464c4c55"
            "01"
            "00"
            "01"
            "0100"
            "9400000000000000"
            + SPACE
            + ("04000000000000004d000000000000000c000000000000000300000000000000")
        )
        names = "0100740100610000000000000040"
        # by hand: gaps 1, 0, 37; r = 3; quotients 1 1 00001, remainders 1 | 0 << 3 | 5 << 6
        indices = "0303030000000000000032000000000000000100000000000000434101"
        # codes are sent as 2 | 5 << 3 | 7 << 6
        values = "0203030000000000000000000000000000000000003fea01"
        buffers = "01030100000000000000803f"
        body = header + names + indices + values + buffers
        assert encode(sent).hex() == body + "cc958e1b"


class TestSizes:
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_dense(self, dtype):
        params = dense(rng(), 1000, dtype)
        assert encoded_size(plain(params)) == 89 + 1000 * params.values.element_size()

    @pytest.mark.parametrize("bits", range(1, 9))
    def test_codes_of_b_bits_take_b_bits(self, bits):
        one = quantised(rng(), 8000, bits, has_offsets=True)
        blocks = quantised(rng(), 8000, bits, block=100, has_offsets=True)
        assert encoded_size(plain(one)) == 89 + 16 + 1000 * bits
        assert encoded_size(plain(blocks)) == encoded_size(plain(one)) + 79 * 8

    @pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.3, 0.5])
    def test_indices_are_within_a_few_percent_of_their_entropy(self, density):
        size, kept = 100_000, int(100_000 * density)
        sparse = payload(rng(), size, FLOAT32, kept)
        taken = encoded_size(plain(sparse)) - encoded_size(plain(sparse.values)) - 26
        share = np.array([density, 1 - density])
        entropy = -size * (share * np.log2(share)).sum() / 8
        assert taken <= 1.04 * entropy + 1

    @settings(deadline=None)
    @given(indices=st.sets(st.integers(0, 9999), min_size=1))
    def test_any_indices_are_within_their_bound(self, indices):
        sparse = Sparse(torch.tensor(sorted(indices)), Dense(torch.ones(len(indices))), 10_000)
        taken = encoded_size(plain(sparse)) - encoded_size(plain(sparse.values)) - 26
        assert taken <= len(indices) * (np.log2(10_000 / len(indices)) + 3) / 8 + 2


class TestRefusals:
    @pytest.mark.parametrize(
        ("differs", "says"),
        [
            ({"kind": "model"}, "kind 'update' instead of 'model'"),
            ({"space": "f" * 32}, "space"),
            ({"round_index": 5}, "round 4 instead of 5"),
            ({"transforms": ("sign",)}, "transforms"),
            ({"num_params": 9}, "payload of 10 numbers, 9 expected"),
            ({"num_buffers": 0}, "payload of 2 numbers, 0 expected"),
        ],
    )
    def test_what_was_not_agreed_on(self, differs, says):
        sent = message(dense(rng(), 10, FLOAT32))
        with pytest.raises(DecodeError, match=says):
            decode(encode(sent), Agreement(**{**vars(agreement(sent, 10)), **differs}))

    @pytest.mark.parametrize(
        ("data", "says"),
        [
            (b"", "header: 65 bytes expected, 0 left"),
            (b"PK\x03\x04" + bytes(80), "not a message"),
            (b"FLLU" + bytes([VERSION + 1]) + bytes(80), "version 2, this program reads version 1"),
            (b"FLLU" + bytes([VERSION]) + bytes(80), "85 bytes and says it has 0"),
            (repaired(b"FLLU" + bytes([VERSION]) + bytes(60)), "checksum"),
        ],
    )
    def test_what_is_no_message(self, data, says):
        anything = Agreement(kind="update", space=SPACE, round_index=0, num_params=1)
        with pytest.raises(DecodeError, match=says):
            decode(data, anything)

    @pytest.mark.parametrize(
        ("params", "at", "put", "says"),
        [
            (dense(rng(), 4, FLOAT32), 0, b"\x09", "unknown kind of payload: 9"),
            (dense(rng(), 4, FLOAT32), 1, b"\x04", "unknown dtype"),
            (dense(rng(), 4, FLOAT32), 10, b"\x00\x00\x80\x7f", "not finite"),
            (dense(rng(), 4, torch.float64), 16, b"\xf8\x7f", "not finite"),
            (dense(rng(), 4, torch.float16), 10, b"\x00\xfc", "not finite"),
            (dense(rng(), 4, torch.bfloat16), 10, b"\xc0\x7f", "not finite"),
            (quantised(rng(), 5, 3), 1, b"\x01", "codes of 1 bits without offsets"),
            (quantised(rng(), 5, 3), 1, b"\x09", "codes of 9 bits"),
            (quantised(rng(), 5, 3), 18, b"\x00\x00\x80\xbf", "numbers of at least 0"),
            (quantised(rng(), 5, 3), 18, b"\x00\x00\xc0\x7f", "numbers of at least 0"),
            (quantised(rng(), 5, 3), 18, b"\xff\xff\x7f\x7f", "numbers beyond"),
            (quantised(rng(), 5, 8, None, True), 22, b"\x00\x00\xc0\xff", "numbers beyond"),
            (quantised(rng(), 5, 3), 23, b"\xff", "bits are set behind the last code"),
            (payload(rng(), 40, FLOAT32, 5), 1, b"\x3f", "not the shortest"),
            (payload(rng(), 40, FLOAT32, 0), 1, b"\xff", "not the shortest"),
            (payload(rng(), 40, FLOAT32, 0), 1, b"\x02", "not in their shortest form"),
            (payload(rng(), 40, FLOAT32, 5), 10, b"\x29", "41 numbers, 40 expected"),
            (payload(rng(), 40, FLOAT32, 5), 2, b"\x29", "41 indices into 40"),
            (payload(rng(), 40, FLOAT32, 5), 18, b"\x29", "too many for 5 indices"),
            (payload(rng(), 40, FLOAT32, 5), 26, b"\x00", "the quotients are not those of 5"),
        ],
    )
    def test_payloads_that_nobody_writes(self, params, at, put, says):
        sent = plain(params)
        data = bytearray(encode(sent))
        data[HEADER + at : HEADER + at + len(put)] = put
        with pytest.raises(DecodeError, match=says):
            decode(repaired(data), agreement(sent, params.size))

    def test_a_payload_inside_a_payload_inside_a_payload(self):
        inner = payload(rng(), 3, FLOAT32, 3)
        sent = plain(payload(rng(), 40, FLOAT32, 3))
        data, nested = encode(sent), encode(plain(inner))
        head = len(data) - 4 - 10 - 10 - 12  # up to the values: before checksum and no buffers
        mixed = data[:head] + nested[HEADER:]
        with pytest.raises(DecodeError, match="sparse again"):
            decode(repaired(mixed), agreement(sent, 40))

    def test_bytes_behind_the_end(self):
        sent = plain(dense(rng(), 4, FLOAT32))
        data = encode(sent)
        with pytest.raises(DecodeError, match="1 bytes follow"):
            decode(repaired(data[:-4] + b"\0" + data[-4:]), agreement(sent, 4))

    def test_every_shorter_message(self):
        sent = message(payload(rng(), 40, (3, 7, True), 9))
        data = encode(sent)
        for end in range(len(data)):
            with pytest.raises(DecodeError):
                decode(data[:end], agreement(sent, 40))
            if end >= HEADER + 4:
                with pytest.raises(DecodeError):
                    decode(repaired(data[:end]), agreement(sent, 40))

    @pytest.mark.parametrize("hostile", [2**20, 2**40, 2**63, 2**64 - 1])
    @pytest.mark.parametrize(
        "params",
        [dense(rng(), 9, FLOAT32), quantised(rng(), 9, 5, 4), payload(rng(), 9, FLOAT32, 3)],
        ids=["dense", "quantised", "sparse"],
    )
    def test_a_hostile_length_takes_neither_memory_nor_time(self, params, hostile):
        """Even where the receiver itself agreed on so many numbers."""
        sent = plain(params)
        data = encode(sent)
        tracemalloc.start()
        began = time.process_time()
        for at in range(HEADER, len(data) - 12):
            lie = bytearray(data)
            lie[at : at + 8] = struct.pack("<Q", hostile)
            for num_params in (9, hostile):
                with suppress(DecodeError):  # where they are values, they are other values
                    decode(repaired(lie), agreement(sent, num_params))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2**20
        assert time.process_time() - began < 5

    @pytest.mark.parametrize(
        ("params", "says"),
        [
            (Dense(torch.tensor([1.0, float("nan")])), "finite"),
            (Dense(torch.tensor([float("inf")]).half()), "finite"),
            (Dense(torch.tensor([-float("inf")]).bfloat16()), "finite"),
            (Quantised(torch.tensor([4], dtype=torch.int8), 3, torch.ones(1)), "fit into 3 bits"),
            (Quantised(torch.tensor([-5], dtype=torch.int8), 3, torch.ones(1)), "fit into 3 bits"),
            (Quantised(torch.zeros(1, dtype=torch.int8), 3, -torch.ones(1)), "at least 0"),
            (Sparse(torch.tensor([2, 1]), Dense(torch.ones(2)), 3), "increase strictly"),
            (Sparse(torch.tensor([1, 1]), Dense(torch.ones(2)), 3), "increase strictly"),
            (Sparse(torch.tensor([-1, 1]), Dense(torch.ones(2)), 3), "increase strictly"),
            (Sparse(torch.tensor([1, 3]), Dense(torch.ones(2)), 3), "from 0 to 2"),
        ],
    )
    def test_the_sender_refuses_what_the_receiver_would(self, params, says):
        with pytest.raises(ValueError, match=says):
            encode(plain(params))

    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            ({"round_index": -1}, "round_index must be from 0"),
            ({"client_id": 2**63}, "client_id must be"),
            ({"num_examples": 0}, "at least 1"),
            ({"metrics": {"x" * 65536: 1.0}}, "names of metrics"),
            ({"transforms": ("x",) * 256}, "at most 255 transforms"),
        ],
    )
    def test_fields_out_of_range(self, fields, says):
        with pytest.raises(ValueError, match=says):
            message(Dense(torch.ones(1)), **fields)
