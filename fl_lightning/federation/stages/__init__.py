"""What else happens in a round: corrections, personal models, staleness, privacy, attackers."""
