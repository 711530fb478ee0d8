"""A user's ``training_step`` as a function of tensors, and the limits of such a function."""


class CannotStack(Exception):  # noqa: N818 - a finding, not a fault
    """Reason why a module, an optimizer or its data cannot be trained in slots."""


class CannotPad(CannotStack):
    """Reason why batches cannot be padded; slots may still train on whole batches."""
