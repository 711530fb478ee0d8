"""Stages of a round: corrections, personal models, staleness, privacy, attackers.

In the order in which updates pass them, see `stages_of`.
"""
