"""The report: one page that shows records beside the paper's numbers."""
