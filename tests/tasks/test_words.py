"""Every kind of question that we make ourselves has words."""

from suites import ledger, ruler
from tasks import words, worlds


def test_every_kind_that_is_generated_has_words_of_its_own():
    kinds = (*worlds.KINDS, *ruler.KINDS, ledger.KIND)
    said = [words.in_words(kind) for kind in kinds]
    assert len({*said}) == len(kinds) and {*kinds} == {*words.KINDS}
    for kind, text in zip(kinds, said, strict=True):
        assert text.startswith("questions ") and kind not in text
        assert words.title_of(kind) == "Q" + text[1:]


def test_a_kind_of_a_file_keeps_its_name():
    kind = "bridge, evidence reverse 0.5"
    assert words.in_words(kind) == f"questions '{kind}'" and words.title_of(kind) == kind
    assert (
        words.in_words("one_fact, test articles") == "questions that need one fact, test articles"
    )
    assert words.title_of("questions, my.json") == "questions, my.json"
