"""Text that remembers its tokens, and the codec between the two.

Tokens in, tokens out: a section is a slice of the document's ids, and a memory is the ids that were
sampled. Both travel through the agents as ordinary strings. When they come back inside a prompt,
their own ids are used, so nothing is encoded twice.
"""

from __future__ import annotations

import copy
import json
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from functools import cached_property, lru_cache
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from weakref import WeakValueDictionary

from config.errors import UserError, first_line, loading
from config.machine import check_hub
from config.options import TEMPLATE_DATE
from config.realmodels import check_model
from tokens.blanks import with_letters, without_blanks
from tokens.chat_templates import Refused, check_tokenizer, rendered
from tokens.responses import CHANNELS, CLOSE, OPEN, Thoughts, configured_ends
from tokens.trie import common_prefix

MESSAGE, ANSWER = "MEMAGENT-SLOT", "MEMAGENT-ANSWER"
"""What stands for a message, and for a response, while a chat template is rendered."""
TOOL = {"name": "f", "description": "-", "parameters": {"type": "object", "properties": {}}}
BORDER = re.compile(r"(?<=\n)[^\W_]|(?<=\S) (?=\S)")
"""Where a long text may be cut: the first letter of a line, or a single blank."""
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

    The document is stored once, four bytes an id. A section is decoded when it is read, and the
    latest are cached: the members of a group read the same section at about the same time.
    """

    def __init__(
        self,
        ids: Iterable[int],
        n_tokens: int,
        left_out: int,
        decode: Callable[[Sequence[int]], Text],
    ):
        self.ids, self.n_tokens = ids, n_tokens = array("I", ids), n_tokens
        self.left_out = left_out
        """tokens of the document that are in no section"""
        self._section = lru_cache(max(2, 8192 // n_tokens))(
            lambda k: decode(ids[k * n_tokens : (k + 1) * n_tokens])
        )

    def __len__(self) -> int:
        return -(-len(self.ids) // self.n_tokens)

    def __getitem__(self, k: int | slice) -> Text | list[Text]:
        found = range(len(self))[k]
        return self._section(found) if isinstance(found, int) else [*map(self._section, found)]


class Codec:
    """A fast tokenizer of transformers with its chat template, as pieces of token ids.

    A prompt is encoded piece by piece: each fixed string of the template by itself (cached), a
    `Text` by its ids, any other string by the tokenizer. Pieces are never merged across their
    borders, in training and evaluation alike. Each is encoded as what follows the pieces before it:
    a tokenizer's blank before a text stands at the beginning of the prompt and behind special
    tokens, where the model's own template has it, and nowhere else.

    Only the template's own strings give special tokens: a document that spells `<|im_end|>` gets
    the ids of those characters. The library cannot do the same for added tokens that are not
    special (`</think>`): they stop nothing.

    thinking: False asks the chat template to switch thinking off if it can (`enable_thinking`).
    """

    exact = True
    """Whether a text has as many ids here as the model reads."""
    watch: Callable[[int, int], None] = staticmethod(lambda n, length: None)
    """Called before each part of a document is encoded, with the ids so far and the characters that
    come; what it raises ends the cutting."""

    def __init__(
        self,
        tokenizer,
        thinking: bool = False,
        eos_ids: Iterable[int] = (),
    ):
        tokenizer = with_letters(tokenizer)
        self.tokenizer, self._inner = tokenizer, without_blanks(tokenizer)
        self._thinking = thinking
        self._added = tokenizer.added_tokens_decoder
        self._special = {i for i, token in self._added.items() if token.special}
        vocabulary = tokenizer.get_vocab()
        if {*CHANNELS} <= vocabulary.keys():
            raise UserError(
                "The model writes its responses in channels, as gpt-oss does, which are not read "
                "here: ask it by --endpoint, whose server reads them."
            )
        self._thoughts = Thoughts(vocabulary, str(tokenizer.chat_template or ""))
        self.unknown_marks = self._thoughts.are_unknown
        # the end that a response is written with, None if there is no end at all
        ends = (self._end_of_turn(), tokenizer.eos_token_id, *sorted(eos_ids))
        self.end_id = next((i for i in ends if i is not None), None)
        self.eos_ids = frozenset(ends) - {None}
        self._remember()

    def _remember(self) -> None:
        self._constant = lru_cache(1024)(self._encode_constant)
        self._blank_follows = lru_cache(1024)(self._has_blank_behind)
        self._text = lru_cache(4096)(lambda text: Text(text, self.encode(text)))
        self._frame = lru_cache(256)(self._render_frame)
        # those in use, so that a document's ids are in memory once
        self._sections: WeakValueDictionary[tuple, Sections] = WeakValueDictionary()
        self._head, self._tail = self._frame("user", "", "", False)
        self._thinks_at_once = OPEN in self._thoughts.shown(self._tail).rpartition(CLOSE)[2]

    @classmethod
    def load(
        cls, path: str | Path, *, trust_remote_code: bool = False, local: bool = False, **kwargs
    ) -> Codec:
        """Load the tokenizer of a model's folder or of a hub name.

        local: download nothing. kwargs: `thinking`. UserError if it cannot be loaded.
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
            return cls(tokenizer, eos_ids=configured_ends(path, local), **kwargs)

    def apart(self) -> Codec:
        """Return a codec that another thread cuts documents with; what it has cut, both have.

        The library's tokenizers change their own settings between texts of different kinds.
        """
        other = copy.copy(self)
        other.tokenizer, other._inner = copy.deepcopy((self.tokenizer, self._inner))
        other._remember()
        other._sections = self._sections
        return other

    # ------------------------------------------------------------ the chat template

    def _render(
        self, messages: Sequence[dict], tools: Sequence[dict] = (), cue: bool = True, **more: bool
    ) -> str:
        """Return what the chat template writes. cue: the beginning of a response at the end."""
        day = date.fromisoformat(TEMPLATE_DATE)
        return rendered(
            self.tokenizer,
            messages,
            tools=list(tools) or None,
            add_generation_prompt=cue,
            # instead of the library's, which looks at the clock; the other is Llama's
            strftime_now=day.strftime,
            date_string=day.strftime("%d %b %Y"),
            **more,
        )

    def _render_frame(self, role: str, system: str, tools: str, goes_on: bool) -> tuple[str, str]:
        """Return what the chat template puts before and after a message.

        tools: as JSON. goes_on: the message follows an assistant's, whose end is part of what
        stands before it.
        """
        if self.tokenizer.chat_template is None:
            if role != "user" or tools or (system and not goes_on):
                raise UserError(
                    "The model has no chat template: it knows no roles, tools or system messages."
                )
            return ("" if goes_on else self.tokenizer.bos_token or ""), ""
        how = {"enable_thinking": self._thinking}
        messages = [{"role": "system", "content": system}] if system else []
        if goes_on:
            messages += [{"role": "user", "content": "-"}, {"role": "assistant", "content": ANSWER}]
        messages.append({"role": role, "content": MESSAGE})
        text = self._render(messages, json.loads(tools or "[]"), **how)
        if tools and not goes_on and text == self._render(messages, **how):
            raise UserError("The model's chat template knows no tools; give another --model.")
        head, found, tail = text.partition(MESSAGE)
        if not found:
            raise UserError(
                f"The model's chat template drops the {role}'s message; give another --model."
            )
        return head.rpartition(ANSWER)[2] if goes_on else head, tail

    def _written(self, **more: object) -> str:
        """Return what the chat template writes of an assistant's message behind its cue.

        "" if it knows no assistant, or not the further fields of the message, `more`.
        """
        if self.tokenizer.chat_template is None:
            return ""
        question = [{"role": "user", "content": "-"}]
        whole = [*question, {"role": "assistant", "content": ANSWER, **more}]
        tools = [{"type": "function", "function": TOOL}] if more else []
        try:
            cue, text = self._render(question, tools), self._render(whole, tools, cue=False)
        except Refused:
            return ""
        return text[common_prefix(cue, text) :]

    def _end_of_turn(self) -> int | None:
        """Return the special id that the chat template puts directly behind an assistant's message.

        None if it puts none, or one that ends thoughts as well.
        """
        behind = self._written().rpartition(ANSWER)[2].strip()
        ids = self.tokenizer.encode(behind, add_special_tokens=False) if behind else []
        ends = ids and ids[0] in self._special and ids[0] not in self._thoughts.marks
        return ids[0] if ends else None

    def never_sampled(self, rows: int) -> list[int]:
        """Return the ids below `rows`, those of a model's lm_head, that no response may have.

        They stand for no token, or for a special one that neither ends a response nor marks
        thoughts, and that the chat template writes in no assistant's message or call of a tool.
        """
        calls = (
            [{"id": "a12345678", "type": "function", "function": {"name": "f", "arguments": given}}]
            for given in ({}, "{}")  # some templates take arguments as text
        )
        called = next(filter(None, (self._written(tool_calls=call) for call in calls)), "")
        never = self._special - self.eos_ids - self._thoughts.marks.keys()
        for text in (self._written(), called):
            never -= {*self.tokenizer.encode(text, add_special_tokens=False)}
        known = {*self.tokenizer.get_vocab().values()}
        return [i for i in range(rows) if i not in known or i in never]

    @property
    def told_date(self) -> str:
        """The date that the chat template tells, "" if it tells none."""
        source = str(self.tokenizer.chat_template)
        return TEMPLATE_DATE if "strftime_now" in source or "date_string" in source else ""

    @property
    def fingerprint(self) -> str:
        """Hash of the tokenizer, the chat template, its date and the end-of-sequence ids."""
        content = self._inner.backend_tokenizer.to_str()
        dated = [self.told_date] if self.told_date else []
        identity = (content, self._head, self._tail, sorted(self.eos_ids), *dated)
        return blake2b(repr(identity).encode(), digest_size=8).hexdigest()

    # ------------------------------------------------------------ text to ids

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

        While it encodes 10 MB of text, the library takes 1.6 GB (with SmolLM2's vocabulary), so a
        long text is encoded in parts, which takes 20 MB.
        """
        if isinstance(text, Text):
            return array("I", text.ids)
        ids, start = array("I"), 0
        while start < len(text):
            end = self._end_of_part(text, start)
            self.watch(len(ids), end - start)
            ids.extend(self.encode(text[start:end]))
            start = end
        return ids

    def _end_of_part(self, text: str, start: int) -> int:
        """Return the first border behind `PART` characters around which two parts have the same ids
        as one, or the end of the text."""
        if len(text) - start > 2 * self.PART:
            for at in range(start + self.PART, len(text) - self.CONTEXT, self.CONTEXT):
                if found := BORDER.search(text, at, at + self.CONTEXT):
                    cut = found.start()
                    before, after = text[cut - self.CONTEXT : cut], text[cut : cut + self.CONTEXT]
                    if self.encode(before) + self.encode(after) == self.encode(before + after):
                        return cut
        return len(text)

    def text(self, text: str) -> Text:
        """Return a string with its ids, so that it is encoded once; cached."""
        return text if isinstance(text, Text) else self._text(text)

    def _piece(self, text: str, constant: bool, before: Sequence[int]) -> tuple[int, ...]:
        """Return the ids of a piece of a prompt, as what follows the ids before it.

        constant: it is the template's, and its special tokens are such.
        """
        if isinstance(text, Text):
            return text.ids
        blank = self._puts_blanks and (not before or self._blank_follows(before[-1]))
        if constant:
            return self._constant(text, blank)
        if blank:
            ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
            return tuple(ids)
        return self.encode(text)

    @property
    def _puts_blanks(self) -> bool:
        """Whether the tokenizer puts a blank before a text, and not before each piece anyway."""
        return self._inner is not self.tokenizer

    def _has_blank_behind(self, last: int) -> bool:
        """Return whether the tokenizer puts a blank before a text behind an id."""
        if last not in self._added:
            return False
        before, alone = f"{self._added[last].content}a", "a"
        ids = (self.tokenizer.encode(x, add_special_tokens=False) for x in (before, alone))
        return next(ids) == [last, *next(ids)]

    def _encode_constant(self, text: str, blank: bool) -> tuple[int, ...]:
        how = dict(add_special_tokens=False, split_special_tokens=False)
        if blank or not self._puts_blanks:
            return tuple(self.tokenizer.encode(text, **how))
        made = self._inner(text, return_offsets_mapping=True, **how)
        for k, i in enumerate(ids := made["input_ids"]):
            if i in self._added:  # what stands behind it has the tokenizer's blank again
                rest = text[made["offset_mapping"][k][0] :]
                return (*ids[:k], *self.tokenizer.encode(rest, **how))
        return tuple(ids)

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
        listed = json.dumps(tools) if tools else ""
        head, tail = self._frame(role, system, listed, before is not None)
        parts = [*parts, (tail, True)]
        piece, constant = parts[0]
        if self._puts_blanks and head.endswith(" ") and not isinstance(piece, Text):
            # the mark of a blank is one token with a word
            head, parts[0] = head[:-1], (f" {piece}", constant)
        ids = list(before or ())
        start = self._piece(head, True, ids)
        if ids and start and ids[-1] in self.eos_ids and start[0] in self.eos_ids:
            start = start[1:]
        ids += start
        for piece, constant in parts:
            ids += self._piece(piece, constant, ids)
        return ids

    def reply(self, text: str) -> tuple[int, ...]:
        """Return the ids of a response as the model would write it, without its end.

        They are those of `encode`, behind the blank that tokenizer or chat template put before a
        response.
        """
        if not self._puts_blanks or not text or isinstance(text, Text):
            return self.encode(text)
        text = text if text.startswith(" ") else f"{self._lead}{text}"
        return self._piece(text, False, self._constant(self._tail, False) or [-1])

    @cached_property
    def _lead(self) -> str:
        """A blank if the chat template puts one between its beginning of a response and the text,
        else nothing."""
        if not self._tail:
            return ""
        said = [{"role": "user", "content": MESSAGE}, {"role": "assistant", "content": ANSWER}]
        between = (
            self._render(said, enable_thinking=self._thinking)
            .partition(MESSAGE)[2]
            .partition(ANSWER)[0]
        )
        return " " if between == f"{self._tail} " else ""

    def cut(
        self, document: str, n_tokens: int, max_sections: int | None = None, over: str = "center"
    ) -> Sections:
        """Cut a document into sections of `n_tokens` ids, the last one shorter.

        Sections neither overlap nor align with words or lines. Of a document longer than
        `max_sections` (None or 0: no limit), `over="center"` keeps the first and the last half of
        the ids that fit, `"head"` the first sections. The same call returns the same object while
        that is in use, and the latest one for longer, so a document's ids are in memory only once.
        """
        # equal text may carry other ids
        key = (document, getattr(document, "ids", None), n_tokens, max_sections, over)
        sections = self._sections.get(key)
        if sections is None:
            read = ids = self.ids(document)
            if max_sections and len(ids) > (limit := max_sections * n_tokens):
                if over == "center":
                    read = ids[: limit // 2] + ids[len(ids) - limit // 2 :]
                else:
                    read = ids[:limit]
            sections = Sections(read, n_tokens, len(ids) - len(read), self.decode)
            self._sections[key] = sections
        self._latest = sections  # the next task often has the same document
        return sections

    # ------------------------------------------------------------ ids to text

    def _decode(self, ids: Sequence[int]) -> str:
        how = dict(skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return self._inner.decode(list(ids), **how)

    def decode(self, ids: Sequence[int]) -> Text:
        """Return the text of token ids, special tokens left out, with all of these ids."""
        return Text(self._decode(ids), ids)

    def response(self, ids: Sequence[int]) -> Text:
        """Return a sampled response as text, without padding and end-of-sequence ids.

        Its thoughts stand between `<think>` and `</think>`, however the model marks them. If the
        chat template itself begins them, so does the text: thoughts which were cut short are still
        recognised as thoughts. Special tokens, which are no text, have no ids in it either.
        """
        dropped = self.eos_ids | self._special - self._thoughts.marks.keys()
        kept = [i for i in ids if i not in dropped]
        text = self._thoughts.decode(kept, self._decode)
        return Text(f"{OPEN}{text}" if self._thinks_at_once and ids else text, kept)

    def after_thinking(self, response: Text) -> Text:
        """Return what follows the last `</think>` of a `response`: thoughts never enter a memory.

        The sampled ids are kept where the thoughts end with a mark that has ids of its own.
        """
        rest = response.rpartition(CLOSE)[2].partition(OPEN)[0]  # behind that, one never ended
        if rest == response and self._special.isdisjoint(response.ids):
            return response
        after = response.ids[self._thoughts.last_end(response.ids) :]
        found = self.decode([i for i in after if i not in self._special])
        return found if found.strip() == rest.strip() else self.text(rest)

    def shown(self, text: str) -> str:
        """Return a text with its thoughts between `<think>` and `</think>`."""
        return self._thoughts.shown(text)


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
        self._thinking, self._special = False, frozenset()
        self._thoughts = Thoughts()
        self.eos_ids, self.end_id = frozenset(), None
        self._remember()

    def encode(self, text: str) -> tuple[int, ...]:
        return text.ids if isinstance(text, Text) else tuple(self.ids(text))

    def ids(self, text: str) -> array:
        if isinstance(text, Text):
            return array("I", text.ids)
        encoded = (found[0].encode("utf-8", "surrogatepass") for found in self.PIECE.finditer(text))
        return array("I", (int.from_bytes(piece, "big") for piece in encoded))

    def _encode_constant(self, text: str, blank: bool) -> tuple[int, ...]:
        return self.encode(text)

    def _decode(self, ids: Sequence[int]) -> str:
        pieces = (i.to_bytes(4, "big").lstrip(b"\0") or b"\0" for i in ids)
        return "".join(piece.decode("utf-8", "surrogatepass") for piece in pieces)
