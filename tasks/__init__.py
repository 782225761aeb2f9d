"""Tasks: where the questions come from.

Readers and writers of every file format, generated English, RULER-HQA and RULER, downloads, the
sources of training tasks, environments, documents that people have. No torch.
"""
