"""Pictures of searches: what they show, and that it can be read."""

import math
from itertools import pairwise
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas import cell_figure, on_front
from fl_lightning.nas.search.findings import Findings
from fl_lightning.nas.search.problem import Constraint, Problem, SearchResult
from fl_lightning.nas.spaces.darts import DARTS
from fl_lightning.nas.spaces.nas_bench_201 import EDGES, NASBench201
from fl_lightning.nas.spaces.space import Decision, SearchSpace
from fl_lightning.reports.charts import write_figure
from fl_lightning.reports.graphs import COLUMN_WIDTH, NODE_RADIUS

BENCH, DARTS_SPACE = NASBench201(), DARTS()


def sampled(space, count):
    generator = torch.Generator().manual_seed(1)
    return [space.sample(generator) for _ in range(count)]


def texts(panel):
    return [text.get_text() for text in panel.texts if text.get_text()]


def test_a_cell_shows_its_operations_and_nodes_and_no_left_out_edge():
    figure = cell_figure(BENCH.architecture([3, 0, 1, 0, 2, 0]), title="the cell")
    (panel,) = figure.axes
    expected = ["nor_conv_3x3", "skip_connect", "nor_conv_1x1", "input", "1", "2", "output"]
    assert sorted(texts(panel)) == sorted(expected)
    assert figure.get_suptitle() == "the cell"


def test_edges_that_change_nothing_are_dashed():
    """An edge is solid if a whole path from the input to the output runs over it."""
    for number in range(0, BENCH.size, 401):
        cell = BENCH.architecture([number // 5**place % 5 for place in range(6)])
        figure = cell_figure(cell)
        arrows = [t.arrow_patch for t in figure.axes[0].texts if hasattr(t, "arrow_patch")]
        styles = [arrow.get_linestyle() for arrow in arrows]
        edges = [e for e, choice in zip(EDGES, cell.choices, strict=True) if choice]
        through = [(0, 3), (0, 1, 3), (0, 2, 3), (0, 1, 2, 3)]
        paths = [list(pairwise(nodes)) for nodes in through]
        used = {edge for path in paths if set(path) <= set(edges) for edge in path}
        assert styles == ["solid" if edge in used else "dashed" for edge in edges], str(cell)


def test_a_pair_of_cells_has_a_panel_each():
    architecture = sampled(DARTS_SPACE, 1)[0]
    figure = cell_figure(architecture)
    assert [panel.get_title("left") for panel in figure.axes] == ["normal cell", "reduction cell"]
    for panel, nodes in zip(figure.axes, DARTS_SPACE.inputs(architecture).values(), strict=True):
        operations = sorted(name for pair in nodes for name, _ in pair)
        shown = [text for text in texts(panel) if text in DARTS_SPACE.operations]
        assert sorted(shown) == operations


def boxes(panel, renderer):
    return [text.get_window_extent(renderer) for text in panel.texts if text.get_text()]


@pytest.mark.parametrize("space", [BENCH, DARTS_SPACE], ids=lambda space: space.name)
def test_no_text_lies_over_another(space):
    for architecture in sampled(space, 3):
        figure = cell_figure(architecture)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        for panel in figure.axes:
            found = boxes(panel, canvas.get_renderer())
            pairs = [(a, b) for n, a in enumerate(found) for b in found[n + 1 :]]
            assert not any(a.overlaps(b) for a, b in pairs), str(architecture)


@pytest.mark.parametrize("space", [BENCH, DARTS_SPACE], ids=lambda space: space.name)
def test_no_edge_passes_through_a_node(space):
    """What is drawn, in inches: arcs of the arrows on the canvas against the nodes' places."""
    for architecture in sampled(space, 4):
        figure = cell_figure(architecture)
        FigureCanvasAgg(figure).draw()
        for panel in figure.axes:
            arrows = [text.arrow_patch for text in panel.texts if hasattr(text, "arrow_patch")]
            for arrow in arrows:
                path = arrow.get_path().interpolated(20).vertices
                line = panel.transData.inverted().transform(arrow.get_transform().transform(path))
                ends = np.round(line[[0, -1], 0] / COLUMN_WIDTH)
                for node in set(range(7)) - set(ends):
                    distance = np.linalg.norm(line - [COLUMN_WIDTH * node, 0.0], axis=1)
                    assert distance.min() > 2 * NODE_RADIUS


def test_the_front_holds_whom_nobody_beats():
    generator = np.random.default_rng(0)
    costs, scores = generator.integers(0, 20, (2, 60)).tolist()
    front = on_front(costs, scores)
    points = list(zip(costs, scores, strict=True))
    beaten = {
        point
        for point in points
        for other in points
        if other != point and other[0] <= point[0] and other[1] >= point[1]
    }
    assert {points[number] for number in front} == set(points) - beaten
    assert [costs[n] for n in front] == sorted(costs[n] for n in front)


def test_a_front_is_drawn_with_its_bound_and_the_names_of_all_networks():
    """The useless network, of score -∞, is left out; the bound on another cost as well."""
    cells = sampled(BENCH, 4)
    values = [(3, 0.9), (1, 0.5), (2, 0.4), (1, -math.inf)]
    known = dict(zip(cells, values, strict=True))
    costs = lambda cell: {"flops": known.get(cell, values[1])[0], "params": 1}
    constraints = (Constraint("flops", 3.5), Constraint("params", 7.0))
    problem = Problem(BENCH, lambda cell: known[cell][1], costs, constraints)
    result = SearchResult(problem, budget=4)
    for cell in cells:
        result.of(cell)
    panel = Figure().subplots()
    tooltips = Findings(result, "flops", "synflow").front()(panel)
    assert panel.collections[0].get_offsets().tolist() == [[3, 0.9], [1, 0.5], [2, 0.4]]
    assert panel.lines[0].get_xydata().tolist() == [[1, 0.5], [3, 0.9]]
    assert [line.get_xdata() for line in panel.lines[1:]] == [[3.5, 3.5]]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("multiply-adds", "synflow")
    assert [(t.x, t.y) for t in tooltips] == values[:3]
    assert all(str(c) in t.text for c, t in zip(cells[:3], tooltips, strict=True))


def test_files_are_pictures_and_the_same_each_time(tmp_path):
    cell = sampled(BENCH, 1)[0]
    write_figure(cell_figure(cell), tmp_path / "new" / "cell.v1")
    write_figure(cell_figure(cell), tmp_path / "again")
    first, again = sorted(tmp_path.glob("new/*")), sorted(tmp_path.glob("again.*"))
    assert [path.name for path in first] == ["cell.v1.png", "cell.v1.svg"]
    assert matplotlib.image.imread(first[0]).std() > 0
    assert ElementTree.parse(first[1]).getroot().tag.endswith("svg")
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_a_space_without_cells_has_no_graph():
    class Widths(SearchSpace):
        name = "widths"
        decisions = (Decision("width", ("1", "2")),)

        def build(self, architecture, **shape):
            return torch.nn.Flatten()

    with pytest.raises(ConfigurationError, match="widths is not made of cells"):
        cell_figure(Widths().architecture([0]))
