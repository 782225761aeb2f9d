"""Words of a text in any script, as every retriever takes them."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents import baselines, retrieval
from tasks.lexicon import folded, words

ONE = "a script, and a text of it that another one matches"


@pytest.mark.parametrize(("text", "expected"), [
    ("On 8 May, Ann's max_len: 1,200", "on 8 may ann s max len 1 200"),
    ("Gro\u0308ßl GRÖSSL", "grössl grössl"),
    ("e\u0301te\u0301 Ω\u0301 Й ΐ İ 𝐀Ⅻ℃", "été ώ й ΐ i axii c"),
    ("Lin\u00addström Lin\u00ad\ndström", "lindström lindström"),
    ("refi-\nnancing, e-mail; 3-\n5", "refinancing e mail 3 5 refi nancing"),
    ("well\u2010 \n\nknown", "wellknown well known"),
    ("die ﬁnale, １２ ｍ Ａ", "die finale 12 m a"),
    ("Lindt¹ 10⁵ H₂O Acme™ ½", "lindt 1 10 5 h2o acme tm 1 2"),
    ("٣ महीने ५", "3 महीने 5"), ("за\u0301мок Müller\u200b", "замок müller"),
    ("مُحَمَّد محمد", "محمد محمد"), ("谁签署了合同？山", "谁签 签署 署了 了合 合同 山"),
    ("iPhone手机壳2024年", "iphone 手机 机壳 2024 年"), ("ｶﾞﾗｽのコップ", "ガラ ラス スの のコ コッ ップ"),
    ("서울에서 만났다", "서울 울에 에서 만났 났다"), ("\u1109\u1165\u110b\u116e\u11af", "서울"),
    ("ใครลงนาม", "ใค คร รล ลง งน นา าม"), ("អ្នកណា", "អ\u17d2 \u17d2ន នក កណ ណា"),
    ("«Été» – “Lima”…", "été lima"), ("!? \ud800 \u0301", ""),
])  # fmt: skip
def test_words(text, expected):
    assert words(text) == expected.split()
    assert sorted(words(unicodedata.normalize("NFD", text))) == sorted(expected.split())


@given(st.text(alphabet=st.characters(max_codepoint=127)))
def test_english_has_the_words_that_it_had(text):
    """What the published systems take: letters and digits, articles aside, two letters at least."""
    text = text.replace("\n", " ")
    plain = "".join(c if c.isalnum() else " " for c in text.lower()).split()
    assert words(text) == retrieval.tokens(text) == plain
    assert baselines.words_of(text) == [word for word in plain if len(word) > 1]


@given(st.text())
def test_the_same_words_however_they_are_encoded(text):
    for form in ("NFC", "NFD"):
        assert words(unicodedata.normalize(form, text)) == words(text)
    assert folded(folded(text)) == folded(text)


def test_words_of_one_agent():
    text = "The U.S.A., O'Brien and AT&T: 1,200 at 3:45; “Lima”<update>Ü</update>"
    assert retrieval.words(text) == [
        "usa",
        "obrien",
        "and",
        "att",
        "1200",
        "at",
        "345",
        "lima",
        "ü",
    ]
    assert baselines.words_of("A 5 山 é ab 12") == ["山", "ab", "12"]
