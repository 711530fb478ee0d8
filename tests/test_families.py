"""What every exported member of every family keeps to: it has a row, is explained, final and frozen.

What the members of a family keep to besides is in `test_families_folds` (aggregators and robust rules)
and `test_families_functions`; that those that are switched off change nothing, in `test_families_off`.
"""

import copy
import dataclasses
import inspect
import pickle
import re
from contextlib import nullcontext

import pytest
from families import FAMILIES, TABLE, every_member, exported, is_member, made, of
from readme import ROOT

from fl_lightning import Mean

DOCS = ROOT / "docs"
PAGES = "".join(page.read_text() for page in (*DOCS.glob("*.md"), *DOCS.glob("algorithms/*.md")))
NOT_FINAL = {Mean}  # a test derives from it
FROZEN = FAMILIES.keys() - {"aggregator", "optimizer"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_exported_member_has_a_row(family):
    found = {cls for cls in exported() if is_member(cls, FAMILIES[family])}
    assert found == set(TABLE[family])


@every_member()
def test_a_member_is_shown_in_an_example_or_on_a_page(cls):
    assert "Example:" in cls.__doc__ or re.search(rf"\b{cls.__name__}\b", PAGES)


@every_member()
def test_a_members_options_are_in_its_signature_and_explained(cls):
    options = inspect.signature(cls).parameters
    if "Args: those of" not in cls.__doc__:
        for option in options.values():
            assert option.kind not in (option.VAR_POSITIONAL, option.VAR_KEYWORD)
            assert option.annotation is not option.empty
        own, *of_bases = map(explained, cls.__mro__)
        assert own <= options.keys() <= own.union(*of_bases)


def explained(cls):
    """Return the options that a class explains; the command line looks at bases as well."""
    found = re.search(r"Args:\n(.*?)(\n\n|$)", inspect.cleandoc(cls.__doc__ or ""), re.DOTALL)
    return set(re.findall(r"^    (\w+): ", found[1], re.MULTILINE)) if found else set()


@every_member()
def test_a_member_is_final(cls):
    assert getattr(cls, "__final__", False) != (cls in NOT_FINAL)


@every_member()
def test_a_member_can_be_pickled_and_copied(cls):
    member = made(cls)
    for other in (pickle.loads(pickle.dumps(member)), copy.deepcopy(member)):
        assert type(other) is cls
        if dataclasses.is_dataclass(cls):
            assert other == member


@of(*FROZEN)
def test_a_member_is_frozen_and_equal_to_one_that_is_made_alike(cls):
    member = made(cls)
    for name in inspect.signature(cls).parameters:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(member, name, None)
    assert member == made(cls)


_INTERVAL = re.compile(r"in ([\[(])([\d.]+), ([\d.]+)([\])])")
_LEAST = re.compile(r"([≥>]) (\d+(?:\.\d+)?)")
# whose bounds depend on other options as well
_NOT_ALONE = {"fraction", "size", "min_size", "num_candidates", "mean", "seconds", "shares"}


def bounds(text, is_whole):
    """Values at the ends of the range that an option's explanation names, and whether they may be."""
    step = 1 if is_whole else 1e-3
    if found := _INTERVAL.search(text):
        opens, low, high, closes = found.groups()
        yield from ((float(low), opens == "["), (float(high), closes == "]"))
        yield from ((float(low) - step, False), (float(high) + step, False))
    elif found := _LEAST.search(text):
        yield float(found[2]), found[1] == "≥"
        yield float(found[2]) - step, False


@every_member()
def test_the_ranges_that_a_member_explains_are_those_that_it_takes(cls):
    explained = re.search(r"Args:\n(.*?)(\n\n|$)", inspect.getdoc(cls) or "", re.DOTALL)
    texts = dict(
        re.findall(r"^    (\w+): ((?:.|\n {5,})*)", explained[1], re.MULTILINE) if explained else ()
    )
    options, member = inspect.signature(cls).parameters, made(cls)
    known = {name: getattr(member, name) for name in options if hasattr(member, name)}
    for name in texts.keys() & known.keys() - _NOT_ALONE:
        annotation = str(options[name].annotation)
        is_whole = "int" in annotation and "float" not in annotation
        for value, is_allowed in bounds(texts[name], is_whole):
            given = {**known, name: int(value) if is_whole else value}
            with nullcontext() if is_allowed else pytest.raises(ValueError, match=name):
                cls(**given)
