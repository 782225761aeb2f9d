"""Results, written down and shown.

Rows, records, metrics of a step, means and intervals, plots, transcripts and the page. Reads
results and never makes them; knows no agent by name.
"""
