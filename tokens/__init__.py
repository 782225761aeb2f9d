"""Text as token ids.

The codec between the two, the sections of a document, the prefix tree of a batch and the exact
attention of that tree. Knows no task, no agent and no training.
"""
