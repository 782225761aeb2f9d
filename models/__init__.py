"""The weights of a policy.

Load, quantise, adapt, shard and checkpoint them, reduce over ranks, compute log-probs, and estimate
how much of a GPU all of that takes. Knows no agent.
"""
