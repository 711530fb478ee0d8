"""What is wrong with a command line or a configuration, in a sentence."""
