"""A module at one client's batches: its local steps in a fit, and visits that leave no trace.

`lightning_step` takes the steps of local training, `steps_by_hand` adds a correction to steps that a module
takes itself, and `local_counts` has the Trainer count them per client. A visit (`visiting`) restores
everything: `client_visits` evaluates clients in it, `personal_models` their own models.
"""
