"""From scores to a mask: plans, densities, rules."""
