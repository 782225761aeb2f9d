"""Small files that cost much: settings, packed data, JSON, GGUF headers and chat templates.

Each generator returns the name of a kind -> the content of its file.
"""

import gzip
import json
import struct
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


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _field(name: bytes, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _array(kind: int, declared: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, declared) + values


def _tensor(dims: list[int], at: int = 0, declared: int | None = None) -> bytes:
    n = len(dims) if declared is None else declared
    sizes = b"".join(struct.pack("<Q", size) for size in dims)
    return _text(b"a") + struct.pack("<I", n) + sizes + struct.pack("<IQ", 0, at)


def ggufs() -> dict[str, bytes]:
    """GGUF files whose headers declare more than they hold."""
    text, array, whole, large = 8, 9, 4, 10**9  # the first three are numbers of types
    llama, padding = _field(b"general.architecture", text, _text(b"llama")), bytes(64)

    def of_array(*given) -> bytes:
        return file(llama, _field(b"a", array, _array(*given)))

    def file(*fields: bytes, tensors: tuple[bytes, ...] = (), n: int | None = None, m=None):
        counts = len(tensors) if m is None else m, len(fields) if n is None else n
        head = b"GGUF" + struct.pack("<IQQ", 3, *counts)
        return head + b"".join((*fields, *tensors)) + padding

    one = (_tensor([4]),)
    return {
        "values": of_array(0, large),
        "texts": of_array(text, large),
        "arrays": of_array(array, large),
        "arrays within arrays": file(llama, _field(b"a", array, _array(array, 1) * 5000)),
        "empty arrays": of_array(array, 10**6, _array(0, 0) * 10**6),
        "values that are there": of_array(0, 1 << 24, bytes(1 << 24)),
        "fields": file(llama, n=large),
        "tensors": file(llama, m=large),
        "letters": file(_field(b"general.architecture", text, struct.pack("<Q", 10**12))),
        "letters of a name": file(struct.pack("<Q", 1 << 63)),
        "weights": file(llama, tensors=(_tensor([large, large]),)),
        "dimensions": file(llama, tensors=(_tensor([1], declared=large),)),
        "layers": file(llama, _field(b"llama.block_count", whole, struct.pack("<I", large))),
        "place": file(llama, tensors=(_tensor([4], at=1 << 60),)),
        "alignment": file(llama, _field(b"general.alignment", whole, bytes(4)), tensors=one),
    }


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
        "source": "{# " + "x" * (1 << 21) + " #}" + SAID,
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
