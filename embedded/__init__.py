"""The default for a laptop.

The tokenizer and the model that ship with the repository, the teacher that they were trained on, and the weights.
"""
