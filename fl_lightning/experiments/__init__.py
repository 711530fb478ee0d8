"""Comparisons of variants and searches for options: many runs from one file, with tables and figures."""

from fl_lightning.experiments.experiment import Experiment, Variant
from fl_lightning.experiments.processes import ReportRounds
from fl_lightning.experiments.space import Search

__all__ = ["Experiment", "ReportRounds", "Search", "Variant"]
