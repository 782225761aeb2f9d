"""Small files that cost much: settings, packed data, JSON and chat templates.

Each generator returns the name of a kind -> the content of its file.
"""

import gzip
import json
from itertools import pairwise

DEEP = 100_000  # JSON within JSON


def settings() -> dict[str, str]:
    """YAML that grows, or takes long, or whose values Python cannot handle."""
    letters = [chr(ord("a") + k) for k in range(26)]
    doubled = "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise(letters))
    pairs = "".join(f"{b}: &{b} {{x: *{a}, y: *{a}}}\n" for a, b in pairwise(letters))
    merged = "".join(f"{b}: &{b} {{<<: [*{a}, *{a}]}}\n" for a, b in pairwise(letters))
    return {
        "lists of lists": f"a: &a [x, x]\n{doubled}",
        "maps of maps": f"a: &a {{x: 1}}\n{pairs}",
        "merged": f"a: &a {{x: 1}}\n{merged}",
        "itself": "run: &a [*a]",
        "as a key": "a: &a [1]\n? *a\n: 1\n",
        "deep lists": "run: " + "[" * 900,
        "deep blocks": "- " * 5000,
        "long": "run: {name: " + "x" * (1 << 24) + "}",
        "wide": "run: [" + "1," * (1 << 22) + "]",
        "large number": "run: {seed: 0x" + "f" * 60_000 + "}",
        "large key": "? 0x" + "f" * 60_000 + "\n: 1",
        "base 60": "run: {seed: 1" + ":59" * 3000 + ".5}",
        "wrong date": "run: !!timestamp x",
        "wrong truth": "run: !!bool x",
        "empty number": "run: !!int ''",
        "Python": "run: !!python/object/apply:os.system [exit]",
    }


def within_gzip(times: int) -> bytes:
    """A text that is packed again and again, without being compressed."""
    content = b"a text"
    for _ in range(times):
        content = gzip.compress(content, 0, mtime=0)
    return content


def flood(head: bytes = b"", tail: bytes = b"", gibibytes: int = 4) -> bytes:
    """Gzip of blanks between two texts, a thousandth as large."""
    blanks = gzip.compress(b" " * (1 << 24)) * (64 * gibibytes)
    return gzip.compress(head) + blanks + gzip.compress(tail)


def deep(fields: str = "") -> str:
    """An object of JSON one of whose values is nested without end."""
    return "{" + fields + '"x": ' + "[" * DEEP + "]" * DEEP + "}"


SAID = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
_LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def templates() -> dict[str, str]:
    """Chat templates that take long, grow, or write without end."""
    return {
        "loops": _LOOPS + SAID,
        "letters": "{{ 'x' * 10**10 }}" + SAID,
        "power": "{{ 10 ** (10 ** 10) }}" + SAID,
        "doubled": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
        "{% set n.x = n.x ~ n.x %}{% endfor %}" + SAID,
        "centred": "{{ 'a' | center(10 ** 10) }}" + SAID,
        "indented": "{{ 'a\nb' | indent(10 ** 10) }}" + SAID,
        "printed": "{{ '%9999999999d' | format(1) }}" + SAID,
        "joined": "{{ range(99999) | map('string') | join('x' * 99999) }}" + SAID,
        "calls of itself": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
        "{% endmacro %}{{ f(60) }}" + SAID,
        "written": "{% for a in range(99999) %}" + "x" * 20 + "{% endfor %}" + SAID,
        "source": "{{ 1 }}" * (1 << 18) + SAID,
    }


def for_systems_only() -> str:
    """A chat template that takes long as soon as there is a long system message."""
    return "{% if messages[0]['content'] | length > 999 %}" + _LOOPS + "{% endif %}" + SAID


def record(**fields: object) -> str:
    """A line of trajectories.jsonl.gz, as far as it is looked at."""
    names = "id step sample question answers kind reward answer error turns".split()
    return json.dumps(dict.fromkeys(names) | {"turns": []} | fields) + "\n"


SIZES = {"num_hidden_layers": 10**9, "vocab_size": 10**7, "intermediate_size": 10**7}
"""Fields of config.json, of a small model, and what nobody could compute with."""
