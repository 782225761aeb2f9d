"""Text that remembers its tokens, and the codec between the two.

Tokens in, tokens out: a section is a slice of the document's ids, and a memory is the ids that were
sampled. Both travel through the agents as ordinary strings. When they come back inside a prompt,
their own ids are used, so nothing is encoded twice.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from weakref import WeakValueDictionary

from config.errors import UserError, first_line, loading
from config.machine import check_hub
from config.options import TEMPLATE_DATE
from config.realmodels import check_model
from tokens.blanks import with_letters, without_blanks
from tokens.chat_templates import check_tokenizer, rendered
from tokens.responses import (
    CHANNELS,
    CLOSE,
    OPEN,
    Thoughts,
    configured_ends,
    end_of_turn,
    never_sampled,
    special_ids,
)

TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"  # what transformers calls it


class Text(str):
    """A string together with the token ids that it stands for.

    The ids are those that it was cut from or sampled as; they need not be those that the tokenizer
    would give. Any string operation returns a plain `str` without ids.

    >>> t = Text("Anna joined Boris.", (7, 8, 9, 3))
    >>> t.ids, t.strip() == t, hasattr(t.strip(), "ids")
    ((7, 8, 9, 3), True, False)
    """

    __slots__ = ("ids",)
    ids: tuple[int, ...]

    def __new__(cls, text: str, ids: Iterable[int]) -> Text:
        self = super().__new__(cls, text)
        self.ids = tuple(ids)
        return self

    def __getnewargs__(self) -> tuple[str, tuple[int, ...]]:  # pickle and copy keep the ids
        return str(self), self.ids


class Sections(Sequence[Text]):
    """A document in sections of `n_tokens` ids, the last one shorter.

    The document is stored once, as ids of four bytes each. A section is decoded when it is read;
    the latest ones are cached, because the members of a group read the same section at about the
    same time.
    """

    CACHED_TOKENS = 1 << 13
    """Tokens of the decoded sections that are cached; two sections at least."""

    def __init__(
        self,
        ids: Iterable[int],
        n_tokens: int,
        left_out: int,
        decode: Callable[[Sequence[int]], Text],
    ):
        self.ids, self.n_tokens = array("I", ids), n_tokens
        self.left_out = left_out
        """tokens of the document that are in no section"""
        self._decode = decode
        self._decoded: OrderedDict[int, Text] = OrderedDict()

    def __len__(self) -> int:
        return -(-len(self.ids) // self.n_tokens)

    def __getitem__(self, k: int | slice) -> Text | list[Text]:
        if isinstance(k, slice):
            return [self[i] for i in range(*k.indices(len(self)))]
        k = range(len(self))[k]
        if k not in self._decoded:
            self._decoded[k] = self._decode(self.ids[k * self.n_tokens : (k + 1) * self.n_tokens])
            if len(self._decoded) > max(2, self.CACHED_TOKENS // self.n_tokens):
                self._decoded.popitem(last=False)
        return self._decoded[k]


ENTRY = 256
"""Tokens that a cached text or document counts for beside its own: what holds them takes memory."""


class LRUCache:
    """The most recently used results, as long as they have at most `max_tokens` tokens together.

    For the members of a group, which read the same document. A result that is larger than the
    budget by itself is not cached. Any thread may ask.
    """

    def __init__(self, max_tokens: int):
        self.max_tokens, self.tokens = max_tokens, 0
        self._lock = threading.Lock()
        self.entries: OrderedDict[tuple, tuple[int, object]] = OrderedDict()  # key -> (size, value)

    def get(self, key: tuple, make: Callable[[], object], size: Callable[[object], int]):
        """Return the result for `key`, made anew if it is not cached."""
        with self._lock:
            if key in self.entries:
                self.entries.move_to_end(key)
                return self.entries[key][1]
        value = make()
        with self._lock:
            if (n := size(value)) <= self.max_tokens and key not in self.entries:
                self.entries[key] = n, value
                self.tokens += n
            while self.tokens > self.max_tokens:
                self.tokens -= self.entries.popitem(last=False)[1][0]
        return value


DATE_STRING = "%d %b %Y"  # the form of the date in Llama's templates, whose variable has this name


class Codec:
    """A fast tokenizer of transformers with its chat template, as pieces of token ids.

    A prompt is encoded piece by piece: each fixed string of the template by itself (cached), a
    `Text` by its ids, any other string by the tokenizer. Pieces are never merged across their
    borders, in training and evaluation alike. Each is encoded as what follows the pieces before it:
    a tokenizer's blank before a text stands at the beginning of the prompt and behind special
    tokens, where the model's own template has it, and nowhere else.

    Only the template's own strings give special tokens: a document that spells `<|im_end|>` gets
    the ids of those characters. The library cannot do the same for added tokens that are not
    special (`</think>`, the pieces of the embedded policy's template). They stop nothing, and with
    every tokenizer a text that spells our tags reads like our tags.

    thinking: False asks the chat template to switch thinking off if it can (`enable_thinking`).
    date: YYYY-MM-DD, what a chat template tells that tells the date; it sees no clock.
    """

    exact = True
    """Whether a text has as many ids here as the model reads."""

    def __init__(
        self,
        tokenizer,
        thinking: bool = False,
        eos_ids: Iterable[int] = (),
        date: str = TEMPLATE_DATE,
    ):
        tokenizer = with_letters(tokenizer)
        self.tokenizer, self._inner = tokenizer, without_blanks(tokenizer)
        template = str(tokenizer.chat_template or "")
        self._thoughts = Thoughts(tokenizer.get_vocab(), template, self._decode)
        self.unknown_marks = self._thoughts.are_unknown(template)
        # the end that a response is written with, None if there is no end at all
        ends = (end_of_turn(tokenizer, self._thoughts), tokenizer.eos_token_id, *sorted(eos_ids))
        self.end_id = next((i for i in ends if i is not None), None)
        self.eos_ids = frozenset(ends) - {None}
        self._special = special_ids(tokenizer)
        self._fixed: dict[tuple[str, bool], tuple[int, ...]] = {}
        self._added, self._begins = tokenizer.added_tokens_decoder, {}  # both by id
        self._recent = LRUCache(1 << 21)
        # sections still in use by an agent, however long the document
        self._alive: WeakValueDictionary[tuple, Sections] = WeakValueDictionary()
        self._thinking, self._date = thinking, date
        self._frames: dict[tuple, tuple[str, str]] = {}
        self._head, self._tail = self._frame()
        self._thinks_at_once = OPEN in self._thoughts.shown(self._tail).rpartition(CLOSE)[2]

    @classmethod
    def load(
        cls, path: str | Path, *, trust_remote_code: bool = False, local: bool = False, **kwargs
    ) -> Codec:
        """Load the tokenizer of a model's folder or of a hub name.

        local: download nothing. kwargs: `thinking`, `date`. UserError if it cannot be
        loaded.
        """
        check_model(path, weights=False)
        if not local:
            check_hub(path)
        with loading(f"The tokenizer of {path}"):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(
                path, trust_remote_code=trust_remote_code, local_files_only=local
            )
            # documents are longer than a window, and no model is given them whole: no warning
            tokenizer.deprecation_warnings[TOO_LONG] = True
            check_tokenizer(tokenizer, path)
            if {*CHANNELS} <= tokenizer.get_vocab().keys():
                raise UserError(
                    f"{path} writes its responses in channels, as gpt-oss does, which are not read "
                    "here: ask it by --endpoint, whose server reads them."
                )
            return cls(tokenizer, eos_ids=configured_ends(path, local), **kwargs)

    def _frame(
        self,
        role: str = "user",
        system: str = "",
        tools: Sequence[dict] = (),
        goes_on: bool = False,
    ) -> tuple[str, str]:
        """Return what the chat template puts before and after a message; remembered.

        goes_on: the message follows an assistant's, whose end is part of what stands before it.
        """
        key = (role, system, json.dumps(tools, sort_keys=True) if tools else "", goes_on)
        if key not in self._frames:
            self._frames[key] = self._rendered(role, system, tools, goes_on)
        return self._frames[key]

    def _rendered(
        self, role: str, system: str, tools: Sequence[dict], goes_on: bool
    ) -> tuple[str, str]:
        if self.tokenizer.chat_template is None:
            if role != "user" or tools or (system and not goes_on):
                raise UserError(
                    "The model has no chat template: it knows no roles, tools or system messages."
                )
            return ("" if goes_on else self.tokenizer.bos_token or ""), ""
        mark, answer = "MEMAGENT-SLOT", "MEMAGENT-ANSWER"
        messages: list[dict] = [{"role": "system", "content": system}] if system else []
        if goes_on:
            messages += [{"role": "user", "content": "-"}, {"role": "assistant", "content": answer}]
        messages.append({"role": role, "content": mark})
        text = self._template(messages, tools)
        if tools and not goes_on and text == self._template(messages, ()):
            raise UserError("The model's chat template knows no tools; give another --model.")
        head, found, tail = text.partition(mark)
        if goes_on:
            head = head.rpartition(answer)[2]
        if not found:
            raise UserError(
                f"The model's chat template drops the {role}'s message; give another --model."
            )
        return head, tail

    def _template(self, messages: list[dict], tools: Sequence[dict]) -> str:
        from jinja2 import TemplateError

        day = date.fromisoformat(self._date)
        try:
            return rendered(
                self.tokenizer,
                messages,
                tools=list(tools) or None,
                add_generation_prompt=True,
                enable_thinking=self._thinking,
                strftime_now=day.strftime,  # instead of the library's, which looks at the clock
                date_string=day.strftime(DATE_STRING),
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(
                f"The model's chat template refuses the roles {roles}: {error}."
            ) from error

    @property
    def told_date(self) -> str:
        """The date that the chat template tells, "" if it tells none."""
        source = str(self.tokenizer.chat_template)
        return self._date if "strftime_now" in source or "date_string" in source else ""

    @property
    def fingerprint(self) -> str:
        """Hash of the tokenizer, the chat template, its date and the end-of-sequence ids."""
        backend = getattr(self._inner, "backend_tokenizer", None)
        if backend is not None:
            content = backend.to_str()
        else:
            content = repr(sorted(self.tokenizer.get_vocab().items()))
        dated = [self.told_date] if self.told_date else []
        identity = (content, self._head, self._tail, sorted(self.eos_ids), *dated)
        return blake2b(repr(identity).encode(), digest_size=8).hexdigest()

    watch: Callable[[int, int], None] = staticmethod(lambda n, length: None)
    """Called before each part of a document is encoded, with the ids so far and the characters that
    come; what it raises ends the cutting."""

    def apart(self) -> Codec:
        """Return a codec that other threads cut documents with; what it has cut, both have.

        The library's tokenizers change their own settings between texts of different kinds.
        """
        other = copy.copy(self)
        other._inner = copy.deepcopy(self._inner)
        return other

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of one piece, without special tokens around it or in it.

        A `Text` gives the ids that it carries; any other string is encoded as what follows a text.
        """
        if isinstance(text, Text):
            return text.ids
        try:
            ids = self._inner.encode(text, add_special_tokens=False, split_special_tokens=True)
        except BaseException as error:  # a panic of the library, as of a regular expression
            if type(error).__name__ != "PanicException":
                raise
            reason = f"The model's tokenizer gives up on a text ({first_line(error)})"
            raise UserError(f"{reason}: give another --model.") from error
        return tuple(ids)

    PART = 1 << 18
    """Characters that are encoded at once."""
    CONTEXT = 256
    """Characters on either side of a cut that show whether it changes the ids."""

    def ids(self, text: str) -> array:
        """Return what `encode` does, four bytes a token, for a text of any length.

        The library takes 250 bytes a token while it encodes, so a long text is encoded in parts.
        It is cut before a blank or before the first letter of a line, at the next place where the
        text around the cut has the same ids in two parts as in one; if there is none, not at all.
        """
        ids, start = array("I"), 0
        while len(text) - start > 2 * self.PART and not isinstance(text, Text):
            windows = range(start + self.PART, len(text) - self.CONTEXT, self.WINDOW)
            cuts = (cut for window in windows for cut in self._candidate_cuts(text, window))
            end = next((cut for cut in cuts if self._can_cut(text, cut)), 0)
            if not end:
                break
            self.watch(len(ids), end - start)
            ids.extend(self.encode(text[start:end]))
            start = end
        self.watch(len(ids), len(text) - start)
        ids.extend(self.encode(text if start == 0 else text[start:]))
        return ids

    WINDOW = 4096
    """Characters among which a cut is looked for at once."""

    @classmethod
    def _candidate_cuts(cls, text: str, start: int) -> Iterator[int]:
        """Yield up to eight starts of lines, then up to eight single blanks, from `start` on."""
        window = text[start : start + cls.WINDOW]
        blanks = [start + m.start() for m in re.finditer(r"(?<=\S) (?=\S)", window)]
        lines = [start + m.start() for m in re.finditer(r"(?<=\n)[^\W_]", window)]
        yield from lines[:8]
        yield from blanks[:8]

    def _can_cut(self, text: str, at: int) -> bool:
        """Return whether the characters around a cut have the same ids in two parts as in one."""
        before, after = text[max(0, at - self.CONTEXT) : at], text[at : at + self.CONTEXT]
        return self.encode(before) + self.encode(after) == self.encode(before + after)

    def text(self, text: str) -> Text:
        """Return a string with its ids, so that it is encoded once; cached."""
        if isinstance(text, Text):
            return text
        return self._recent.get(
            (text,), lambda: Text(text, self.encode(text)), lambda made: len(made.ids) + ENTRY
        )

    def after_thinking(self, response: Text) -> Text:
        """Return what follows the last `</think>` of a `response`: thoughts never enter a memory.

        The sampled ids are kept where the thoughts end with a mark that has ids of its own.
        """
        rest = response.rpartition(CLOSE)[2]
        if OPEN in rest:
            return self.text(rest.partition(OPEN)[0])  # thoughts that never ended
        if rest == response and self._special.isdisjoint(response.ids):
            return response
        end = self._thoughts.last_end(response.ids)
        after = [i for i in response.ids[end:] if i not in self._special]
        found = self.decode(after)
        return found if found.strip() == rest.strip() else self.text(rest)

    def shown(self, text: str) -> str:
        """Return a text with its thoughts between `<think>` and `</think>`."""
        return self._thoughts.shown(text)

    def never_sampled(self, rows: int) -> list[int]:
        """Return the ids below `rows`, those of a model's lm_head, that no response may have."""
        return never_sampled(self.tokenizer, rows, self.eos_ids, self._thoughts)

    def fixed(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a template's constant piece, special tokens included; cached.

        It is encoded as what follows a text.
        """
        return self._following(text, True, begins=False)

    def _following(self, text: str, constant: bool, begins: bool) -> tuple[int, ...]:
        """Return the ids of a piece; begins: it stands where the tokenizer puts a blank."""
        if isinstance(text, Text) or not (constant or begins):
            return self.encode(text)
        key = text, begins
        if constant and key in self._fixed:
            return self._fixed[key]
        how = {"add_special_tokens": False, "split_special_tokens": not constant}
        if begins or self._inner is self.tokenizer:
            ids = self.tokenizer.encode(text, **how)
        else:  # what stands behind a special token has the tokenizer's blank again
            made, known = self._inner(text, return_offsets_mapping=True, **how), self._added
            ids = made["input_ids"]
            if (k := next((k for k, i in enumerate(ids) if i in known), None)) is not None:
                rest = text[made["offset_mapping"][k][0] :]
                ids = ids[:k] + self.tokenizer.encode(rest, **how)
        if constant:
            self._fixed[key] = tuple(ids)
        return tuple(ids)

    def _begins_after(self, last: int | None) -> bool:
        """Return whether the tokenizer puts a blank before a text behind an id; None: before all.

        Never, if each piece is given one anyway.
        """
        if self._inner is self.tokenizer or last is None:
            return self._inner is not self.tokenizer
        if last not in self._added:
            return False
        if last not in self._begins:
            before, alone = f"{self._added[last].content}a", "a"
            ids = (self.tokenizer.encode(x, add_special_tokens=False) for x in (before, alone))
            self._begins[last] = next(ids) == [last, *next(ids)]
        return self._begins[last]

    def _decode(self, ids: list[int]) -> str:
        return self._inner.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def decode(self, ids: Sequence[int]) -> Text:
        """Return the text of token ids, special tokens left out, with all of these ids."""
        return Text(self._decode(list(ids)), ids)

    def chat(
        self,
        parts: Iterable[tuple[str, bool]],
        role: str = "user",
        system: str = "",
        tools: Sequence[dict] = (),
        before: Sequence[int] | None = None,
    ) -> list[int]:
        """Return the prompt ids of one message made of (piece, is it constant?), inside the chat
        template.

        before: the ids of a conversation that goes on, an assistant's response last; they are kept
        as they are. The template's end of a response is left out where the response has sampled
        it.
        """
        head, tail = self._frame(role, system, tools, before is not None)
        parts = [*parts]
        if self._inner is not self.tokenizer and head.endswith(" ") and parts:
            (piece, constant), *rest = parts
            if not isinstance(piece, Text):  # the mark of a blank is one token with a word
                head, parts = head[:-1], [(f" {piece}", constant), *rest]
        ids = list(before or ())
        start = self._following(head, True, self._begins_after(ids[-1] if ids else None))
        if ids and start and ids[-1] in self.eos_ids and start[0] in self.eos_ids:
            start = start[1:]
        ids += start
        for piece, constant in (*parts, (tail, True)):
            ids += self._following(piece, constant, self._begins_after(ids[-1] if ids else None))
        return ids

    def reply(self, text: str) -> tuple[int, ...]:
        """Return the ids of a response as the model would write it, without its end.

        They are those of `encode`, behind the blank that tokenizer or chat template put before a
        response.
        """
        if self._inner is self.tokenizer or isinstance(text, Text) or not text:
            return self.encode(text)
        text = text if text.startswith(" ") else f"{self._lead}{text}"
        return self._following(
            text, False, self._begins_after((self.fixed(self._tail) or [-1])[-1])
        )

    @cached_property
    def _lead(self) -> str:
        """A blank if the chat template puts one between its beginning of a response and the text,
        else nothing."""
        if not self._tail:
            return ""
        question, answer = "MEMAGENT-SLOT", "MEMAGENT-ANSWER"
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        between = self._template(chat, ()).partition(question)[2].partition(answer)[0]
        return " " if between == f"{self._tail} " else ""

    def response(self, ids: Sequence[int]) -> Text:
        """Return a sampled response as text, without padding and end-of-sequence ids.

        Its thoughts stand between `<think>` and `</think>`, however the model marks them. If the
        chat template itself begins them, so does the text: thoughts which were cut short are still
        recognised as thoughts. Special tokens, which are no text, have no ids in it either.
        """
        dropped = self.eos_ids | self._special - self._thoughts.ids
        kept = [i for i in ids if i not in dropped]
        text = self._thoughts.decode(kept, self.decode)
        return Text(f"{OPEN}{text}" if self._thinks_at_once and ids else text, kept)

    def cut(
        self, document: str, n_tokens: int, max_sections: int | None = None, over: str = "center"
    ) -> Sections:
        """Cut a document into sections of `n_tokens` ids, the last one shorter.

        Sections neither overlap nor align with words or lines. Of a document longer than
        `max_sections` (None or 0: no limit), `over="center"` keeps the first and the last half of
        the ids that fit, `"head"` the first sections. The same call returns the same object while
        that is in use and for some time after, so a document's ids are in memory only once.
        """

        def make() -> Sections:
            read = ids = self.ids(document)
            if max_sections and len(ids) > (limit := max_sections * n_tokens):
                if over == "center":
                    read = ids[: limit // 2] + ids[len(ids) - limit // 2 :]
                else:
                    read = ids[:limit]
            return Sections(read, n_tokens, len(ids) - len(read), self.decode)

        digest = blake2b(document.encode(errors="surrogatepass"), digest_size=16).digest()
        given_ids = getattr(document, "ids", None)  # equal text may carry other ids
        key = (digest, given_ids, n_tokens, max_sections, over)
        sections = self._alive.get(key)
        if not sections:
            sections = self._recent.get(key, make, lambda sections: len(sections.ids) + ENTRY)
        self._alive[key] = sections
        return sections


class Characters(Codec):
    """A codec for a model whose tokenizer is not known.

    A "token" is a piece of at most four bytes of UTF-8, about the size of a token in today's
    vocabularies, and its id is the number that these bytes are. Lengths are estimates; every text
    comes back unchanged. There is no chat template: a prompt is its text.

    >>> codec = Characters()
    >>> ids = codec.encode("Anna met Zoë.")
    >>> ids, str(codec.decode(ids))
    ((1097756257, 544040308, 2120303, 12823342), 'Anna met Zoë.')
    """

    exact = False
    # a zero stands alone, so that a number has no leading ones
    PIECE = re.compile("[\1-\x7f]{1,4}|[\1-\u07ff]{1,2}|.", re.DOTALL)
    fingerprint = "characters"

    def __init__(self):
        self.tokenizer = SimpleNamespace(eos_token_id=None, chat_template=None, bos_token=None)
        self._inner = self.tokenizer
        self.eos_ids, self.end_id = frozenset(), None
        self._thoughts = Thoughts()
        self._head = self._tail = ""
        self._thinking, self._date = False, TEMPLATE_DATE
        self._frames: dict[tuple, tuple[str, str]] = {}
        self._thinks_at_once = False
        self._recent, self._alive = LRUCache(1 << 21), WeakValueDictionary()

    def encode(self, text: str) -> tuple[int, ...]:
        if isinstance(text, Text):
            return text.ids
        return tuple(self.ids(text))

    def ids(self, text: str) -> array:
        if isinstance(text, Text):
            return array("I", text.ids)
        encoded = (found[0].encode("utf-8", "surrogatepass") for found in self.PIECE.finditer(text))
        return array("I", (int.from_bytes(piece, "big") for piece in encoded))

    def _following(self, text: str, constant: bool, begins: bool) -> tuple[int, ...]:
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> Text:
        pieces = (i.to_bytes(4, "big").lstrip(b"\0") or b"\0" for i in ids)
        return Text("".join(piece.decode("utf-8", "surrogatepass") for piece in pieces), ids)

    def response(self, ids: Sequence[int]) -> Text:
        return self.decode(ids)

    def after_thinking(self, response: Text) -> Text:
        rest = response.rpartition(CLOSE)[2].partition(OPEN)[0]
        return response if rest == response else self.text(rest)
