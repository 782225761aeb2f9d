"""Settings that went: a file written before is read where they have the value that is always used.

One line a setting: name -> the values, as YAML has them, that mean what the code does today. Any
other value asks for code of the tag `with-upstream`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date

from config.errors import UserError, clip, hide_keys

TAG = "with-upstream"
GONE: dict[str, tuple] = {
    "answerer": ("base", ""),
    "at_delta": (False,),
    "boxed_literal": ("single",),
    "cache_tokens": (1 << 16,),
    "callback_reward": ("seen",),
    "db_backend": ("sqlite",),
    "dedup_task": (True,),
    "explore": ("slot",),
    "failure_reward": (-1.0,),
    "few_shot": ("",),
    "fixed_order": (False,),
    "format_reward": ("all",),
    "fused": ([],),
    "grammar": (False,),
    "history": ("bounded", "auto"),
    "history_scope": ("exclude_current",),
    "memory_text": ("update",),
    "metric": ("official",),
    "norm": ("pool",),
    "on_missing_update": ("keep_previous",),
    "part": ("",),
    "pay": ("answer",),
    "q_floor": (None,),
    "q_init_failure": (None,),
    "q_min": (None,),
    "query_text": ("first",),
    "rank": ("intents",),
    "recall_at_zero": (False,),
    "recall_match": ("words",),
    "recall_words": ("unseen",),
    "recompute_every": (1,),
    "retries": (1, 0),
    "rules": ("released",),
    "sampler": ([],),
    "sim_mean": (0.0,),
    "sim_std": (1.0,),
    "success_reward": (1.0,),
    "target": ("hidden",),
    "template_date": ("2024-07-26", date(2024, 7, 26)),
    "transcripts": (2,),
    "turn_reward_scale": (1.0,),
    "ucb": (0.0,),
}


def is_gone(name: str, value: object, where: str, beside: Mapping = {}) -> bool:
    """Whether a setting in the file `where` went and can be passed over.

    beside: all settings of its section. UserError: it went, and its value asks for what the code
    does no more.
    """
    if name not in GONE:
        return False
    if (name, value, beside.get("mode")) == ("history", "auto", "refine"):
        value = "append"  # what it meant there
    if value not in GONE[name]:
        shown = hide_keys(clip(repr(value), 200))
        raise UserError(
            f"{where}: {name} {shown} is no longer there; the git tag {TAG} still has it."
        )
    return True


def check_gone(stored: Mapping, now: Mapping, where: str) -> None:
    """Raise what `is_gone` does of stored settings that are none of those there are now."""
    for name in stored.keys() - now.keys():
        is_gone(name, stored[name], where, stored)


def as_before(names: str, settings: dict) -> dict:
    """Return settings with those that went (`Agent.had`), as fingerprints of rows hold them: rows
    and streams that were begun with them go on."""
    had = {name: settings.get(name, *GONE.get(name, ())[:1]) for name in names.split()}
    return had | settings
