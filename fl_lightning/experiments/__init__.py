"""Many runs from one file: variants times seeds, searches; tables, CSV files and figures."""

from fl_lightning.experiments.experiment import Experiment, Variant
from fl_lightning.experiments.sweeps.report_rounds import ReportRounds
from fl_lightning.experiments.sweeps.search import Search

__all__ = ["Experiment", "ReportRounds", "Search", "Variant"]
