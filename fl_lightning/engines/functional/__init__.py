"""A user's ``training_step`` as a function of tensors, and the limits of such a function."""


class CannotStack(Exception):  # noqa: N818 - a finding, not a fault
    """Why a module, an optimizer or its data cannot be trained in slots."""


class CannotPad(CannotStack):
    """Why batches cannot be padded; whole ones may do."""
