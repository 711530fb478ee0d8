"""One-shot networks: methods of training, clients' capabilities, evaluation of sub-networks."""
