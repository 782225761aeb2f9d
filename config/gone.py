"""Settings that went: a file written before is read where they have the value that is always used.

One line a setting: name -> the values, as YAML has them, that mean what the code does today. Any
other value asks for code of the tag `with-upstream`.
"""

from __future__ import annotations

import re

from config.errors import UserError, clip

TAG = "with-upstream"
GONE: dict[str, tuple] = {
    "metric": ("official",),
    "few_shot": ("",),
    "db_backend": ("sqlite",),
    "rules": ("released",),
    "at_delta": (False,),
    "dedup_task": (True,),
    "explore": ("slot",),
    "norm": ("pool",),
    "q_floor": (None,),
    "q_init_failure": (None,),
    "q_min": (None,),
    "rank": ("intents",),
    "sim_mean": (0.0,),
    "sim_std": (1.0,),
    "ucb": (0.0,),
    "part": ("",),
}


# agent -> its settings that went (memrl: all, in their order), which fingerprints of rows hold
BEFORE = {
    "memrl": "chunk_tokens memory_tokens final_tokens max_sections over layout form thinking "
    "not_found templates retrieve embedder k1 k2 delta at_delta rank lam norm sim_mean sim_std "
    "dedup_task exclude_same_task q_min epsilon explore ucb alpha q_init q_init_failure q_floor "
    "same_intent max_entries bank recall build update act_tokens lesson_tokens context_tokens "
    "max_steps success_reward failure_reward graded",
    "rememr1": "recall_at_zero history_scope memory_text on_missing_update query_text "
    "boxed_literal callback_reward format_reward recall_match recall_words",
    # "setting": (value,),
    "boxed_literal": ("single",),
    "callback_reward": ("seen",),
    "format_reward": ("all",),
    "history": ("bounded", "auto"),
    "history_scope": ("exclude_current",),
    "memory_text": ("update",),
    "on_missing_update": ("keep_previous",),
    "pay": ("answer",),
    "query_text": ("first",),
    "recall_at_zero": (False,),
    "recall_match": ("words",),
    "recall_words": ("unseen",),
    "target": ("hidden",),
    "turn_reward_scale": (1.0,),
}


def is_gone(name: str, value: object, where: str) -> bool:
    """Whether a setting in the file `where` went and can be passed over.

    UserError: it went, and its value asks for what the code does no more.
    """
    if name not in GONE:
        return False
    if value not in GONE[name]:
        shown = re.sub("//[^/@ ]*@", "//***@", clip(repr(value), 200))  # no password
        raise UserError(
            f"{where}: {name} {shown} is no longer there; the git tag {TAG} still has it."
        )
    return True


def as_before(agent: str, settings: dict) -> dict:
    """Return the settings of an agent with those that went, as fingerprints of its rows hold them:
    rows and streams that were begun with them go on."""
    names = BEFORE.get(agent, "").split()
    return {
        name: settings[name] if name in settings else GONE[name][0] for name in names
    } | settings
