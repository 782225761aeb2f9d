"""Tokenizers that take texts as they are: with no blank before each, all letters as letters."""

from __future__ import annotations

import copy
import json
import re

from config.errors import UserError

BLANKS = {  # kind of a tokenizer's component -> its settings where no blank begins a text
    "Prepend": {"prepend": ""},
    "Metaspace": {"prepend_scheme": "never"},
    "ByteLevel": {"add_prefix_space": False},
    "Strip": {"start": 0},
}
MARK = re.compile(r"[<\[].*\w.*[>\]]")


def without_blanks(tokenizer):
    """Return a tokenizer that neither puts a blank before a text nor drops one when it decodes.

    Tokenizers made by SentencePiece put one before each text (Llama 2, Mistral 7B, Phi-3), and some
    by bytes do (`add_prefix_space`). It is the given object where nothing is to be switched off, or
    where whole lines of prompts are tokens by bytes, as in the embedded policies: their texts
    follow such tokens, and a text behind a token of its own has the blank in a whole prompt too.
    UserError for one that puts a blank there in another way.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    by_bytes = (state["pre_tokenizer"] or {}).get("type") == "ByteLevel"
    added = tokenizer.added_tokens_decoder.values()
    if by_bytes and any(token.content.endswith("\n") and not token.special for token in added):
        return tokenizer
    in_decoder = {kind: off for kind, off in BLANKS.items() if kind != "ByteLevel"}  # no effect
    kinds = {"normalizer": BLANKS, "pre_tokenizer": BLANKS, "decoder": in_decoder}
    plain = {part: _without_blank(state[part], off) for part, off in kinds.items()}
    if state | plain != state:
        tokenizer = _changed(tokenizer, plain)

    def continues(text: str) -> bool:
        alone, behind = (tokenizer.encode(x, add_special_tokens=False) for x in (text, f"\n{text}"))
        return behind[-len(alone) :] == alone

    if not any(map(continues, "aZ0?")):
        raise UserError(
            "The tokenizer puts a blank before each text, and how is not known here, so prompts "
            "cannot be put together: give a model with a tokenizer.json."
        )
    return tokenizer


def _without_blank(state, kinds: dict[str, dict]):
    """Return the state of a component, or of a part of one, with `kinds` of it switched off."""
    if isinstance(state, list):
        return [_without_blank(part, kinds) for part in state]
    if not isinstance(state, dict):
        return state
    off = kinds.get(state.get("type"), {})
    return {key: off.get(key, _without_blank(value, kinds)) for key, value in state.items()}


def with_letters(tokenizer):
    """Return a tokenizer whose special tokens are none that texts are made of.

    Llama 3 names no token for padding, and many that were trained from it say pad_token "!". Such
    a letter would be left out of every document and response. It is the given object where all
    special tokens are marks of their own.
    """
    special = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    pieces = tokenizer.backend_tokenizer.get_vocab(False)
    words = {i for i, text in special.items() if not MARK.search(text) and text in pieces}
    if not words:
        return tokenizer
    tokens = json.loads(tokenizer.backend_tokenizer.to_str())["added_tokens"]

    def without(ids: set[int]):
        return _changed(tokenizer, {"added_tokens": [t for t in tokens if t["id"] not in ids]})

    def is_text(i: int) -> bool:  # a mark without brackets stands for no text, and none gives it
        text = plain.decode([i])
        return i in plain.encode(f"a{text} {text}", add_special_tokens=False)

    plain = without(words)
    letters = {i for i in words if is_text(i)}
    return without(letters) if letters else tokenizer


def _changed(tokenizer, parts: dict):
    """Return a copy of a tokenizer with other parts of its tokenizer.json."""
    tokenizer, backend = copy.copy(tokenizer), tokenizer.backend_tokenizer
    whole = json.loads(backend.to_str())
    tokenizer._tokenizer = type(backend).from_str(json.dumps(whole | parts))
    return tokenizer
