"""Settings that went: a file written before is read where they have the value that is always used.

One line a setting: name -> the values that mean what the code does today. Any other value asks for
code of the tag `with-upstream`.
"""

from __future__ import annotations

from config.errors import UserError

TAG = "with-upstream"
GONE: dict[str, tuple] = {
    # "setting": (value,),
    "answerer": ("base", ""),
    "fused": ([],),
    "grammar": (False,),
    "recompute_every": (1,),
    "sampler": ([],),
}


def is_gone(name: str, value: object, where: str) -> bool:
    """Whether a setting in the file `where` went and can be passed over.

    UserError: it went, and its value asks for what the code does no more.
    """
    if name not in GONE:
        return False
    if value not in GONE[name] and not (value == [] and () in GONE[name]):
        raise UserError(
            f"{where}: {name} {value!r} is no longer there; the git tag {TAG} still has it."
        )
    return True
