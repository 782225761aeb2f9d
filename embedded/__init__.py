"""What ships with the repository, and how it was made.

The base policy for a laptop: weights, tokenizer, and the demonstrator that it was trained on; the
script that makes the reader of real text.
"""
