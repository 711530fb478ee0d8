"""Terms that correct a client's gradient or loss: FedProx, SCAFFOLD, FedDyn, MOON, FedLC."""
