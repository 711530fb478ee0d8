"""Many clients side by side in one step."""
