"""The policies of the repository, and how they are made.

The base policy for a laptop: weights, tokenizer, and the demonstrator that it was trained on. The
script that makes a reader of real text.
"""
