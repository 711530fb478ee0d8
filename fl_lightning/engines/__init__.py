"""Faster ways to train a cohort: one step for many clients, and compiled steps.

Other rooms import these names only, never a module below.
"""

from fl_lightning.engines.compiler.speedups import SPEEDUPS as SPEEDUPS
from fl_lightning.engines.compiler.speedups import FasterStep as FasterStep
from fl_lightning.engines.compiler.speedups import Speedup as Speedup
from fl_lightning.engines.compiler.speedups import compiled_step as compiled_step
from fl_lightning.engines.compiler.speedups import reason_against as reason_against
from fl_lightning.engines.functional import CannotPad as CannotPad
from fl_lightning.engines.functional import CannotStack as CannotStack
from fl_lightning.engines.functional.example_gradients import ExampleGradients as ExampleGradients
from fl_lightning.engines.functional.example_gradients import (
    check_examples_apart as check_examples_apart,
)
from fl_lightning.engines.functional.example_gradients import zero_gradient as zero_gradient
from fl_lightning.engines.functional.functional_step import STEPS_IN_SLOTS as STEPS_IN_SLOTS
from fl_lightning.engines.functional.functional_step import StepContext as StepContext
from fl_lightning.engines.slots.results import OwnOf as OwnOf
from fl_lightning.engines.slots.results import SlotOwn as SlotOwn
from fl_lightning.engines.slots.results import usable_rows as usable_rows
from fl_lightning.engines.slots.stacked_optimizers import stacked_rule as stacked_rule
from fl_lightning.engines.slots.stacked_step import StackedStep as StackedStep
from fl_lightning.engines.slots.step_functions import StackedOptions as StackedOptions
from fl_lightning.engines.slots.training import SlotTrainer as SlotTrainer
from fl_lightning.engines.slots.training import TermOf as TermOf
