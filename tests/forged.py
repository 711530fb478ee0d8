"""Containers with something else inside, whose checksum is right: what a forger with our format can send."""

import hashlib
import json
import random
import struct

from fl_lightning.core.container import MAGIC, read, write

DIGEST = slice(8 + len(MAGIC), 8 + len(MAGIC) + 64)


def sealed(data):
    """Return the bytes of a container with their checksum put right."""
    digest = hashlib.sha256(data[: DIGEST.start] + data[DIGEST.stop :]).hexdigest().encode()
    return data[: DIGEST.start] + digest + data[DIGEST.stop :]


def parts(data):
    """Return the header and the tensors' bytes."""
    (length,) = struct.unpack("<Q", data[:8])
    return data[8 : 8 + length], data[8 + length :]


def with_header(header, data=b""):
    header = header.encode() if isinstance(header, str) else header
    return sealed(struct.pack("<Q", len(header)) + header + data)


def padded(text):
    return text + " " * (-len(text) % 8)


def kind_and_text(data):
    """Return the kind, and the text of the fields."""
    return list(json.loads(parts(data)[0])["__metadata__"].items())[-1]


def fields_of(data):
    return json.loads(kind_and_text(data)[1])


def with_text(data, text):
    """Return the container with another text of its fields."""
    header, tensors = parts(data)
    entries = json.loads(header)
    entries["__metadata__"][kind_and_text(data)[0]] = text
    return with_header(padded(json.dumps(entries, separators=(",", ":"))), tensors)


def canonical(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def changed(data, fields=None, **tensors):
    """Return the container with other fields and tensors; one that is None is left out."""
    kind, _ = kind_and_text(data)
    found, kept = read(data, kind)
    fields = fields or {}
    kept_fields = {name: value for name, value in found.items() if name not in fields}
    new_fields = {name: value for name, value in fields.items() if value is not None}
    tensors = {name: t for name, t in {**kept, **tensors}.items() if t is not None}
    return write(kind, {**kept_fields, **new_fields}, tensors)


WORDS = ["NaN", "-1", "1e999", "null", "true", "[]", "{}", '""', "9" * 30, "2.5", '"a"', "[[1]]"]


def mutated_bytes(rng, data, other):
    """Return bytes after one to three changes: a bit, a gap, a splice, random bytes, a cut."""
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) or 1)
        end = at + rng.randrange(1, 20)
        bit = bytes([data[at] ^ 1 << rng.randrange(8)]) if data else b""
        there = rng.choice([bit + data[at + 1 : end], b"", other[at:end], rng.randbytes(end - at)])
        data = data[:at] + there + (b"" if rng.random() < 0.1 else data[end:])
    return data


def mutated_value(rng, value):
    """Return JSON of which one part is another."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        new = dict(value)
        inner = new.pop(name)
        if rng.random() < 0.85:
            new[name if rng.random() < 0.9 else name + "x"] = mutated_value(rng, inner)
        return new
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], mutated_value(rng, value[at]), *value[at + rng.randrange(2) :]]
    numbers = [None, -1, 3, 2**31, 2**63, 2**64, 1.5]
    return rng.choice([*numbers, "", "train", [], {}, [value], True, value])


def mutated(rng, data, other):
    """Return a container after a change of some kind; in four of six the checksum fits."""
    kind = rng.randrange(6)
    header, tensors = parts(data)
    _, text = kind_and_text(data)
    if kind == 0:
        return mutated_bytes(rng, data, other)
    if kind == 1:  # any damage, with a right checksum
        return sealed(mutated_bytes(rng, data, other))
    if kind == 2:  # other fields in the right form
        return with_text(data, canonical(mutated_value(rng, json.loads(text))))
    if kind == 3:  # another text of the fields
        at = rng.randrange(len(text) + 1)
        return with_text(data, text[:at] + rng.choice(WORDS) + text[at + rng.randrange(4) :])
    if kind == 4:  # other numbers
        return with_header(header, mutated_bytes(rng, tensors, parts(other)[1])[: len(tensors)])
    entries = mutated_value(rng, json.loads(header))
    return with_header(padded(json.dumps(entries, separators=(",", ":"))), tensors)


def mutations(seed, sent):
    """Yield pairs (which of those sent, a mutation of it), without end."""
    rng = random.Random(seed)  # ten times as fast as NumPy's for single numbers
    while True:
        which = rng.randrange(len(sent))
        yield which, mutated(rng, sent[which], rng.choice(sent))
