"""Tasks: where the questions come from.

Readers and writers of every file format, generated English, RULER-HQA and RULER, downloads, the
suites of an evaluation and the sources of training tasks, documents that people have. No torch.
"""
