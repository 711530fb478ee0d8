"""Encrypted sums are the plain ones, and the server cannot read them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fl_lightning.core.plain_json import MessageError
from fl_lightning.secure.encryption.ciphertext_numbers import MOST_BITS, CKKSParameters, numbers_of
from fl_lightning.secure.encryption.ckks import (
    FLOOD,
    CKKSClient,
    CKKSServer,
    ciphertext_bytes,
    flooded,
    generate_keys,
)
from fl_lightning.secure.encryption.encrypted_update import (
    CKKSLayout,
    EncryptedUpdate,
    most_sensitive,
)
from fl_lightning.secure.encryption.paillier import PaillierSum
from fl_lightning.secure.sum_quantiser import SumQuantiser

tenseal = pytest.importorskip("tenseal", reason="needs the extra he")
phe = pytest.importorskip("phe", reason="needs the extra he")


@pytest.fixture(scope="module")
def ckks_keys():
    return generate_keys(CKKSParameters())


def deltas(count, size, seed=0):
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("fraction", "size"), [(None, 1), (None, 5000), (0.1, 5000), (1.0, 1)])
def test_the_opened_sum_is_the_sum(ckks_keys, fraction, size):
    values = deltas(5, size)
    selected = None if fraction is None else most_sensitive(values.abs().sum(0), fraction)
    layout = CKKSLayout(size, selected)
    client, server = CKKSClient(layout, ckks_keys), CKKSServer(layout)
    sent, senders = zip(*(client.encrypt(row, at) for at, row in enumerate(values)), strict=True)
    arrived = [layout.decoded(each.encode()) for each in sent]
    total = layout.decoded(server.sum(arrived).encode())
    error = (client.open(total, senders) - values.double().sum(0)).abs()
    is_hidden = torch.ones(size, dtype=bool) if selected is None else torch.zeros(size, dtype=bool)
    is_hidden[selected if selected is not None else slice(0)] = True
    assert error[is_hidden].max() < 6 * FLOOD
    assert error.max() < 1e-5  # those in clear are float32
    assert arrived[0].num_bytes == len(arrived[0].encode())
    assert len(arrived[0].ciphertexts[0]) == ciphertext_bytes(layout.parameters)


def test_the_schemes_own_error_is_far_below_the_noise_that_hides_it(ckks_keys, monkeypatch):
    monkeypatch.setattr("fl_lightning.secure.encryption.ckks.FLOOD", 0.0)
    layout = CKKSLayout(4096)
    client, server = CKKSClient(layout, ckks_keys), CKKSServer(layout)
    sent, senders = zip(*(client.encrypt(torch.zeros(4096), at) for at in range(16)), strict=True)
    error = client.open(server.sum(sent), senders)  # of zeros nothing else is left
    assert 0 < error.abs().max() < FLOOD * 2.0**-35
    assert error.std() == pytest.approx(2.0**-80 * 3.2 * (16 * 8192 / 2) ** 0.5, rel=0.5)


def test_only_what_is_selected_is_hidden(ckks_keys):
    values = deltas(1, 1000)[0]
    layout = CKKSLayout(1000, most_sensitive(values.abs(), 0.2))
    update, _ = CKKSClient(layout, ckks_keys).encrypt(values)
    kept = set(range(1000)) - set(layout.selected.tolist())
    assert torch.equal(update.clear, values[sorted(kept)])
    whole, _ = CKKSClient(CKKSLayout(9000), ckks_keys).encrypt(torch.zeros(9000))
    assert update.num_bytes < whole.num_bytes


def test_the_same_update_is_encrypted_differently_each_time(ckks_keys):
    layout = CKKSLayout(10)
    client = CKKSClient(layout, ckks_keys)
    one, two = (client.encrypt(torch.zeros(10))[0].ciphertexts[0] for _ in range(2))
    assert one != two
    assert repr(ckks_keys) == f"CKKSKeys({len(ckks_keys.secret)} secret bytes)"
    total, sender = client.encrypt(torch.ones(10))
    other = generate_keys(CKKSParameters())
    with pytest.raises(MessageError, match="not the sum"):
        CKKSClient(layout, other).open(total, [sender])
    thief = CKKSClient(layout, replace(ckks_keys, secret=other.secret))
    assert (thief.open(total, [sender]) - 1).abs().max() > 1


def test_strangers_messages_are_refused(ckks_keys):
    layout = CKKSLayout(10)
    client, server = CKKSClient(layout, ckks_keys), CKKSServer(layout)
    update, _ = client.encrypt(torch.ones(10))
    data, rng = update.encode(), np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(data)
        changed[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        with pytest.raises(MessageError):
            layout.decoded(bytes(changed))
    whole = update.ciphertexts[0]
    for junk in (b"", b"junk", whole[:1000], whole[:-1], b"\xff" * len(whole)):
        with pytest.raises(MessageError, match=r"another length|not below its modulus"):
            server.plus(None, EncryptedUpdate((junk,), update.clear))
    with pytest.raises(MessageError, match="no encrypted update of 2 ciphertexts and 0 numbers"):
        CKKSLayout(5000).decoded(data)
    with pytest.raises(MessageError, match="0 ciphertexts instead of 1"):
        server.plus(None, EncryptedUpdate((), update.clear))
    with pytest.raises(MessageError, match="1 numbers in clear"):
        server.plus(None, replace(update, clear=torch.ones(1)))
    with pytest.raises(MessageError, match="not finite"):
        CKKSLayout(1, selected=torch.empty(0, dtype=torch.int64)).decoded(
            EncryptedUpdate((), torch.tensor([torch.nan])).encode()
        )


@pytest.fixture
def three(ckks_keys):
    """A round of three clients: who opens, who adds, what they send, and who they are."""
    layout = CKKSLayout(10)
    client, server = CKKSClient(layout, ckks_keys), CKKSServer(layout)
    sent, senders = zip(*(client.encrypt(torch.ones(10), at) for at in range(3)), strict=True)
    return client, server, list(sent), list(senders)


def test_nothing_but_the_sum_of_those_who_are_named_is_opened(three, ckks_keys, monkeypatch):
    client, server, sent, senders = three
    total = server.sum(sent)
    opened = client.open(total, senders)
    read = []
    monkeypatch.setattr(tenseal, "ckks_vector_from", lambda *given: read.append(given))
    twice = server.sum([sent[0], *sent])
    wrong = [
        (sent[0], senders),  # one client's alone
        (server.sum(sent[:2]), senders),
        (total, senders[:2]),
        (total, [*senders, senders[0]]),
        (twice, [senders[0], *senders]),
        (twice, senders),
        (server.sum([sent[0]] * 3), senders),
        (total, [replace(senders[0], client=7), *senders[1:]]),
        (total, [replace(senders[0], nonce=bytes(16)), *senders[1:]]),
        (total, [replace(senders[0], fewest=3), *senders[1:]]),
    ]
    for message, named in wrong:
        with pytest.raises(MessageError, match="not the sum of what clients"):
            client.open(message, named)
    for changed in (replace(client._layout, round_index=1), replace(client._layout, purpose=b"b")):
        with pytest.raises(MessageError, match="not the sum"):
            CKKSClient(changed, ckks_keys).open(total, senders)
    assert not read
    monkeypatch.undo()
    assert (opened - 3).abs().max() < 6 * FLOOD


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_no_bit_of_a_sum_can_be_changed(three, place, bit):
    client, server, sent, senders = three
    [data] = server.sum(sent).ciphertexts
    changed = bytearray(data)
    changed[place % len(data)] ^= 1 << bit
    with pytest.raises(MessageError, match=r"not the sum|not below"):
        client.open(EncryptedUpdate((bytes(changed),), torch.empty(0)), senders)


def test_no_multiple_or_mixture_of_places_is_opened(ckks_keys):
    layout = CKKSLayout(5000)
    client, server = CKKSClient(layout, ckks_keys), CKKSServer(layout)
    sent, senders = zip(*(client.encrypt(torch.ones(5000), at) for at in range(2)), strict=True)
    total = server.sum(sent)
    doubled = server.plus(total, total)
    exchanged = replace(total, ciphertexts=total.ciphertexts[::-1])
    for message in (doubled, exchanged):
        with pytest.raises(MessageError, match="not the sum"):
            client.open(message, senders)


def test_the_numbers_of_a_ciphertext_are_those_of_the_library(ckks_keys):
    layout = CKKSLayout(7)
    client, server = CKKSClient(layout, ckks_keys), CKKSServer(layout)
    context = tenseal.context_from(ckks_keys.secret)
    one, two = (tenseal.ckks_vector(context, [float(at)] * 7) for at in (1, 2))
    added = server._packed.sum(*(numbers_of(v.ciphertext()[0]) for v in (one, two)))
    assert np.array_equal(added, numbers_of((one + two).ciphertext()[0]))
    assert client._decrypted(added, 7).tolist() == pytest.approx([3.0] * 7)
    assert np.array_equal(server._packed.read(server._packed.write(added)), added)


def test_numbers_outside_their_range_are_refused(ckks_keys):
    client = CKKSClient(CKKSLayout(3), ckks_keys)
    for values in ([1.0, torch.nan, 0.0], [torch.inf, 0.0, 0.0], [2.0**17, 0.0, 0.0]):
        with pytest.raises(ValueError, match="finite and below"):
            client.encrypt(torch.tensor(values))
    with pytest.raises(ValueError, match="shape"):
        client.encrypt(torch.ones(4))
    largest = client._layout.parameters.largest * (1 - 1e-6)  # which is let through, and comes back
    halves = torch.tensor([largest, -largest, 0.0], dtype=torch.float64) / 2
    sent, senders = zip(*(client.encrypt(halves, at) for at in range(2)), strict=True)
    opened = client.open(CKKSServer(client._layout).sum(sent), senders).tolist()
    assert opened == pytest.approx([largest, -largest, 0.0], abs=1e-5)
    for selected in ([1, 1], [2, 1], [-1], [3]):
        with pytest.raises(ValueError, match="increasing"):
            CKKSLayout(3, torch.tensor(selected))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"coefficient_bits": (60, 49, 60, 50)},
            "219, but .* at most 218 .*16384",
        ),
        ({"degree": 4096}, "at most 109"),
        ({"degree": 1000}, "degree must be one of"),
        ({"coefficient_bits": (60,)}, "at least two"),
        ({"coefficient_bits": (61, 40, 40)}, "from 20 to 60"),
        ({"coefficient_bits": (40, 40, 40)}, "scale_bits must be from 10 to 76"),
        ({"scale_bits": 97}, "from 10 to 96"),
    ],
)
def test_unsafe_parameters_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CKKSParameters(**options)


@pytest.mark.parametrize("degree", [4096, 8192])
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


def test_paillier_sums_are_exact():
    quantiser = SumQuantiser(num_clients=3, clip=2.0, levels=2**16, max_examples=50)
    paillier, draw = PaillierSum(quantiser, key_bits=2048), np.random.default_rng(0).random
    for size in (1, 70, 200):
        vectors = [quantiser.encode(row, 7, draw) for row in deltas(3, size)]
        vectors[0][:] = quantiser.levels * 50  # the largest that there can be
        one, two, three = (paillier.encrypt(vector) for vector in vectors)
        total = paillier.decrypt(paillier.plus(paillier.plus(one, two), three), size + 1)
        assert np.array_equal(total, sum(vectors))
        assert paillier.encrypt(vectors[0]) != one
        count = -(-(size + 1) // (2047 // quantiser.largest_sum.bit_length()))
        assert paillier.num_ciphertexts(size + 1) == len(one) == count
        assert {len(each) for each in one} == {paillier.width}
