"""Rewards and metrics on golden vectors, and the search for an answer in a text."""

from __future__ import annotations

import string
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.errors import UserError
from data import (
    boxed_reward,
    exact_match,
    extract_answer,
    extract_boxed,
    extract_sentence,
    f1,
    grade,
    normalize_answer,
    ruler_match,
    strip_thinking,
    sub_em,
    sub_em_upstream,
    unwrapped,
)
from tasks.mentions import answer_recall, count_phrases, phrases, separate_words

# response, accepted answer: MemAgent's reward (arXiv 2507.02259, eq. 6)
EARNS = [
    (r"\boxed{Paris}", "Paris"), (r"\boxed{ New York City }", "New York City"),
    (r"\boxed Paris", "Paris"), (r"\boxed{Rome} or rather \boxed{Paris}", "Paris"),
    (r"\boxed{" + "x" * 290 + "}", "x" * 290), (r"\boxed{PARIS}", "paris"),
    (r"\boxed{paris}", "PARIS"), (r"so $\boxed Paris$ it is", "Paris"),
    (r"\boxed{Paris}" + "." * 287, "Paris"),  # 13 + 287: just inside the last 300 characters
    (r"\boxed{a{b}c}", "a{b}c"), (r"\boxed{Par" + "\n" + "is}", "Paris"), (r"\boxed{50\%}", "50"),
    (r"\boxed{\$5}", "5"), (r"\boxed{90^{\circ}}", "90"), (r"\boxed{90^\circ}", "90"),
    (r"\boxed{\tfrac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\left(1\right)}", "(1)"), (r"\boxed{1\!000}", "1000"), (r"\boxed{1 .5}", "1 0.5"),
    (r"\boxed{\frac{.5}{2}}", r"\frac{0.5}{2}"), (r"\boxed{a\\b}", r"a\b"),
    (r"\boxed{İstanbul}", "İstanbul"),  # its lower case is one character longer
    (r"<think>\boxed{Rome}</think>\boxed{Paris}", "Paris"),
]  # fmt: skip
EARNS_NOTHING = [
    (r"\boxed{Paris.}", "Paris"), (r"\boxed{\text{Paris}}", "Paris"), (r"\fbox{Paris}", "Paris"),
    (r"\boxed{Paris} or rather \boxed{Rome}", "Paris"), (r"\boxed{" + "x" * 300 + "}", "x" * 300),
    (r"\boxed{the Beatles}", "Beatles"), ("Paris", "Paris"), (r"\boxed{Paris", "Paris"),
    (r"\boxed[Paris]", "Paris"), (r"\boxed", "Paris"), (r"\boxed{}", "Paris"), ("", "Paris"),
    (r"\boxed{Paris}" + "." * 288, "Paris"), (r"<think>\boxed{Paris}</think>No idea", "Paris"),
    (r"\boxed Rome$ and \boxed{Paris}", "Paris"),  # a box with a space goes first
]  # fmt: skip


def test_boxed_reward():
    assert [pair for pair in EARNS if boxed_reward(pair[0], [pair[1]]) != 1] == []
    assert [pair for pair in EARNS_NOTHING if boxed_reward(pair[0], [pair[1]]) != 0] == []
    assert boxed_reward(r"\boxed{Rome}", ["Paris", "Rome"]) == 1


@given(st.text(alphabet="ab{}\\ $x", max_size=40))
def test_extract_boxed_gives_back_balanced_content(content):
    depths = [content[:i].count("{") - content[:i].count("}") for i in range(len(content) + 1)]
    balanced = min(depths) >= 0 and depths[-1] == 0
    if r"\boxed" not in content:
        found = extract_boxed(r"so \boxed{" + content + "}")
        assert found == content if balanced else found != content


