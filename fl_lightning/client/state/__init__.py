"""The state that a client begins with: tensors and attributes of its module, options of optimizers."""
