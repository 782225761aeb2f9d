"""The engines that sample responses.

One file per engine, each implementing the protocol `rollout.Engine`, and `open.py`, the only
place that opens one. Knows no training.
"""
