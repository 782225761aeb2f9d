"""Tasks: where questions come from.

Readers and writers of every file form, generated English, RULER-HQA and RULER, downloads, the
suites of an evaluation and the sources of training tasks. No torch.
"""
