"""The weights of a policy.

Load, quantise, adapt, shard and checkpoint them, reduce over ranks, read log-probs, and estimate
what all of that takes of a GPU. Knows no agent.
"""
