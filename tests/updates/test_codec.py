"""The codec: what is sent arrives bit for bit, its size is known before, all else is refused."""

import re
import time
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import torch
from forged import DIGEST, changed, parts, with_header
from hypothesis import given
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

from fl_lightning.core.plain_json import MessageError
from fl_lightning.core.update import ClientUpdate
from fl_lightning.updates.message import (
    Agreement,
    Message,
    decode,
    encode,
    encoded_size,
)
from fl_lightning.updates.payload import FLOATS, Dense, Quantised, Sparse, content_of

FLOAT32 = torch.float32


def rng(seed=0):
    return np.random.default_rng(seed)


def plain(params, buffers=None):
    """A message without names."""
    empty = Dense(torch.empty(0)) if buffers is None else buffers
    return message(params, empty, metrics={}, transforms=())


def gap_bytes(sparse):
    return len(content_of("x", sparse)[1]["x.gaps"])


class TestRoundTrip:
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
            metrics={"": float("inf"), "x" * 65536: -float("inf")},
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
        """Kept from one release to the next: other bytes need another version in the container."""
        values = Quantised(torch.tensor([-2, 1, 3], dtype=torch.int8), 3, torch.tensor([0.5]))
        sent = message(
            Sparse(torch.tensor([1, 2, 40]), values, 50),
            Dense(torch.tensor([1.0]).bfloat16()),
            metrics={"a": 2.0},
            transforms=("t",),
        )
        header, data = parts(encode(sent))
        fields = (
            r"{\"metrics\":[\"a\"],\"params\":{\"bits\":3,\"count\":3,\"low_bits\":3,\"size\":50},"
            rf"\"space\":\"{SPACE}\",\"transforms\":[\"t\"]}}"
        )
        assert header[DIGEST.stop - 8 :].decode().rstrip() == (
            f'","update":"{fields}"}},'
            '"metrics":{"dtype":"F64","shape":[1],"data_offsets":[0,8]},'
            '"numbers":{"dtype":"I64","shape":[4],"data_offsets":[8,40]},'
            '"params.scales":{"dtype":"F32","shape":[1],"data_offsets":[40,44]},'
            '"buffers":{"dtype":"BF16","shape":[1],"data_offsets":[44,46]},'
            '"params.codes":{"dtype":"U8","shape":[2],"data_offsets":[46,48]},'
            '"params.gaps":{"dtype":"U8","shape":[3],"data_offsets":[48,51]}}'
        )
        numbers = "04000000000000004d000000000000000c000000000000000300000000000000"
        # by hand: codes are sent as 2 | 5 << 3 | 7 << 6; gaps 1, 0, 37; r = 3; quotients
        # 1 1 00001, remainders 1 | 0 << 3 | 5 << 6
        rest = "0000003f" + "803f" + "ea01" + "434101"
        assert data.hex() == "0000000000000040" + numbers + rest


class TestSizes:
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_dense(self, dtype):
        sizes = [encoded_size(plain(dense(rng(), n, dtype))) for n in (1000, 9000)]
        assert 0 <= sizes[1] - sizes[0] - 8000 * dtype.itemsize <= 8  # digits of lengths
        assert 320 <= sizes[0] - 1000 * dtype.itemsize <= 336

    @pytest.mark.parametrize("bits", range(1, 9))
    def test_codes_of_b_bits_take_b_bits(self, bits):
        one = quantised(rng(), 8000, bits, has_offsets=True)
        blocks = quantised(rng(), 8000, bits, block=100, has_offsets=True)
        sizes = {name: tensor.nbytes for name, tensor in content_of("x", blocks)[1].items()}
        assert sizes == {"x.codes": 1000 * bits, "x.scales": 320, "x.offsets": 320}
        grown = encoded_size(plain(blocks)) - encoded_size(plain(one))
        assert 79 * 8 <= grown <= 79 * 8 + 40  # and the block, in the header

    @pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.3, 0.5])
    def test_indices_are_within_a_few_percent_of_their_entropy(self, density):
        size, kept = 100_000, int(100_000 * density)
        taken = gap_bytes(payload(rng(), size, FLOAT32, kept))
        share = np.array([density, 1 - density])
        entropy = -size * (share * np.log2(share)).sum() / 8
        assert taken <= 1.04 * entropy + 1

    @given(indices=st.sets(st.integers(0, 9999), min_size=1))
    def test_any_indices_are_within_their_bound(self, indices):
        sparse = Sparse(torch.tensor(sorted(indices)), Dense(torch.ones(len(indices))), 10_000)
        taken = gap_bytes(sparse)
        assert taken <= len(indices) * (np.log2(10_000 / len(indices)) + 3) / 8 + 2


