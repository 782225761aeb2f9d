"""The base policy for a laptop, embedded in the repository.

The model's weights and tokenizer, and the demonstrator that the model was trained on.
"""
