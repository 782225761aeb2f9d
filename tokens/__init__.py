"""Text as token ids.

The codec between the two, templates, the sections of a document, the prefix tree of a batch, and
exact attention over that tree. Knows no task, no agent and no training.
"""
