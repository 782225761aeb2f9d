"""Prompts of tokenizers that put a blank before a text: in pieces as at once, and back."""

import json
from dataclasses import replace

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from agents import find
from config.errors import UserError
from data import Task
from embedded import tiny
from engines.scripted import ScriptedEngine
from memagent import Agent, ReadConfig
from rollout import rollout
from tokens.blanks import without_blanks
from tokens.codec import Codec, Text

DOCUMENT = (
    "Anna Müller joined Boris in Lima. The bridge was designed by Clara Meyer.\n"
    "It was opened in 1936, and rebuilt twice; nobody has crossed it since  May.\n\n"
    " Otto reached Oslo.\n"
)
TASK = Task("1", "Who designed the bridge?", ("Clara Meyer",), text=DOCUMENT * 3)
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
# Llama 2's and Phi-3's ways: marks of letters, and special tokens that a blank follows
LETTERS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
MARKS = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{{ '</s>' if m.role == 'assistant' else '<|end|>' }}\n{% endfor %}<|assistant|>{{ '\n' }}"
)


def words(blank: str) -> tuple[dict, list]:
    """Learn vocabulary and merges of the document's words, behind the mark of a blank or not."""
    tokenizer = Tokenizer(models.BPE())
    by_bytes = blank == "Ġ"
    tokenizer.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False) if by_bytes else pre_tokenizers.Metaspace()
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet() if by_bytes else [*map(chr, range(33, 127))]
    trainer = trainers.BpeTrainer(
        vocab_size=2000, min_frequency=1, initial_alphabet=alphabet, show_progress=False
    )
    lines = [*DOCUMENT.split("\n"), "You Read Solve"]  # as our prompts begin
    # a line break is a byte to such tokenizers, and nothing is merged with it
    tokenizer.train_from_iterator([DOCUMENT] if by_bytes else lines, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    pieces = (
        [*model["vocab"]] if by_bytes else [*(f"<0x{i:02X}>" for i in range(256)), *model["vocab"]]
    )
    vocab = {piece: i for i, piece in enumerate([*SPECIAL, *pieces])}
    return vocab, [tuple(merge) for merge in model["merges"]]


def by_words(form: str) -> Tokenizer:
    """Make a tokenizer as SentencePiece's are converted; form: prepend, first, always or never."""
    vocab, merges = words("▁")
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    strip = [decoders.Strip(" ", 1, 0)] if form != "never" else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    if form == "prepend":
        parts = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(parts)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=form, split=False)
    return tokenizer


