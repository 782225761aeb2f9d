"""The policies of the repository, and how they are made.

Base policies for a laptop: weights, tokenizer, and the demonstrators that they were trained on.
The script that makes a reader of real text.
"""

from types import ModuleType


def trainer(agent: str) -> ModuleType:
    """Return the module whose `train_base` trains a base policy on an agent's prompts."""
    from embedded import keeper, tiny

    return {"memupdate": keeper}.get(agent, tiny)
