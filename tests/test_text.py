import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import base
from text import Codec, Text, UserError

CODEC = Codec(base.make_tokenizer())


@given(st.text(st.characters(blacklist_categories=("Cs",)), max_size=60))
def test_the_embedded_tokenizer_covers_any_text(text):
    assert CODEC.decode(CODEC.encode(text)).removeprefix(" ") == text.removeprefix(" ")


def test_words_of_the_world_are_single_tokens_wherever_they_stand():
    ids = CODEC.encode("Anna joined Boris. Boris reached Lima.")
    assert len(ids) == 8
    assert ids[2] == ids[4] and CODEC.encode("Anna") == CODEC.encode(" Anna") == ids[:1]


@given(st.text("abc .\n", max_size=80), st.integers(1, 9))
def test_cut_loses_and_repeats_nothing(text, n_tokens):
    sections = CODEC.cut(text, n_tokens)
    assert tuple(i for s in sections for i in s.ids) == CODEC.encode(text)
    assert all(len(s.ids) == n_tokens for s in sections[:-1])


@pytest.mark.parametrize(("over", "kept"), [("head", [0, 1, 2, 3, 4, 5]), ("center", [0, 1, 2, 7, 8, 9])])
def test_cut_of_a_long_document(over, kept):
    ids = CODEC.encode("0123456789")[1:]  # without the space that is put in front
    sections = CODEC.cut(Text("0123456789", ids), 2, max_sections=3, over=over)
    assert [i for s in sections for i in s.ids] == [ids[k] for k in kept]
    assert len(CODEC.cut(Text("0123456789", ids), 2, max_sections=5)) == 5  # exactly at the limit: nothing is cut


def test_text_keeps_its_ids_through_copies_and_loses_them_by_string_operations():
    text = Text("ab", (1, 2))
    for other in (copy.deepcopy(text), pickle.loads(pickle.dumps(text))):
        assert other == "ab" and other.ids == (1, 2)
    assert not hasattr(text.strip(), "ids") and not hasattr(text + "c", "ids")


def test_a_piece_with_ids_is_never_encoded_again():
    odd = Text("Anna", (5, 6, 7))  # not what the tokenizer would say
    assert CODEC.chat([("<x>", True), (odd, False)])[-3:] == [5, 6, 7]


def test_thinking_never_enters_a_memory():
    ids = CODEC.encode("hm hm </think> Anna joined Boris.")
    assert CODEC.after_thinking(CODEC.decode(ids)).strip() == "Anna joined Boris."
    assert CODEC.after_thinking(CODEC.text("Anna")) == "Anna"
    assert CODEC.after_thinking(CODEC.text("<think> never ends")).strip() == ""


def test_response_drops_only_the_end_of_sequence():
    eos = CODEC.tokenizer.eos_token_id
    ids = CODEC.encode("Anna joined")
    assert CODEC.response([*ids, eos]).ids == ids
    assert CODEC.response(list(ids)).ids == ids


def test_a_wrong_folder_is_one_sentence():
    with pytest.raises(UserError, match=r"No model folder at \./nowhere"):
        Codec.load("./nowhere")
