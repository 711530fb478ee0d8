"""What attackers send instead of their updates."""