PARTS = {  # function -> (text, what it finds)
    extract_boxed: [
        (r"\boxed{a {b {c}} d} tail", "a {b {c}} d"), (r"\boxed{a} \boxed{b}", "b"),
        (r"\boxed{a} \boxed{b", None),  # the last box counts, closed or not
        (r"\boxed", None), (r"\boxed[a]", None), ("", None),
    ],
    extract_sentence: [
        ("Therefore, the answer is Paris.", "Paris"), ("the answer is (Paris)", "(Paris)"),
        ("the answer is Rome. No, the answer is **Paris**...", "Paris"), ("the answer is .", ""),
        ("It is Paris.", None), ("", None),
        ("THE ANSWER IS Rome. So, The Answer is İzmir.", "İzmir"),
    ],
    strip_thinking: [
        ("no thoughts", "no thoughts"), ("<think>a</think>b", "b"), ("<think>never ends", ""),
        ("a</think>b</think>c", "c"),  # the template opened it
        ("a</think>b<think>c", "b"),
    ],
    normalize_answer: [
        ("The  Beatles!", "beatles"), ("a an the", ""), ("U.S.A.", "usa"), ("Anthem", "anthem"),
        ("the–end", "–end"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("function", PARTS)
def test_parts_of_a_response(function):
    for text, found in PARTS[function]:
        assert function(text) == found, text


# prediction, answers, em, f1, sub_em, sub_em_upstream
METRICS = [
    ("Paris", ["Paris"], 1, 1, 1, 1), ("the Beatles", ["Beatles"], 1, 1, 1, 1),
    ("Paris, France", ["Paris"], 0, 2 / 3, 1, 1), ("Paris", ["Paris, France"], 0, 2 / 3, 0, 1),
    ("a", ["apple"], 0, 0, 0, 1),  # upstream: containment either way
    ("The", ["anything"], 0, 0, 0, 1), ("no", ["Norway"], 0, 0, 0, 1),
    ("yes", ["yes"], 1, 1, 1, 1),
    ("yes it is", ["yes"], 0, 0, 1, 1),  # the guard: no half points for yes
    ("yes", ["yes it is"], 0, 0, 0, 1), ("noanswer", ["no answer"], 0, 0, 0, 0),
    ("no", ["yes"], 0, 0, 0, 0),
    ("Rome", ["Paris", "Rome"], 1, 1, 1, 0),  # any accepted answer, upstream the first alone
    ("", ["Paris"], 0, 0, 0, 0),
    (None, ["Paris"], 0, 0, 0, 0),  # 1.0 in vime
    ("", [""], 0, 0, 0, 0), ("apple", ["A"], 0, 0, 0, 1),
    # golds of articles or punctuation alone equal themselves alone; MemAgent's finds "" anywhere
    ("a", ["A"], 1, 1, 1, 1), ("(A)", ["A"], 1, 1, 1, 1), ("...", ["A"], 0, 0, 0, 1),
    ("The", ["A"], 0, 0, 0, 1), ("the", ["The"], 1, 1, 1, 1), ("A dog", ["A"], 0, 0, 0, 1),
    ("A", ["B", "A"], 1, 1, 1, 1), ("...", ["..."], 1, 1, 1, 1), ("?", ["..."], 0, 0, 0, 1),
    ("- .", ["! ."], 0, 0, 0, 1), ("…", ["…"], 1, 1, 1, 1), ("Paris", ["…"], 0, 0, 0, 0),
    (" ", [" "], 0, 0, 0, 1),
    # LaTeX around words counts as its content, but MemAgent's metric sees the letters
    (r"\text{Paris}", ["Paris"], 1, 1, 1, 1),
    (r"$\textbf{Clara }\emph{Meyer}$", ["Clara Meyer"], 1, 1, 1, 0),
    (r"\mathrm{yes}", ["yes"], 1, 1, 1, 1), (r"\\operatorname*{Lima}", ["lima"], 1, 1, 1, 1),
    (r"\mathbf{New}\ \textit{York}", ["New York"], 1, 1, 1, 0),
    (r"42\,\text{km}", ["42 km"], 1, 1, 1, 0), ("Paris", [r"\text{Paris}"], 1, 1, 1, 1),
    (r"\text{A}", ["A"], 1, 1, 1, 1), (r"\sqrt{2}", ["2"], 0, 0, 1, 1),
    (r"C:\textures", [r"C:\ures"], 0, 0, 0, 0),
    # Unicode's punctuation, full-width and decomposed letters, signs that nobody sees
    ("北京。", ["北京"], 1, 1, 1, 1), ("《红楼梦》", ["红楼梦"], 1, 1, 1, 1),
    ("Ｐａｒｉｓ！", ["Paris"], 1, 1, 1, 0), ("O’Brien", ["O'Brien"], 1, 1, 1, 0),
    ("“Heroes”", ["Heroes"], 1, 1, 1, 1), ("1990–1995", ["1990-1995"], 1, 1, 1, 0),
    ("Zoe\u0308", ["Zo\u00eb"], 1, 1, 1, 0), ("Pa\u200bris", ["Paris"], 1, 1, 1, 0),
    ("ﾄｳｷｮｳ", ["トウキョウ"], 1, 1, 1, 0), ("€5", ["5"], 0, 0, 1, 1),
    # characters are the words of a script without blanks
    ("北京市", ["北京"], 0, 4 / 5, 1, 1), ("東京タワー", ["東京"], 0, 4 / 7, 1, 1),
    ("上海", ["北京"], 0, 0, 0, 0), ("2023年", ["2023年5月"], 0, 2 / 3, 0, 1),
    ("สยาม", ["สย"], 0, 2 / 3, 1, 1), ("iPhone手机", ["iPhone"], 0, 1 / 2, 1, 1),
    ("서울 시", ["서울"], 0, 2 / 3, 1, 1), ("Paris", [], 0, 0, 0, 0),
    ("a b c", ["b c d"], 0, 4 / 5, 0, 1),  # the article goes: b c against b c d
    (".", ["Paris"], 0, 0, 0, 1),
]  # fmt: skip


@pytest.mark.parametrize(("pred", "answers", "em", "f", "sub", "upstream"), METRICS)
def test_metrics(pred, answers, em, f, sub, upstream):
    assert exact_match(pred, answers) == em
    assert f1(pred, answers) == pytest.approx(f)
    assert sub_em(pred, answers) == sub
    assert sub_em_upstream(pred, answers) == upstream


ASCII = st.text(alphabet=string.printable.replace("\\", ""), max_size=12)
WORDY = st.lists(
    st.sampled_from("a the yes no Lima lima, Peru U.S. 7 - noanswer".split()), max_size=5
)


@given(ASCII | WORDY.map(" ".join), ASCII | WORDY.map(" ".join))
def test_on_ascii_the_metrics_are_those_of_the_originals(pred, gold):
    """SQuAD's and HotpotQA's definitions, wherever normalising leaves something of the answer."""
    if not (words := normalize_answer(gold)):
        return
    said = normalize_answer(pred)
    assert exact_match(pred, [gold]) == (said == words)
    assert sub_em(pred, [gold]) == (words in said)
    common = sum((Counter(said.split()) & Counter(words.split())).values())
    if said != words and {said, words} & {"yes", "no", "noanswer"}:
        common = 0
    expected = 2 * common / (len(said.split()) + len(words.split()))
    assert f1(pred, [gold]) == pytest.approx(expected)


def test_nothing_is_rounded():
    assert f1("x y z w", ["x b c"]) == 2 / 7
    assert ruler_match("one", ["One", "two", "three"]) == 1 / 3


@pytest.mark.parametrize(
    ("pred", "golds", "value"),
    [
        ("12 and 34", ["12", "34"], 1), ("12", ["12", "34"], 0.5), ("ABC", ["abc"], 1),
        ("", ["a"], 0), (None, ["a"], 0), ("a", [], 0),
    ],
)  # fmt: skip
def test_ruler_match(pred, golds, value):
    assert ruler_match(pred, golds) == value


@settings(max_examples=50)
@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=3))
def test_metrics_are_ordered_and_bounded(pred, answers):
    for metric in (exact_match, f1, sub_em, sub_em_upstream, ruler_match):
        assert 0 <= metric(pred, answers) <= 1
        assert metric(None, answers) == metric("", answers) == 0
    if exact_match(pred, answers):
        assert f1(pred, answers) == sub_em(pred, answers) == 1


# ---------------------------------------------------------------- the scores of a response

# response, answers, form -> what is shown, reward, em, f1, sub_em, sub_em_upstream
SCORES = [
    (r"<think>the answer is Rome</think> It is \boxed{ The Paris }", ["Paris", "Lutetia"], "boxed",
     ("The Paris", 0, 1, 1, 1, 1)),
    (r"\boxed{Paris}", ["Paris"], "boxed", ("Paris", 1, 1, 1, 1, 1)),
    (r"\boxed{\text{Clara Meyer}}", ["Clara Meyer"], "boxed",
     (r"\text{Clara Meyer}", 0, 1, 1, 1, 1)),  # the reward is MemAgent's
    (r"\boxed{Rome}, so the answer is *Paris*.", ["Paris"], "sentence", ("Paris", 1, 1, 1, 1, 1)),
    ("the answer is the Paris", ["Paris"], "sentence",
     ("the Paris", 0, 1, 1, 1, 1)),  # the reward keeps articles, whatever the form
    ("Lima", ["Lima"], "plain", ("Lima", 1, 1, 1, 1, 1)),
    ("<think>Oslo?</think>\n\n**lima**.", ["Oslo", "Lima"], "plain", ("lima", 1, 1, 1, 1, 0)),
    ("the Beatles", ["Beatles"], "plain", ("the Beatles", 0, 1, 1, 1, 1)),
    ("It is Lima.", ["Lima"], "plain", ("It is Lima", 0, 0, 1 / 2, 1, 1)),
    ("Lima", ["Lima, Peru"], "plain", ("Lima", 0, 0, 2 / 3, 0, 1)),
    ("Heroes", ['"Heroes"'], "plain",
     ("Heroes", 1, 1, 1, 1, 1)),  # the accepted answer has quotes of its own
    ("Apple Inc.", ["Apple Inc."], "plain", ("Apple Inc", 1, 1, 1, 1, 1)),
    ("The U.S.", ["the U.S."], "plain", ("The U.S.", 1, 1, 1, 1, 1)),
    ("Lima\nIt is by the sea.", ["Lima"], "plain",
     ("Lima\nIt is by the sea", 0, 0, 1 / 3, 1, 1)),  # all lines are the answer
    ("Oslo", ["Lima"], "plain", ("Oslo", 0, 0, 0, 0, 0)),
    (r"\boxed{Lima}", ["Lima"], "plain", ("Lima", 1, 1, 1, 1, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("response", "answers", "form", "scores"), SCORES)
def test_scores_of_a_response(response, answers, form, scores):
    s = grade(response, answers, form)
    assert s.pred == scores[0]
    assert (s.reward, s.em, s.f1, s.sub_em, s.sub_em_upstream) == pytest.approx(scores[1:])
    assert extract_answer(response, form) == (s.pred, True)


@pytest.mark.parametrize(
    ("response", "upstream"),
    [
        (r"\boxed{ }", 1), ("\\boxed{\n \t}", 1), (r"\boxed  $", 1), (r"\boxed{}", 0),
        ("the answer is .", 0),
    ],
)  # fmt: skip
def test_a_box_of_blanks_is_right_for_memagent_alone(response, upstream):
    """Its `judge_sub_em` checks for a prediction before normalising it; "" is in every text."""
    s = grade(response, ["Paris"], "sentence" if "is" in response else "boxed")
    assert (s.pred, s.reward, s.em, s.f1, s.sub_em, s.sub_em_upstream) == ("", 0, 0, 0, 0, upstream)


@pytest.mark.parametrize(
    ("response", "forms"),
    [
        ("", "boxed sentence plain"), ("\\boxed \n", "boxed sentence"), ("Paris", "boxed sentence"),
        ("<think>the answer is Paris \\boxed{Paris}", "boxed sentence plain"), (" \n", "plain"),
        ("<think>Paris</think> ", "plain"),
    ],
)  # fmt: skip
def test_a_response_without_an_answer_scores_nothing(response, forms):
    for form in forms.split():
        s = grade(response, ["Paris"], form)
        assert (s.pred, s.reward, s.em, s.f1, s.sub_em, s.sub_em_upstream) == (None, 0, 0, 0, 0, 0)
        assert extract_answer(response, form)[1] is False
    with pytest.raises(UserError):
        grade(response, ["Paris"], "json")


@pytest.mark.parametrize(
    ("response", "form", "share"),
    [
        (r"\boxed{12, 34 and 56}", "boxed", 1), (r"\boxed{12, 34}", "boxed", 2 / 3),
        (r"\boxed{34}", "boxed", 1 / 3), (r"\boxed{}", "boxed", 0), ("12 34 56", "boxed", 0),
        ("", "boxed", 0), ("the answer is 56 and 12.", "sentence", 2 / 3),
        ("12\n34\n78.", "plain", 2 / 3),
    ],
)  # fmt: skip
def test_where_every_answer_is_asked_for_the_share_of_them_counts(response, form, share):
    s = grade(response, ["12", "34", "56"], form, all_asked=True)
    assert s.reward == s.sub_em == pytest.approx(share)
    if response == r"\boxed{34}":  # else any one of them is right
        assert grade(response, ["12", "34", "56"]).reward == 1


# ---------------------------------------------------------------- the plain form


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        # emphasis and quotes, around the whole and with nothing of their kind inside
        ("**Lima**", "Lima"), ("***Lima***", "Lima"), ("_Lima_", "Lima"), ("`Lima`", "Lima"),
        ("```\nLima\n```", "Lima"), ('"Lima"', "Lima"), ("“Lima”", "Lima"), ("„Lima“", "Lima"),
        ("«Lima»", "Lima"), ("‘Lima’", "Lima"), ("'It's a Wonder'", "It's a Wonder"),
        ("‘It’s a Wonderful Life’", "It’s a Wonderful Life"), ('"A" or "B"', '"A" or "B"'),
        ("*a* and *b*", "*a* and *b*"), ("2*3*4", "2*3*4"), ("the dogs'", "the dogs'"),
        # what may stand before the answer
        ("The answer is Lima", "Lima"), ("the answer is: Lima", "Lima"), ("Answer: Lima", "Lima"),
        ("**Answer:** Lima", "Lima"), ("**Answer**: Lima", "Lima"), ("Answer:\nLima", "Lima"),
        ("Therefore, the final answer is **Lima**.", "Lima"), ("Short answer: Lima", "Lima"),
        ("Answering machine", "Answering machine"), ("The answer isolated", "The answer isolated"),
        ("I think that the answer is Lima", "I think that the answer is Lima"),
        # the final full stop, but not that of initials
        ("Lima.", "Lima"), ("3.5.", "3.5"), ("3.5", "3.5"), ("Apple Inc.", "Apple Inc"),
        ("the U.S.", "the U.S."), ("Washington, D.C..", "Washington, D.C."), ("a Ph.D.", "a Ph.D."),
        ("Lima。", "Lima"), ("No.", "No"), ("Lima!", "Lima!"),
        # a box, but not what stands beside one
        ("\\boxed{Lima}", "Lima"), ("$\\boxed{a{b}}$", "a{b}"),
        ("\\boxed{a} {b}", "\\boxed{a} {b}"),
        ("The answer is \\boxed{“Lima”.}.", "Lima"), ("So \\boxed{Lima}", "So \\boxed{Lima}"),
        # brackets may belong to the answer; several lines are one answer
        ("(1, 2)", "(1, 2)"), ("Lima\nOslo.", "Lima\nOslo"), ("Lima.\n\nIt is", "Lima.\n\nIt is"),
        # there is always something left
        ("", ""), (" \n", ""), (".", "."), ('""', '""'), ("The answer is", "The answer is"),
        ("\\boxed{}", "\\boxed{}"),
    ],
)  # fmt: skip
def test_unwrapped(text, answer):
    assert unwrapped(text) == answer


LAYERS = (
    "**{}**", "_{}_", "`{}`", '"{}"', "“{}”", "«{}»", "{}.", "\\boxed{{{}}}", "$\\boxed{{{}}}$",
    "The answer is {}", "Answer: {}", "Therefore, the answer is: {}",
    " {}\n",
)  # fmt: skip


@given(
    st.text(alphabet="Pari 3é,-!\n", min_size=1).filter(str.strip),
    st.lists(st.sampled_from(LAYERS), unique=True, max_size=5),
    st.sampled_from(("{}", "**The answer is** {}", "**Answer**: {}", "**Answer:** {}")),
)
def test_whatever_is_wrapped_around_an_answer_is_unwrapped(answer, layers, lead):
    text = answer.strip()
    for layer in (*layers, lead):
        text = layer.format(text)
    assert unwrapped(text) == answer.strip()
    assert grade(text, [answer], "plain").reward == 1


@given(st.text() | st.text(alphabet="ab .*_\"'“”\\{}$", max_size=12))
def test_unwrapping_ends_and_leaves_something(text):
    once = unwrapped(text)
    assert unwrapped(once) == once and bool(once) == bool(text.strip())
    if once and "think>" not in text:  # an accepted answer said as it stands is right
        s = grade(text, [text], "plain")
        assert s.reward == 1 and s.pred == once


def test_a_long_plain_answer_takes_no_time():
    """No layer is searched for in quadratic time, which would take hours of these."""
    for text in (
        "." * 100_000,
        "a." * 400_000 + " x",
        "the " * 400_000,
        "\\boxed{" + "{a{b}" * 400_000,
    ):
        assert unwrapped(text)


# ---- What a text holds of an answer ----

NAMES = [
    "Lima", "New York City", "Ida Cole", "Montréal", "U.S.A.", "O'Brien", "AT&T", "1,200", "12.5",
    "1994-05-01", "B-52", "3:45 p.m.", "Jean-Luc Picard", "Washington, D.C.", "Chicago (IL)",
    "The Old Mill", "John Q. Public, Jr.", "$40", "7%", "Ph.D.",
]  # fmt: skip
PLACES = [
    "{}", "<update>{}</update>", "<update>He saw {}</update>", "<update>{} is far.</update>",
    r"\boxed{{{}}}", r"so $\boxed{{{}}}$.", r"\boxed{{\text{{{}}}}}", r"is\boxed{{{}}}",
    r"\boxed{{{}, in short}}", r"<update>\boxed{{{}}}</update>",
    "<thinking>?</thinking><update>{}</update>", "<update>{}", "{}</upd",
    "<update>1. Anna: {};Otto: here</update>", "**{}**", "the city:{}",
    '{{"place":"{}","who":"Anna"}}', "| Anna |{}|", "seen ({}),\nthen left", "<b>{}</b>",
    "<update>{}</update><recall>Otto</recall>", "<update>{}.</update>", "`{}`!", "[{}]",
]  # fmt: skip


LONGER = {  # words -> others that have them inside
    "Lima": ["Limassol", "Climax", "Lima2", "Limas", "Lima-Callao", "O'Lima"],
    "12": ["112", "12.5", "1,012", "12,500", "2012", "12:30", "12th", "B-12", "1912-13"],
    "Cole": ["Coleman", "McCole", "Cole's", "Nicole"],
    "update": ["Updated"],
    "Rome": ["Jerome", "Romeo"],
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "around", ["{}", "Anna met Otto, in 1950. {}\nwell-known", "(then); {} Mr."]
)
def test_an_answer_is_seen_whatever_stands_around_it_and_no_longer_word_is_it(place, around):
    shown = [(name, form) for name in NAMES for form in (name, name.lower(), name.upper())]
    hidden = [(name, longer) for name, words in LONGER.items() for longer in words]
    for pairs, seen in ((shown, True), (hidden, False)):
        for answer, words in pairs:
            text = around.format(place.format(words))
            found = count_phrases(phrases([answer]), text), answer_recall([answer], text)
            assert found == (seen, seen), (answer, text)


def test_each_of_several_answers_is_counted_once_and_tags_are_no_words():
    golds = phrases(["Lima", "Rome", "Oslo"])
    assert count_phrases(golds, "<update>Lima</update> in Rome. Lima") == 2
    assert count_phrases(golds, "") == count_phrases([], "Lima") == 0
    tags = phrases(["update", "boxed", "text", "thinking"])
    assert count_phrases(tags, r"<update> \boxed{ \text{ x } } </update><thinking>") == 0
    assert phrases(["the", "yes"]) == []
    # Over a border, as over a full stop
    assert count_phrases(phrases(["Old Lima"]), r"<update>Old</update> Lima") == 1
    assert answer_recall(["Old Lima"], "<update>Lima</update>") == 0.5
    # The question has the word
    assert answer_recall(["Old Lima"], "<update>Lima</update>", r"Is it \boxed{Lima}?") == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["Lima", "the", "Montréal", *NAMES[4:10], "3:45", "J.R.R.", "x"]),
            st.sampled_from(["", ".", ",", ";", "?!", ")"]),
        ),
        max_size=9,
    )
)
def test_text_with_blanks_between_its_words_is_normalised_as_in_the_metrics(words):
    text = " ".join(word + mark for word, mark in words)
    assert separate_words(text) == normalize_answer(text)
    assert separate_words(text.replace(" ", "\n(")) == normalize_answer(text)
