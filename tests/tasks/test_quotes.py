"""Where an answer stands: its places, numbers as numbers, and the sentence that is quoted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.documents import Document, Part
from tasks.quotes import LONGEST, places


def pages(*texts: str) -> Document:
    parts, at = [], 0
    for number, text in enumerate(texts, 1):
        parts.append(Part(at, "a.pdf", "page", number))
        at += len(text) + 2
    return Document("\n\n".join(texts), tuple(parts), "a.pdf")


def test_an_answer_stands_where_its_words_do():
    document = pages("Anna left for the Old Bridge.", "Boris met Ida.", "An old\nbridge, he said.")
    ranges = document.find("the old bridge")
    assert document.where(ranges) == "pages 1, 3"
    assert [document.text[a:b].split() for a, b in ranges] == [["Old", "Bridge"], ["old", "bridge"]]
    for other in ("Ida was met by Boris", "Karin in Kyoto", "Boris left"):
        assert document.find(other) == []
    for nothing in ("Yes.", "the", "...", "", "No", "None", "Unknown.", "Not mentioned"):
        assert document.find(nothing) is None
    many = pages(*["Lima.", "Rome."] * 12)
    assert many.where(many.find("Lima")) == "pages 1, 3, 5, 7, 9, 11, 13, 15 and 4 more"


@given(
    st.lists(st.sampled_from("anna left the old bridge for lima".split()), min_size=3), st.data()
)
def test_every_place_of_a_phrase_is_found(words, data):
    """As a few obvious lines find it: articles aside, from one place to what follows it."""
    start = data.draw(st.integers(0, len(words) - 1))
    answer = words[start : start + data.draw(st.integers(1, 3))]
    document = pages(" ".join(words))
    wanted = " ".join(f"<{word}>" for word in answer if word != "the")
    plain = " ".join(f"<{word}>" for word in words if word != "the")
    found = document.find(" ".join(answer))
    assert (len(found) if found is not None else None) == (plain.count(wanted) if wanted else None)
    for a, b in found or ():
        inside = [w for w in document.text[a:b].split() if w != "the"]
        assert inside == [w for w in answer if w != "the"]


@pytest.mark.parametrize(("text", "answer"), [
    ("昨天张三去了北京。", "张三"), ("張\n三は東京へ", "張三"), ("어제 서울에서 만났다", "서울"), ("in Zu\u0308rich", "Zürich"),
    ("in Zürich", "Zu\u0308rich"),
    ("die ﬁnale Fassung, １２ Seiten", "finale Fassung 12"),
    ("Karin Lin-\ndström kam", "Karin Lindström"), ("Karin Lin\u00ad\ndström kam", "Lindström"),
    ("Karin Lin-\n\ndström kam", "Lindström"), ("a well-\nknown man", "well-known"),
    ("ลงนามโดยอันนา", "อันนา"), ("von Lindt¹ unterzeichnet", "Lindt"), ("Jean-\nLuc came", "Luc"),
])  # fmt: skip
def test_an_answer_is_found_however_its_words_are_written(text, answer):
    document = pages("Nothing – né – here.", text, "Nor here.")
    ranges = document.find(answer)
    assert document.where(ranges) == "page 2"
    ((start, end),) = ranges
    assert end - start < len(answer) + 5


def test_words_within_words_are_no_place():
    document = pages("A party of 12 in the 1990s.", "1 2 and 3-\n5 men")
    for answer in ("art", "35", "199"):
        assert document.find(answer) == []
    assert document.where(document.find("12")) == "page 1"
    both = pages("Lindström", "Lind-\nström")
    assert both.where(both.find("Lindström")) == "pages 1-2"


NUMBERS = {  # answer -> where it stands, and where it does not
    "105": (
        "105 | 105% | 105 % | $105 | CHF 105 | CHF105 | 105kg | (105) | 105, | 105. | １０５ | ١٠٥ | "
        "104-105 | 105/2024 | 105th",
        "1050 | 10^5 | 10⁵ | 105.7 | 105,7 | 1,050 | 1'050 | 0.105 | .105 | -105 | −105 | x105 | "
        "105² | m^105 | 105½ | 2105 | 10 5",
    ),
    "1,200": ("1,200 | 1,200 men", "200 | 12,00 | 1,200.5 | 11,200 | 1,200,000 | 1.2"),
    "200": ("200 | in 2019 200 men", "1,200 | 200,000 | 1'200 | 1\u202f200"),
    "2.5": ("2.5 | (2.5)", "2.5.1 | 2,500 | 12.5 | 25"),
    "1.2.3": ("v1.2.3 | 1.2.3", "1.2.4"),
    "5": ("5 | 5. | No. 5 | 5, 6", "5.5 | 2,005 | 10^5 | m² 0,5 | ½"),
    "10^5": ("10^5 | 10⁵ | $10^{5}$", "105 | 10 5 | 10^50"),
    "-5": ("-5 | at −5 degrees", "5 | 10-5 | 1-5"),
    "3 May 2024": ("on 3 May 2024", "on 3 May 2025 | on 13 May 2024"),
}  # fmt: skip


@pytest.mark.parametrize("answer", NUMBERS)
def test_a_number_is_found_as_that_number_alone(answer):
    there, not_there = ([*map(str.strip, texts.split("|"))] for texts in NUMBERS[answer])
    assert [text for text in there if not places(f"There: {text}", answer)] == []
    assert [text for text in not_there if places(f"There: {text} or so", answer)] == []


SIGNED = "Who signed the contract?"
QUOTES = [  # text, answer, question, what is said of it
    ("Anna Lindt ate. The contract was signed by\nAnna Lindt in Bern. He left.",
     "Anna Lindt", SIGNED,
     "Found in the text: 'The contract was signed by Anna Lindt in Bern.', and in 1 more place"),
    ("The contract lies here. Anna Lindt had lunch.", "Anna Lindt", SIGNED,
     "Found in the text, in a sentence that shares no word with the question: "
     "'Anna Lindt had lunch.'"),
    ("Dr. Lindt signed No. 5 at 3.5 m on the 5. Mai. He left.", "Lindt", SIGNED,
     "Found in the text: 'Dr. Lindt signed No. 5 at 3.5 m on the 5. Mai.'"),
    ("他走了。林安娜于五月签署了合同！然后", "林安娜", "谁签署了合同？",
     "Found in the text: '林安娜于五月签署了合同！'"),
    ("Name | Sum\nLima | 300\nRome | 400", "300", "What is the sum of Lima?",
     "Found in the text: 'Lima | 300'"),
    ("Lima 300\nRome 400\nOslo 500", "400", "What about Rome?", "Found in the text: 'Rome 400'"),
    ("Heading\n\nIt was\nin Lima. No", "Lima", "Where?", "Found in the text: 'It was in Lima.'"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "answer", "question", "said"), QUOTES)
def test_the_sentence_is_quoted(text, answer, question, said):
    document = Document(text, (Part(0, "a.txt", "file"),), "a.txt")
    stands, words = document.stands(answer, question)
    assert words == said and stands["found"]
    assert stands["quote"] in said and stands["where"] == "" and stands["pages"] == []


def test_sentences_go_on_over_pages_and_pages_are_named():
    document = pages(
        "Anna Lindt ate.", "It is certain that the contract with the town was signed by Anna",
        "Lindt in Bern. The", "Anna Lindt.", "Kyoto",
    )  # fmt: skip
    stands, words = document.stands("Anna Lindt", SIGNED)
    assert stands["pages"] == [2, 3, 1, 4]  # those of the quote first
    assert words == (
        "Found on pages 2-3: 'It is certain that the contract with the town was signed by Anna "
        "Lindt in Bern.', and in 2 more places: pages 1, 4"
    )
    assert document.stands("Kyoto", SIGNED)[0]["where"] == "page 5"
    bern = pages("It is certain that the contract of the town was signed by", "Anna Lindt in Bern.")
    assert bern.stands("Bern", SIGNED)[0]["quote"].startswith("It is certain that the contract")
    nowhere = {"found": False, "pages": [], "quote": "", "where": ""}
    assert document.stands("105 years", SIGNED) == (nowhere, "")
    assert document.stands("unknown", SIGNED) == (nowhere | {"found": None}, "")


def test_a_quote_is_short():
    document = pages("word " * 400 + "Lima" + " word" * 400)
    quote = document.stands("Lima", "Where?")[0]["quote"]
    assert len(quote) <= LONGEST + 4 and "word Lima word" in quote and "  " not in quote
    assert quote.startswith("… word") and quote.endswith("word …")
    whole = document.stands("word " * 400 + "Lima", "Where?")[0]["quote"]
    assert len(whole) <= LONGEST + 4 and whole.endswith("word …")
