"""Links between the pages lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.md")]
)
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def without_code(text):
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(path):
    """The anchors of a page's headings, as GitHub and MyST make them."""
    titles = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_inside_the_repository_leads_somewhere(page):
    for link in _LINK.finditer(without_code(page.read_text())):
        target, _, anchor = link["target"].partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name}: {link['target']}"
        if anchor:
            assert anchor in anchors(path), f"{page.name}: {link['target']}"


def test_every_page_can_be_reached_from_the_readme():
    seen, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        for link in _LINK.finditer(without_code(page.read_text())):
            target = link["target"].partition("#")[0]
            if target and "://" not in target:
                ahead.append((page.parent / target).resolve())
    pages = {*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "algorithms").glob("*.md")}
    assert {page.name for page in pages - seen} <= {"index.md"}


def test_every_name_that_a_round_logs_is_explained():
    page = (ROOT / "docs" / "logged.md").read_text()
    code = "\n".join(path.read_text() for path in (ROOT / "fl_lightning").rglob("*.py"))
    rooms = "round|privacy|calibration|head|mask|search|predictor|recalibration"
    names = set(re.findall(rf'"((?:{rooms})/\w+)"', code))
    assert len(names) > 25
    assert not {name for name in names if f"`{name}`" not in page}
    explained = set(re.findall(rf"`((?:{rooms})/\w+)`", page))
    assert not {name for name in explained if name not in code}
