"""Settings that went: a file written before is read where they have the value that is always used.

One line a setting: name -> the values that mean what the code does today. Any other value asks for
code of the tag `with-upstream`.
"""

from __future__ import annotations

from config.errors import UserError

TAG = "with-upstream"
GONE: dict[str, tuple] = {
    "metric": ("official",),
    "few_shot": ("",),
    "db_backend": ("sqlite",),
    "rules": ("released",),
    # "setting": (value,),
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


def is_gone(name: str, value: object, where: str) -> bool:
    """Whether a setting in the file `where` went and can be passed over.

    UserError: it went, and its value asks for what the code does no more.
    """
    if name not in GONE:
        return False
    if value not in GONE[name] and not (value == [] and () in GONE[name]):
        always = " or ".join(map(repr, GONE[name]))  # not the file's value: it may hold a password
        raise UserError(
            f"{where}: {name} is no longer there but as {always}; the git tag {TAG} still has it."
        )
    return True
