"""Thoughts, ends and ids that are never sampled, whatever marks a model has."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from config.errors import UserError
from data import grade, strip_thinking
from models.policy import Policy
from tokens.codec import Characters, Codec
from tokens.responses import PAIRS

USER = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.tool_calls %}[CALL]{{ c.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(specials, template=USER, eos="", plain=(), **more):
    """Make a tokenizer of single bytes, special tokens and further ones that are none."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    tokenizer.add_tokens([AddedToken(s, special=False, normalized=False) for s in plain])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos or specials[0], **more)
    fast.chat_template = template
    return fast


# ---------------------------------------------------------------- thoughts

THOUGHT, ANSWER = "Maybe \\boxed{Rome}?", "\\boxed{Oslo}"
SPEAKS = USER + "{% if messages[0].reasoning_content %}<<{{ messages[0] }}>>{% endif %}"


def codec_of(kind, opening, closing):
    """Make the codec of a model that marks thoughts so."""
    if kind == "plain":
        return Codec(byte_tokenizer(["</s>"], plain=(opening, closing)))
    if kind == "spelled":  # a template names them, and the tokenizer has no tokens for them
        return Codec(byte_tokenizer(["</s>"], USER + f"{{# {opening} {closing} #}}"))
    if kind == "unknown":
        return Codec(byte_tokenizer(["</s>"]))
    begun = USER + f"{opening}\n" * (kind == "begun")
    return Codec(byte_tokenizer(["</s>", opening, closing], begun))


def response_of(codec, text):
    return codec.response(codec.tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("kind", "pair"),
    [
        *((kind, pair) for pair in PAIRS for kind in ("special", "plain", "spelled", "begun")),
        ("unknown", ("<think>", "</think>")),
    ],
    ids=lambda x: x if isinstance(x, str) else x[0],
)
def test_thoughts_of_any_form_are_no_memory_and_no_answer(kind, pair):
    codec, (opening, closing) = codec_of(kind, *pair), pair
    begins = "" if kind == "begun" else opening  # by the template itself
    whole = response_of(codec, f"{begins}{THOUGHT}{closing}{ANSWER}</s>")
    memory = codec.after_thinking(whole)
    assert memory == strip_thinking(whole) == ANSWER and memory.ids == codec.encode(ANSWER)
    assert grade(whole, ["Oslo"]).reward == 1 and grade(whole, ["Rome"]).reward == 0
    cut = response_of(codec, begins + THOUGHT)
    assert codec.after_thinking(cut) == strip_thinking(cut) == ""
    assert grade(cut, ["Rome"]).reward == 0
    again = response_of(codec, f"{begins}{THOUGHT}{closing}{ANSWER}{opening}or")
    assert codec.after_thinking(again) == strip_thinking(again) == ANSWER
    assert codec.response([]) == ""
    if begins:
        alone = response_of(codec, f"{ANSWER}</s>")
        assert codec.after_thinking(alone) == alone == ANSWER


def test_thoughts_that_the_template_has_ended_are_over():
    codec = Codec(byte_tokenizer(["<|im_end|>"], CHATML + "<think>\n\n</think>\n\n"))
    said = response_of(codec, f"{ANSWER} or")
    assert codec.after_thinking(said) == said == f"{ANSWER} or"
    assert grade(said, ["Oslo"]).reward == 1


def test_a_model_that_writes_channels_is_refused():
    with pytest.raises(UserError, match="channels"):
        Codec(byte_tokenizer(["<|return|>", "<|channel|>", "<|message|>"]))


@pytest.mark.parametrize(("opening", "closing"), PAIRS)
def test_a_server_marks_thoughts_in_text(opening, closing):
    for codec in (Characters(), Codec(byte_tokenizer(["</s>", opening, closing]))):
        shown = codec.shown(f"{opening}{THOUGHT}{closing}{ANSWER}")
        assert shown == f"<think>{THOUGHT}</think>{ANSWER}"
        assert strip_thinking(codec.shown(f" {opening}{THOUGHT}")).strip() == ""
        assert codec.shown(ANSWER) == ANSWER
    assert Characters().shown("The tag <reasoning> opens a thought.").startswith("The tag <reas")


@pytest.mark.parametrize(
    ("template", "marks", "unknown"),
    [
        (SPEAKS, [], True),
        (USER, [], False),
        (SPEAKS + "{# </think> #}", [], False),
        (SPEAKS, ["[THINK]", "[/THINK]"], False),
    ],
)
def test_a_command_names_a_model_with_marks_that_are_not_known(
    tmp_path, capfd, template, marks, unknown
):
    byte_tokenizer(["</s>", *marks], template).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    Policy(tmp_path).codec()
    assert bool(capfd.readouterr().err) == unknown


# ---------------------------------------------------------------- where a response ends

