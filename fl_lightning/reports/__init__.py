"""Screen, log file and report of a run; charts, tables and pages for every room above."""