def octets(*values):
    return torch.tensor(values, dtype=torch.uint8)


A_DENSE, SPARSE = dense(rng(), 4, FLOAT32), payload(rng(), 40, FLOAT32, 5)
THREE_BITS, WITH_OFFSETS = quantised(rng(), 5, 3), quantised(rng(), 5, 8, None, True)
CODES = {"bits": 3, "count": 5}  # what is said of the first
NO_INDEX = payload(rng(), 40, FLOAT32, 0)


class TestRefusals:
    @pytest.mark.parametrize(
        ("differs", "says"),
        [
            ({"kind": "model"}, "of kind 'model', got 'update'"),
            ({"space": "f" * 32}, "space"),
            ({"round_index": 5}, "round 4 instead of 5"),
            ({"transforms": ("sign",)}, "transforms"),
            ({"num_params": 9}, "payload of 10 numbers, 9 expected"),
            ({"num_buffers": 0}, "payload of 2 numbers, 0 expected"),
        ],
    )
    def test_what_was_not_agreed_on(self, differs, says):
        sent = message(dense(rng(), 10, FLOAT32))
        with pytest.raises(MessageError, match=says):
            decode(encode(sent), Agreement(**{**vars(agreement(sent, 10)), **differs}))

    @pytest.mark.parametrize(
        ("params", "fields", "tensors", "says"),
        [
            (A_DENSE, {}, {"params": torch.zeros(4, dtype=torch.int32)}, "vector of torch.float64"),
            (A_DENSE, {}, {"params": torch.zeros(2, 2)}, "vector of torch.float64"),
            (A_DENSE, {}, {"params": None}, "payload of 0 numbers, 4 expected"),
            (A_DENSE, {}, {"buffers": torch.empty(0)}, "not in canonical form"),
            (A_DENSE, {}, {"code": torch.zeros(2)}, "not in canonical form"),
            (A_DENSE, {}, {"numbers": torch.zeros(4)}, "numbers must be a vector of torch.int64"),
            (A_DENSE, {}, {"numbers": torch.tensor([4, -1, 12, 3])}, "client_id must be"),
            (A_DENSE, {}, {"metrics": torch.ones(1).double()}, "not in canonical form"),
            (A_DENSE, {"metrics": [3]}, {"metrics": torch.ones(1).double()}, "canonical form"),
            (A_DENSE, {"metrics": []}, {}, "canonical form"),
            (A_DENSE, {"params": 5}, {}, "must be a mapping"),
            (A_DENSE, {"code": 1}, {}, "has the unknown field 'code'"),
            (A_DENSE, {"space": None}, {}, "has no space"),
            *(
                (dense(rng(), 1, dtype), {}, {"params": torch.tensor([bad], dtype=dtype)}, "finite")
                for dtype, bad in zip(FLOATS, [torch.inf, torch.nan] * 2, strict=True)
            ),
            (THREE_BITS, {"params": CODES | {"bits": 1}}, {}, "5 codes of 1 bits do not fill 2"),
            (THREE_BITS, {"params": CODES | {"bits": 9}}, {}, "bits must be .* at most 8"),
            (THREE_BITS, {"params": CODES | {"block": 0}}, {}, "block must be"),
            (THREE_BITS, {"params": CODES | {"block": [4]}}, {}, "blocks of 4 numbers .* got 5"),
            (THREE_BITS, {"params": CODES | {"block": 2}}, {}, "scales must be 3 numbers"),
            (THREE_BITS, {"params": CODES | {"x": 2}}, {}, "unknown field 'x'"),
            (THREE_BITS, {}, {"params.scales": torch.tensor([-1.0])}, "numbers of at least 0"),
            (THREE_BITS, {}, {"params.scales": torch.tensor([torch.nan])}, "numbers of at least 0"),
            (THREE_BITS, {}, {"params.scales": torch.tensor([3.4e38])}, "numbers beyond"),
            (THREE_BITS, {}, {"params.codes": octets(0, 255)}, "not in canonical form"),
            (THREE_BITS, {}, {"params.codes": octets(0, 0, 0)}, "do not fill 3 bytes"),
            (WITH_OFFSETS, {}, {"params.offsets": torch.tensor([torch.nan])}, "numbers beyond"),
            (WITH_OFFSETS, {}, {"params.offsets": torch.ones(2)}, "offsets must be 1 numbers"),
            (SPARSE, {"params": {"low_bits": 63, "size": 40}}, {}, "too many for 5"),
            (SPARSE, {"params": {"low_bits": 64, "size": 40}}, {}, "low_bits must be"),
            (SPARSE, {"params": {"low_bits": 2, "size": 41}}, {}, "41 numbers, 40 expected"),
            # there is no place for a payload inside a payload inside a payload
            (
                SPARSE,
                {"params": {"low_bits": 2, "size": 40, "values": {}}},
                {},
                "unknown field 'values'",
            ),
            (SPARSE, {}, {"params": torch.ones(41)}, "too many for 41"),
            (SPARSE, {}, {"params.gaps": torch.zeros(99, dtype=torch.uint8)}, "too many for 5"),
            (SPARSE, {}, {"params.gaps": octets(0, 0, 0, 0)}, "the quotients are not those of 5"),
            (NO_INDEX, {"params": {"low_bits": 2, "size": 40}}, {}, "not in canonical form"),
        ],
    )
    def test_payloads_that_nobody_writes(self, params, fields, tensors, says):
        sent = plain(params)
        data = changed(encode(sent), fields, **tensors)
        with pytest.raises(MessageError, match=says):
            decode(data, agreement(sent, params.size))

    @pytest.mark.parametrize("hostile", [2**20, 2**40, 2**63, 2**64 - 1])
    @pytest.mark.parametrize(
        "params",
        [dense(rng(), 9, FLOAT32), quantised(rng(), 9, 5, 4), payload(rng(), 9, FLOAT32, 3)],
        ids=["dense", "quantised", "sparse"],
    )
    def test_a_hostile_length_takes_neither_memory_nor_time(self, params, hostile):
        """Even where the receiver itself agreed on so many numbers."""
        sent = plain(params)
        header, data = parts(encode(sent))
        numbers = list(re.finditer(rb"(?<=[:\[,])\d+", header[DIGEST.stop :]))
        assert len(numbers) > 5

        def lie():
            for number in numbers:
                at, end = (DIGEST.stop + place for place in number.span())
                lied = (header[:at] + b"%d" % hostile + header[end:]).rstrip()
                for num_params in (9, hostile):
                    with suppress(MessageError):
                        forged = with_header(lied + b" " * (-len(lied) % 8), data)
                        decode(forged, agreement(sent, num_params))

        lie()  # what is imported or kept at first use is there
        tracemalloc.start()
        began = time.process_time()
        lie()
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
            ({"round_index": -1}, "round_index must be a whole number, at least 0"),
            ({"client_id": 2**63}, "client_id must be"),
            ({"num_examples": 0}, "at least 1"),
        ],
    )
    def test_fields_out_of_range(self, fields, says):
        with pytest.raises(ValueError, match=says):
            message(Dense(torch.ones(1)), **fields)
