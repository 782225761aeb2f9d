"""The engines that sample.

One file per engine behind the protocol `rollout.Engine`, and `open.py`, the only place that opens
one. Knows no training.
"""
