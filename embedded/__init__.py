"""The policies of the repository: weights for a laptop, and how they read.

How they were trained is in dev/ (base.py, keeper.py, reader.py).
"""
