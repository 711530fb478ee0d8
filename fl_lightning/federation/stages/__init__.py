"""Stages of a round: corrections, personal models, staleness, privacy, attackers."""
