"""Floor 4: rounds inside Lightning's fit loop."""