LLAMA = ["<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
HEADERS = (
    "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
ENDS, BOTH = {"eos_token_id": [256, 259]}, {256, 259}


@pytest.mark.parametrize(("template", "config", "generation", "ends"), [
    (USER, ENDS, None, BOTH), (USER, {}, ENDS, BOTH), (HEADERS, None, None, BOTH),
    (USER, {"eos_token_id": 259}, None, BOTH), (USER, {"eos_token_id": 0}, None, {0, 256}),
    (USER, {"eos_token_id": 259}, {"eos_token_id": 256}, BOTH),
    (USER, {"eos_token_id": 259}, {}, BOTH),
    (HEADERS, {"eos_token_id": 256}, {"eos_token_id": 256}, BOTH),
    (HEADERS, {"eos_token_id": -1, "text_config": ENDS}, None, BOTH),
    (USER, "[", None, None), (USER, {}, "{", None),  # damaged
])  # fmt: skip
def test_a_response_ends_where_any_file_or_the_template_says(
    tmp_path, template, config, generation, ends
):
    byte_tokenizer(LLAMA, template).save_pretrained(tmp_path)  # its own end is 256
    for name, given in (("config.json", config), ("generation_config.json", generation)):
        if isinstance(given, dict):
            given = json.dumps({"model_type": "llama"} | given)
        if given is not None:
            (tmp_path / name).write_text(given)
    if ends is None:
        with pytest.raises(UserError):
            Codec.load(tmp_path, local=True)
        return
    codec = Codec.load(tmp_path, local=True)
    assert codec.eos_ids == ends and codec.end_id == (259 if template is HEADERS else 256)
    said = codec.encode("Oslo")
    assert codec.response([*said, 259]).ids == codec.response([*said, 256]).ids == said


@pytest.mark.parametrize(("ends", "written"), [((), None), ((259, 258), 258)])
def test_where_nothing_else_says_how_a_response_ends_the_configuration_does(ends, written):
    base = byte_tokenizer(LLAMA, "")
    base.eos_token = base.chat_template = None
    assert Codec(base, eos_ids=ends).end_id == written


# ---------------------------------------------------------------- what is never sampled


def test_ids_without_a_token_and_special_ones_are_never_sampled():
    names = ["<|im_end|>", "<|im_start|>", "<pad>", "[CALL]", "[THINK]", "[/THINK]"]
    tokenizer = byte_tokenizer(names, CHATML, pad_token="<pad>", plain=["<tool_call>"])
    never = Codec(tokenizer).never_sampled(300)
    # an end, marks of thoughts and of calls, and tokens that are not special may be said
    assert never == [*tokenizer.convert_tokens_to_ids(["<|im_start|>", "<pad>"]), *range(263, 300)]
    assert Codec(tokenizer).never_sampled(258) == [257]  # fewer rows than tokens
    tokenizer.chat_template = None
    assert {*Codec(tokenizer).never_sampled(300)} - {*never} == {259}


def test_no_special_token_enters_a_memory():
    tokenizer = byte_tokenizer(["<|im_end|>", "<|im_start|>", "[CALL]"], CHATML)
    codec = Codec(tokenizer)
    response = response_of(codec, "[CALL]Anna<|im_start|> met<|im_end|>")
    assert response == "Anna met" and response.ids == codec.encode("Anna met")


# ---------------------------------------------------------------- letters among the special tokens

SAID = "Anna shouted: Go! a!a"


@pytest.mark.parametrize("role", ["pad_token", "bos_token", "unk_token", "eos_token", "extra"])
@pytest.mark.parametrize("letter", ["!", "a", "G"])
def test_a_letter_stays_a_letter_whatever_it_is_used_for(tmp_path, role, letter):
    """Llama 3 names no token for padding, and many that came of it say "!"."""
    names = {"extra_special_tokens": [letter]} if role == "extra" else {role: letter}
    names = {"eos": letter} if role == "eos_token" else names
    byte_tokenizer(["<|im_end|>", "<|im_start|>"], CHATML, **names).save_pretrained(tmp_path)
    codec = Codec.load(tmp_path, local=True)
    ids, end = codec.encode(SAID), codec.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids == Codec(byte_tokenizer(["<|im_end|>"])).encode(SAID)
    assert "".join(codec.cut(SAID, 4)) == codec.decode(ids) == SAID
    assert codec.chat([(SAID, True)]) == codec.chat([(SAID, False)])  # in a template's own words
    assert not {*ids} & {*codec.never_sampled(300)}
    if role == "eos_token":  # it ends a response, as the folder says, and nothing else
        assert {ids[SAID.index(letter)], end} == codec.eos_ids
    else:
        response = codec.response([*ids, end])
        assert response == SAID and response.ids == ids
    codec.tokenizer.save_pretrained(tmp_path / "export")
    assert Codec.load(tmp_path / "export", local=True).fingerprint == codec.fingerprint


@pytest.mark.parametrize("mark", ["<pad>", "[PAD]", "sop", ">>TITLE<<", "by pieces <pad>"])
def test_a_mark_is_none_though_it_stands_in_the_vocabulary(mark):
    """As those of Llama 2 and of Falcon do; by pieces, a text that spells it would give it too."""
    by_pieces, mark = mark.startswith("by pieces"), mark.rpartition(" ")[2]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = models.Unigram([(c, -1.0) for c in alphabet] + [(mark, 0.0)], unk_id=0)
    pairs = models.BPE({c: i for i, c in enumerate([*alphabet, mark])}, [])
    tokenizer = Tokenizer(pieces if by_pieces else pairs)
    if not by_pieces:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=mark, eos_token="</s>")
    codec = Codec(fast)
    assert 256 in codec.never_sampled(258) and codec.response([256, *codec.encode("a")]) == "a"
    assert by_pieces or codec.decode(codec.encode(f"x {mark}")) == f"x {mark}"