def by_bytes(add_prefix_space: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(*words("Ġ")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


FORMS = {
    "prepend": lambda: by_words("prepend"),  # Llama 2, Mistral 7B, Phi-3
    "first": lambda: by_words("first"),
    "always": lambda: by_words("always"),
    "never": lambda: by_words("never"),  # Gemma
    "bytes": lambda: by_bytes(False),  # Qwen, SmolLM2, Llama 3
    "bytes, prefixed": lambda: by_bytes(True),
}
WITH_BLANKS = ["prepend", "first", "always", "bytes, prefixed", "LlamaTokenizer"]


def tokenizer_of(form: str, template: str | None = LETTERS, rstrip: bool = False):
    """Make a model's tokenizer; rstrip: its special tokens take blanks behind them, as Phi-3's."""
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    if form == "LlamaTokenizer":  # what transformers makes of a folder of Llama's
        vocab, merges = words("▁")
        made = LlamaTokenizer(vocab=vocab, merges=merges, unk_token="<s>", **ends)
    else:
        backend = FORMS[form]()
        special = [AddedToken(s, special=True, normalized=False, rstrip=rstrip) for s in SPECIAL]
        backend.add_special_tokens(special)
        made = PreTrainedTokenizerFast(tokenizer_object=backend, **ends)
    if form == "LlamaTokenizer":
        made.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    made.chat_template = template
    return made


def at_once(codec: Codec, prompt) -> list[int]:
    """Return what the model's own template and tokenizer make of a prompt."""
    text = codec.tokenizer.apply_chat_template(
        prompt.messages(), tokenize=False, add_generation_prompt=True
    )
    return codec.tokenizer.encode(text, add_special_tokens=False)


class Conversation(Agent):
    prompts = {"first": "The bridge:\n{section}\n{problem}", "next": "Found:\n{section}"}

    def run(self, task):
        (first, second, *_) = self.sections(task)
        prompt = self.prompt("first", 20, section=first, problem=task.question)
        turn = yield prompt
        turn = yield replace(self.prompt("next", 20, section=second), after=turn, role="tool")
        yield replace(self.prompt("next", 20, final=True, section="Oslo"), after=turn)


AGENTS = ["memagent", "rememr1", "full", Conversation]


@pytest.mark.parametrize(
    ("form", "template"),
    [
        *((form, "marks") for form in (*FORMS, "LlamaTokenizer")),
        *((form, "marks, stripped") for form in FORMS),
        *((form, "letters") for form in WITH_BLANKS),
    ],
)
def test_a_prompt_in_pieces_is_the_models_own(form, template):
    """No token of these spans a border between pieces, so there must be no difference."""
    letters = template == "letters"
    codec = Codec(tokenizer_of(form, LETTERS if letters else MARKS, "stripped" in template))
    compared = 0
    # a response begins with a blank behind these letters, and their template puts another one
    for name in AGENTS[:-1] if letters else AGENTS:
        plain = isinstance(name, str)
        settings = dict(chunk_tokens=12, memory_tokens=40)
        agent = find.make(name, settings) if plain else name(ReadConfig(**settings))
        engine = ScriptedEngine(codec, lambda prompt: "Clara Meyer designed the bridge.")
        (done,) = rollout(engine, agent, [(TASK, 0)])
        assert done.turns and not done.error
        for turn in done.turns:
            assert turn.prompt_ids == at_once(codec, turn.prompt), turn.prompt.text
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("form", [*FORMS, "LlamaTokenizer"])
def test_the_first_piece_is_a_beginning_and_sections_join_to_the_document(form):
    tokenizer = tokenizer_of(form, None)
    tokenizer.bos_token = None
    codec = Codec(tokenizer)
    parts = [("Anna", False), ("\n", True), ("Boris", False)]
    assert codec.chat(parts) == tokenizer.encode("Anna\nBoris", add_special_tokens=False)
    for text in (DOCUMENT, f" {DOCUMENT}", f"\n{DOCUMENT}", "  ", " a"):
        assert codec.decode(codec.encode(text)) == text
        for n_tokens in (1, 7, 1000):
            assert "".join(codec.cut(text.replace("ü", "u"), n_tokens)) == text.replace("ü", "u")


@pytest.mark.parametrize("form", WITH_BLANKS)
def test_a_memory_keeps_the_form_in_which_it_was_sampled(form):
    codec = Codec(tokenizer_of(form))
    anna, bare = codec.encode(" Anna reached"), codec.encode("Anna reached")
    assert anna != bare
    for ids, text in ((anna, " Anna reached"), (bare, "Anna reached")):
        memory = codec.after_thinking(codec.response([*ids, codec.tokenizer.eos_token_id]))
        assert memory == text and memory.ids == ids
        prompt = codec.chat([("<memory>\n", True), (memory, False), ("\n", True)])
        assert text in codec.tokenizer.decode(prompt)
        thought = codec.after_thinking(codec.text(f"hm</think>{text}"))
        assert thought == text and thought.ids == ids


def test_what_follows_a_thought_keeps_the_ids_that_were_sampled():
    tokenizer = tokenizer_of("bytes")
    tokenizer.add_tokens(["<think>", "</think>"])
    codec, closing = Codec(tokenizer), tokenizer.convert_tokens_to_ids("</think>")
    ids = codec.encode("A") + codec.encode("nna")
    assert ids != codec.encode("Anna")
    assert codec.after_thinking(codec.response([closing, *ids])).ids == ids


@pytest.mark.parametrize("template", [LETTERS, MARKS])
@pytest.mark.parametrize("form", WITH_BLANKS)
def test_a_response_that_is_written_for_the_model_is_what_it_would_sample(form, template):
    codec = Codec(tokenizer_of(form, template))
    said = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Anna"}]
    text = codec.tokenizer.apply_chat_template(said, tokenize=False).partition("</s>")[0]
    whole = codec.tokenizer.encode(text, add_special_tokens=False)
    assert [*codec.chat([("Who?", False)]), *codec.reply("Anna")] == whole
    assert codec.reply(Text("Anna", (1, 2))) == (1, 2)


def test_what_puts_no_blank_is_left_as_it_is():
    for tokenizer in (tokenizer_of("bytes"), tokenizer_of("never"), tiny.make_tokenizer()):
        assert without_blanks(tokenizer) is tokenizer
        codec = Codec(tokenizer)
        assert codec.reply("Anna") == codec.encode("Anna")
    mended = tokenizer_of("prepend")
    before = mended.backend_tokenizer.to_str()
    assert without_blanks(mended) is not mended
    assert mended.backend_tokenizer.to_str() == before  # what is exported


def test_a_blank_of_an_unknown_kind_is_refused():
    tokenizer = tokenizer_of("never")
    marks = [normalizers.Replace(Regex(rf"\A[{c}]"), f"▁{c}") for c in "aZ0?"]
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(marks)
    with pytest.raises(UserError):
        Codec(tokenizer)
