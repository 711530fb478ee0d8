"""Console output, log file and report of a run; charts, tables and HTML pages for all commands."""
