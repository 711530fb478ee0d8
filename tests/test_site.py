"""What docs/conf.py makes for the site: the picture of the house, the pages of the reference."""

import runpy
import xml.etree.ElementTree as ET
from importlib import import_module

import pytest
from readme import ROOT

PICTURE = runpy.run_path(str(ROOT / "docs" / "house_picture.py"))
REFERENCE = runpy.run_path(str(ROOT / "docs" / "reference_pages.py"))


@pytest.fixture
def house(tmp_path):
    """Of three rooms: the attic imports both others, the hall the cellar, which has three lines."""
    files = {
        "attic/__init__.py": "from house.hall.stairs import up\nimport house.cellar.wine\n",
        "hall/__init__.py": "",
        "hall/stairs.py": "from house.cellar import wine\n",
        "cellar/__init__.py": "",
        "cellar/wine.py": "import os\nfrom pathlib import Path\nred = 1\n",
    }
    for name, text in files.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return PICTURE["House"].read(tmp_path / "house")


def test_a_house_is_read_from_its_imports(house):
    assert house.lines == {"attic": 2, "hall": 1, "cellar": 3}
    assert house.arrows == {("attic", "hall"): 1, ("attic", "cellar"): 1, ("hall", "cellar"): 1}
    assert [house.floor(room) for room in ("cellar", "hall", "attic")] == [0, 1, 2]
    assert house.is_needed("attic", "hall")
    assert not house.is_needed("attic", "cellar")  # the hall lies between


def test_the_picture_shows_each_room_once_and_arrows_downhill(tmp_path):
    PICTURE["draw_house"](tmp_path)
    house = PICTURE["House"].read()
    for background in ("light", "dark"):
        tree = ET.parse(tmp_path / f"house_{background}.svg")
        parts = [element.tag.rpartition("}")[2] for element in tree.iter()]
        rooms = {path.parent.name for path in (ROOT / "fl_lightning").glob("*/__init__.py")}
        assert parts.count("circle") == len(rooms) == len(house.lines)
        assert parts.count("line") == sum(house.is_needed(*pair) for pair in house.arrows)
        lines = [element.attrib for element in tree.iter() if element.tag.endswith("line")]
        assert all(int(line["y1"]) < int(line["y2"]) for line in lines)


def test_every_public_name_stands_once_in_the_reference():
    pages = REFERENCE["public"]()
    assert all(pages.values())  # no page is empty
    listed = [path for paths in pages.values() for path in paths]
    found = [getattr(import_module(p.rpartition(".")[0]), p.rpartition(".")[2]) for p in listed]
    assert len(found) == len(set(found)) == len(listed)
    assert "fl_lightning.Federation" in listed
    where = {path: page for page, paths in pages.items() for path in paths}
    assert where["fl_lightning.FedProx"] == "corrections"
    assert where["fl_lightning.server.Krum"] == "robust"
    assert where["fl_lightning.UniformCohort"] == "cohorts"
