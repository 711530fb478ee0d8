"""Many runs from one file: variants times seeds, a table, a CSV and a figure."""

from fl_lightning.experiments.experiment import Experiment, Variant

__all__ = ["Experiment", "Variant"]
