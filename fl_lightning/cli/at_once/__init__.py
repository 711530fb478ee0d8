"""What the command line says before PyTorch is imported."""
