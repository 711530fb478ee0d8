"""Results as a table for LaTeX: a row a variant, mean ± std over seeds, the best mean bold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fl_lightning.experiments.results import RunResult, Spread, by_variant, spreads


def latex(results: Sequence[RunResult], metrics: Sequence[str], goals: Mapping[str, str]) -> str:
    r"""Return a table of the reported metrics for LaTeX, with the rules of the package booktabs.

    Args:
        results: of all runs.
        metrics: a column each: mean ± standard deviation over seeds.
        goals: metric to ``max`` or ``min``: its best mean is bold. Of others no number is.

    Example:
        >>> from fl_lightning.experiments.experiment import Variant
        >>> runs = [RunResult(Variant("top_k", ()), 0, {}, {"test/loss": 0.5})]
        >>> print(latex(runs, ["test/loss"], {}))
        % needs \usepackage{booktabs}
        \begin{tabular}{lr}
        \toprule
        variant & test/loss \\
        \midrule
        top\_k & $0.500$ \\
        \bottomrule
        \end{tabular}
    """
    rows = {name: spreads(group) for name, group in by_variant(results).items()}
    bold = {}
    for metric, goal in goals.items():
        means = {name: row[metric].mean for name, row in rows.items() if metric in row}
        if means and len(rows) > 1:
            bold[metric] = (max if goal == "max" else min)(means.values())
    lines = []
    for name, row in rows.items():
        cells = [_latex_cell(row.get(metric), bold.get(metric)) for metric in metrics]
        lines.append(" & ".join([_escaped(name), *cells]) + r" \\")
    head = " & ".join(["variant", *map(_escaped, metrics)]) + r" \\"
    top = [r"% needs \usepackage{booktabs}", rf"\begin{{tabular}}{{l{'r' * len(metrics)}}}"]
    body = [r"\toprule", head, r"\midrule", *lines, r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*top, *body])


def _latex_cell(spread: Spread | None, best: float | None) -> str:
    if spread is None:
        return "--"
    digits = 3 if abs(spread.mean) < 100 else 0
    mean = f"{spread.mean:.{digits}f}"
    mean = rf"\mathbf{{{mean}}}" if spread.mean == best else mean
    std = "" if math.isnan(spread.std) else rf" \pm {spread.std:.{digits}f}"
    return f"${mean}{std}$"


def _escaped(text: str) -> str:
    r"""Return a text as LaTeX prints it.

    Example:
        >>> print(_escaped("50 % of a_b"))
        50 \% of a\_b
    """
    special = {c: f"\\{c}" for c in "&%$#_{}"}
    more = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join((special | more).get(c, c) for c in text)
