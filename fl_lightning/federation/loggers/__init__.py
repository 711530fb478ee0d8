"""What loggers take besides numbers."""
