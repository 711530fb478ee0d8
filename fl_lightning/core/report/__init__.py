"""Charts and pages of a report: of one run, and of a comparison."""
