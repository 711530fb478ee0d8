"""Faster ways to train a cohort: one step for many clients, and compiled steps.

Other rooms import these names only, never a module below.
"""

from fl_lightning.engines.compiler.speedups import (
    SPEEDUPS,
    FasterStep,
    Speedup,
    compiled_step,
    reason_against,
)
from fl_lightning.engines.functional import CannotPad, CannotStack
from fl_lightning.engines.functional.example_gradients import (
    ExampleGradients,
    check_examples_apart,
    nothing,
)
from fl_lightning.engines.functional.functional_step import STEPS_IN_SLOTS, StepContext
from fl_lightning.engines.slots.results import OwnOf, SlotOwn, usable_rows
from fl_lightning.engines.slots.stacked_optimizers import stacked_rule
from fl_lightning.engines.slots.stacked_step import StackedStep
from fl_lightning.engines.slots.step_functions import StackedOptions
from fl_lightning.engines.slots.training import SlotTrainer, TermOf

__all__ = [
    "SPEEDUPS",
    "STEPS_IN_SLOTS",
    "CannotPad",
    "CannotStack",
    "ExampleGradients",
    "FasterStep",
    "OwnOf",
    "SlotOwn",
    "SlotTrainer",
    "Speedup",
    "StackedOptions",
    "StackedStep",
    "StepContext",
    "TermOf",
    "check_examples_apart",
    "compiled_step",
    "nothing",
    "reason_against",
    "stacked_rule",
    "usable_rows",
]
