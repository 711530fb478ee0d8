"""A run in several processes: shares of clients, exchange of results, launch and interruption."""
