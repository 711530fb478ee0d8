"""What goes together: the page is made from what the parts say, and each sentence of it is whole.

`python tests/test_together.py` (with tests on the path) writes the page anew.
"""

import pytest
from families import ROWS, made
from readme import ROOT

from fl_lightning import Federation
from fl_lightning.callbacks.calibration.mask_calibration import MaskCalibration
from fl_lightning.client import Devices, LogNormalSpeeds
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import Trait, conflicts
from fl_lightning.data import LabelFlip
from fl_lightning.federation.checks.fit import (
    BY_HAND,
    HIDDEN,
    NETWORK,
    RATES_BY_STEP,
    SEVERAL,
    UPDATE_WEIGHT,
)
from fl_lightning.federation.options import traits_of
from fl_lightning.federation.stages.attackers import Attackers
from fl_lightning.federation.stages.client_masks import OWN_MASKS
from fl_lightning.nas import OneShot, Supernet
from fl_lightning.nas.alpha_gradients import TRIES_CELLS
from fl_lightning.nas.collapse import READS_EXAMPLES
from fl_lightning.nas.one_shot import FROZEN, SUMMED
from fl_lightning.server import ALIE

PAGE = ROOT / "docs" / "together.md"
HEAD = """# What goes together

A part of a run, such as an aggregator, declares what it needs (traits) and what it breaks. Two parts conflict if one of them
needs a trait that the other breaks. Such a configuration is rejected at start-up, with an error that names both parts and a
way out. For each trait, this page lists the parts that need it and the parts that break it. It is generated from the code.

"""
# What a module, its optimizers and masks add.
OF_THE_RUN = {
    "a model that steps by hand": BY_HAND,
    "a model with several optimizers": SEVERAL,
    "a learning-rate schedule by step": RATES_BY_STEP,
    "data.update_weight": UPDATE_WEIGHT,
    "MaskCalibration": MaskCalibration(density=0.1).traits,
    "MaskCalibration with per_client": OWN_MASKS,
    "model Supernet": Supernet.federation_traits,
    "model OneShot": OneShot.federation_traits,
    "model Supernet with best_of": TRIES_CELLS,
    "model OneShot with a frozen teacher": FROZEN,
    "model OneShot with batch norm": SUMMED,
    "StopAtCollapse with eigenvalue": READS_EXAMPLES,
    **HIDDEN,
}
# The families whose members are options of a federation.
FAMILIES = {
    "aggregator": "aggregator",
    "correction": "correction",
    "personalisation": "personal",
    "transform": "updates",
    "cohort": "cohort",
    "privacy": "privacy",
    "asynchrony": "asynchronous",
}


def parts():
    """Return the traits of every part, by name."""
    found = {}
    for family, cls in ROWS:
        if family in FAMILIES:
            part = made(cls)
            found[f"{FAMILIES[family]} {cls.__name__}"] = traits_of(part)
    found["devices Devices"] = Devices(speeds=LogNormalSpeeds(), deadline=9.0).traits
    found["attackers Attackers that forge"] = Attackers(fraction=0.1, forge=ALIE()).traits
    found["attackers Attackers that poison"] = Attackers(
        fraction=0.1, poison=LabelFlip(num_classes=2)
    ).traits
    return found


def page():
    """Return the page's text."""
    every = {**parts(), **NETWORK, **OF_THE_RUN}
    lines = []
    for trait in Trait:
        lines += [f"## {trait.value[0].upper()}{trait.value[1:]}", ""]
        lines += ["Needed by:", "", *_by_clause(every, trait, "needs"), ""]
        lines += ["Broken by:", "", *_by_clause(every, trait, "breaks"), ""]
    return HEAD + "\n".join(lines)


def _by_clause(every, trait, kind):
    alike = {}
    for name, traits in every.items():
        if trait in getattr(traits, kind):
            ways = traits.instead.get(trait)
            key = getattr(traits, kind)[trait] + (f". Instead: {ways}" if ways else "")
            alike.setdefault(key, []).append(name)
    return [f"- {', '.join(names)}: {clause}." for clause, names in alike.items()]


def test_the_page_says_what_the_parts_say():
    assert PAGE.read_text() == page(), (
        "write it anew: PYTHONPATH=tests python tests/test_together.py"
    )


def test_every_conflict_has_a_way_out():
    for sentence in conflicts({**parts(), **NETWORK}):
        assert not sentence.endswith(": ")
        assert sentence.count(", and ") >= 1


def test_every_trait_is_needed_and_broken_by_something():
    every = {**parts(), **NETWORK, **OF_THE_RUN}.values()
    for trait in Trait:
        assert any(trait in each.needs for each in every), trait
        assert any(trait in each.breaks for each in every), trait


OPTION = {cls: FAMILIES[family] for family, cls in ROWS if family in FAMILIES}


@pytest.mark.parametrize("one", OPTION, ids=lambda cls: cls.__name__)
def test_a_federation_refuses_just_the_pairs_that_conflict(one):
    every = {name.split()[1]: (name, its) for name, its in parts().items()}
    members = list(OPTION)
    for other in members[members.index(one) + 1 :]:
        if OPTION[one] == OPTION[other]:
            continue
        wanted = list(conflicts(dict(every[cls.__name__] for cls in (one, other))))
        said = said_of(one, other)
        for sentence in wanted:
            assert f"federation.{sentence}".split(",")[0] in said, other
        if not wanted:  # a cohort may still be refused by a privacy, for itself
            assert not said or {"cohort", "privacy"} == {OPTION[one], OPTION[other]}, other


def said_of(*classes):
    """Return what a federation of two parts is refused with, if it is."""
    options = {
        OPTION[cls]: [made(cls)] if OPTION[cls] == "updates" else made(cls) for cls in classes
    }
    try:
        Federation(**options)
    except ConfigurationError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    PAGE.write_text(page())
