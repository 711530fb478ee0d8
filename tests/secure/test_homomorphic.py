"""Encrypted sums are the plain ones, and the server cannot read them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fl_lightning.secure.encryption.ckks import (
    CKKSClient,
    CKKSServer,
    flooded,
    generate_keys,
)
from fl_lightning.secure.encryption.ckks_layout import CKKSLayout, most_sensitive
from fl_lightning.secure.encryption.ckks_parameters import MOST_BITS, CKKSParameters
from fl_lightning.secure.encryption.encrypted_update import TAG_SIZE, EncryptedUpdate
from fl_lightning.secure.encryption.paillier import PaillierKeys, PaillierSum
from fl_lightning.secure.sum_quantiser import SumQuantiser
from fl_lightning.updates.wire.reader import DecodeError

tenseal = pytest.importorskip("tenseal", reason="needs the extra he")
phe = pytest.importorskip("phe", reason="needs the extra he")


@pytest.fixture(scope="module")
def ckks_keys():
    return generate_keys(CKKSParameters())


@pytest.fixture(scope="module")
def paillier_keys():
    return PaillierKeys.generate(2048)


def deltas(count, size, seed=0):
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("fraction", [None, 0.1, 1.0])
@pytest.mark.parametrize("size", [1, 5000])
def test_the_decrypted_sum_is_the_weighted_mean(ckks_keys, fraction, size):
    values, shares = deltas(5, size), [0.4, 0.3, 0.1, 0.15, 0.05]
    selected = None if fraction is None else most_sensitive(values.abs().sum(0), fraction)
    layout = CKKSLayout(size, selected)
    client, server = CKKSClient(layout, ckks_keys.secret), CKKSServer(layout, ckks_keys.public)
    arrived = [
        layout.decoded(client.encrypt(row, sender).encode()) for sender, row in enumerate(values)
    ]
    total = server.weighted_sum(zip(arrived, shares, strict=True))
    received = layout.decoded(total.encode())
    expected = (values.double() * torch.tensor(shares).double()[:, None]).sum(0)
    assert (client.decrypt(received) - expected).abs().max() < 5e-6
    assert arrived[0].num_bytes == len(arrived[0].encode())


def test_only_what_is_selected_is_hidden(ckks_keys):
    values = deltas(1, 1000)[0]
    layout = CKKSLayout(1000, most_sensitive(values.abs(), 0.2))
    update = CKKSClient(layout, ckks_keys.secret).encrypt(values)
    kept = set(range(1000)) - set(layout.selected.tolist())
    assert torch.equal(update.clear, values[sorted(kept)])
    assert (
        update.num_bytes
        < CKKSClient(CKKSLayout(9000), ckks_keys.secret).encrypt(torch.zeros(9000)).num_bytes
    )


def test_the_same_update_is_encrypted_differently_each_time(ckks_keys):
    client = CKKSClient(CKKSLayout(10), ckks_keys.secret)
    one, two = (client.encrypt(torch.zeros(10)).ciphertexts[0] for _ in range(2))
    assert one != two
    with pytest.raises(ValueError, match="clients need the secret one"):
        CKKSClient(CKKSLayout(10), ckks_keys.public)
    with pytest.raises(ValueError, match="must have the public one only"):
        CKKSServer(CKKSLayout(10), ckks_keys.secret)
    assert "secret bytes" in repr(ckks_keys)
    total = CKKSServer(CKKSLayout(10), ckks_keys.public).plus(
        None, client.encrypt(torch.ones(10)), 1
    )
    other = generate_keys(CKKSParameters())
    stranger = replace(ckks_keys, secret=ckks_keys.secret[:TAG_SIZE] + other.secret[TAG_SIZE:])
    with pytest.raises(DecodeError, match="not authentic"):
        CKKSClient(CKKSLayout(10), other.secret).decrypt(total)
    wrong = CKKSClient(CKKSLayout(10), stranger.secret).decrypt(total)
    assert (wrong - 1).abs().max() > 1


def test_strangers_ciphertexts_are_refused(ckks_keys):
    layout = CKKSLayout(10)
    client, server = CKKSClient(layout, ckks_keys.secret), CKKSServer(layout, ckks_keys.public)
    update = client.encrypt(torch.ones(10))
    data, rng = update.encode(), np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(data)
        changed[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        with pytest.raises(DecodeError):
            layout.decoded(bytes(changed))
    for junk in (b"", b"junk", update.ciphertexts[0][:1000]):
        with pytest.raises(DecodeError, match="client 0 is not authentic"):
            server.weighted_sum([(EncryptedUpdate((junk,), update.clear), 1.0)])
        # of somebody who has the key of tags and follows no other rule
        known = EncryptedUpdate((junk,), update.clear)
        with pytest.raises(DecodeError, match="no ciphertext"):
            server.weighted_sum(
                [(known.signed(ckks_keys.public[:TAG_SIZE], b"CKKS update" + layout.identity), 1.0)]
            )
    with pytest.raises(DecodeError, match="1 ciphertexts"):
        CKKSLayout(5000).decoded(data)
    empty = EncryptedUpdate((), update.clear)
    with pytest.raises(DecodeError, match="0 ciphertexts instead of 1"):
        server.weighted_sum(
            [(empty.signed(ckks_keys.public[:TAG_SIZE], b"CKKS update" + layout.identity), 1.0)]
        )
    with pytest.raises(DecodeError, match="not finite"):
        EncryptedUpdate.decode(
            EncryptedUpdate((), torch.tensor([torch.nan])).encode(), num_ciphertexts=0, num_clear=1
        )


def test_the_library_reads_no_message_that_is_not_a_clients_of_the_round(ckks_keys, monkeypatch):
    layout = CKKSLayout(10)
    client, server = CKKSClient(layout, ckks_keys.secret), CKKSServer(layout, ckks_keys.public)
    update, read = client.encrypt(torch.ones(10)), []
    monkeypatch.setattr(tenseal, "ckks_vector_from", lambda *given: read.append(given))
    rng, data = np.random.default_rng(0), update.ciphertexts[0]
    for _ in range(500):
        changed = bytearray(data)
        changed[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        # the checksum of such a message fits: only the tag does not
        arrived = layout.decoded(replace(update, ciphertexts=(bytes(changed),)).encode())
        with pytest.raises(DecodeError, match="not authentic"):
            server.plus(None, arrived, 1.0)
        with pytest.raises(DecodeError, match="not authentic"):
            client.decrypt(arrived)
    for other in (replace(update, sender=1), replace(update, clear=torch.ones(1))):
        with pytest.raises(DecodeError, match="not authentic"):
            server.plus(None, other, 1.0)
    next_round = CKKSServer(CKKSLayout(10, round_index=1), ckks_keys.public)
    with pytest.raises(DecodeError, match="not authentic"):
        next_round.plus(None, update, 1.0)
    with pytest.raises(DecodeError, match="not authentic"):
        client.decrypt(update)  # one client's alone is no sum
    assert not read


def test_no_update_is_added_twice(ckks_keys):
    layout = CKKSLayout(10)
    client, server = CKKSClient(layout, ckks_keys.secret), CKKSServer(layout, ckks_keys.public)
    update = client.encrypt(torch.ones(10), sender=4)
    total = server.plus(None, update, 0.5)
    with pytest.raises(DecodeError, match="client 4's update is in the sum already"):
        server.plus(total, update, 0.5)


def test_shares_and_numbers_outside_their_range_are_refused(ckks_keys):
    layout = CKKSLayout(3)
    client, server = CKKSClient(layout, ckks_keys.secret), CKKSServer(layout, ckks_keys.public)
    update = client.encrypt(torch.ones(3))
    for shares in ([0.5, 0.6], [0.0], [-1.0], [float("nan")]):
        with pytest.raises(ValueError, match="shares must be"):
            server.weighted_sum([(update, share) for share in shares])
    with pytest.raises(ValueError, match="no update"):
        server.weighted_sum([])
    for values in ([1.0, torch.nan, 0.0], [torch.inf, 0.0, 0.0], [2.0**17, 0.0, 0.0]):
        with pytest.raises(ValueError, match="finite and below"):
            client.encrypt(torch.tensor(values))
    with pytest.raises(ValueError, match="shape"):
        client.encrypt(torch.ones(4))
    for selected in ([1, 1], [2, 1], [-1], [3]):
        with pytest.raises(ValueError, match="increasing"):
            CKKSLayout(3, torch.tensor(selected))


def test_the_largest_number_that_is_let_through_comes_back(ckks_keys):
    layout = CKKSLayout(2)
    largest = layout.parameters.largest * (1 - 1e-6)
    client, server = CKKSClient(layout, ckks_keys.secret), CKKSServer(layout, ckks_keys.public)
    update = client.encrypt(torch.tensor([largest, -largest]))
    other = client.encrypt(torch.tensor([largest, -largest]), sender=1)
    total = server.weighted_sum([(update, 0.5), (other, 0.5)])
    assert client.decrypt(total)[0] == pytest.approx(largest, rel=1e-5)
    assert client.decrypt(total)[1] == pytest.approx(-largest, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"coefficient_bits": (60, 49, 60, 50), "scale_bits": 60},
            "219, but .* at most 218 .*16384",
        ),
        ({"degree": 4096}, "at most 109"),
        ({"degree": 1000}, "degree must be one of"),
        ({"coefficient_bits": (60, 40)}, "at least three"),
        ({"coefficient_bits": (61, 40, 40)}, "from 20 to 60"),
        ({"coefficient_bits": (40, 40, 40)}, "scale_bits must be from 10 to 36"),
        ({"scale_bits": 30}, "those of the last prime but one, 40"),
    ],
)
def test_unsafe_parameters_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CKKSParameters(**options)


@pytest.mark.parametrize("degree", [4096, 8192, 16384])
def test_the_limits_are_those_of_the_library(degree):
    most = MOST_BITS[degree]
    count = -(-most // 50)
    bits = [most // count + (at < most % count) for at in range(count)]
    scheme = tenseal.SCHEME_TYPE.CKKS
    assert sum(bits) == most
    tenseal.context(scheme, degree, coeff_mod_bit_sizes=bits)
    with pytest.raises(ValueError, match="encryption parameters"):
        tenseal.context(scheme, degree, coeff_mod_bit_sizes=[*bits[:-1], bits[-1] + 1])


def test_noise_over_a_published_sum_is_gaussian():
    noise = flooded(torch.zeros(20_000), 0.5, np.random.default_rng(0).random)
    assert abs(noise.mean()) < 4 * 0.5 / 20_000**0.5
    assert noise.std() == pytest.approx(0.5, rel=0.03)
    assert (noise.abs() < 1.0).double().mean() == pytest.approx(0.9545, abs=0.01)
    assert not torch.equal(flooded(torch.zeros(3), 1.0), flooded(torch.zeros(3), 1.0))


@pytest.mark.parametrize("size", [1, 70, 200])
def test_paillier_sums_are_exact(paillier_keys, size):
    quantiser = SumQuantiser(num_clients=3, clip=2.0, levels=2**16, max_examples=50)
    clients = PaillierSum(paillier_keys, quantiser, size + 1)
    server = PaillierSum(paillier_keys.public, quantiser, size + 1)
    draw = np.random.default_rng(0).random
    vectors = [quantiser.encode(row, 7, draw) for row in deltas(3, size)]
    vectors[0][:] = quantiser.levels * 50  # the largest that there can be
    total = clients.decrypt(server.sum(clients.encrypt(vector) for vector in vectors))
    assert np.array_equal(total, sum(vectors))
    assert len(clients.encrypt(vectors[0])) == clients.num_bytes
    assert clients.encrypt(vectors[0]) != clients.encrypt(vectors[0])
    assert clients.num_ciphertexts == -(-(size + 1) // (2047 // quantiser.largest_sum.bit_length()))


def test_paillier_refuses(paillier_keys):
    quantiser = SumQuantiser(num_clients=2, levels=2**16)
    with pytest.raises(ValueError, match=r"takes about \d+ s \(.* h\), more than max_seconds 600"):
        PaillierSum(paillier_keys, quantiser, 100_000_000)
    clients = PaillierSum(paillier_keys, quantiser, 2)
    server = PaillierSum(paillier_keys.public, quantiser, 2)
    data = clients.encrypt(np.array([1, 2], np.uint32))
    with pytest.raises(ValueError, match="cannot decrypt"):
        server.decrypt(data)
    for count in (0, 3):
        with pytest.raises(ValueError, match="1 to 2 vectors"):
            server.sum([data] * count)
    for wrong in (data[:-1], bytes(len(data)), b"\xff" * len(data)):
        with pytest.raises(DecodeError):
            server.sum([wrong])
    for values in ([1], [1, 2**16 + 1]):
        with pytest.raises(ValueError, match="2 integers of at most 65536"):
            clients.encrypt(np.array(values, np.uint32))
    with pytest.raises(ValueError, match="at least 2048"):
        PaillierKeys.generate(1024)
    with pytest.raises(ValueError, match="at least 2048"):
        PaillierKeys(2**100)
    with pytest.raises(ValueError, match="factors"):
        PaillierKeys(paillier_keys.modulus, (3, 5))
    assert repr(paillier_keys) == "PaillierKeys(2048 bits, secret)"
    assert repr(paillier_keys.public) == "PaillierKeys(2048 bits, public)"
