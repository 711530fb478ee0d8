"""Comparisons and searches: many runs from one file, with tables, CSV files and figures."""

from fl_lightning.experiments.experiment import Experiment, Variant
from fl_lightning.experiments.processes import ReportRounds
from fl_lightning.experiments.space import Search

__all__ = ["Experiment", "ReportRounds", "Search", "Variant"]
