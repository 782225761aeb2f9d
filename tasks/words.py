"""What is asked and how it is measured, in words for people who do not know the names."""

from __future__ import annotations

# kind of question -> what follows the word "questions"
KINDS = {
    "one_fact": "that need one fact",
    "two_hop": "that need two connected facts",
    "two_hop_reverse": "that need two connected facts, told in reverse order",
    "changed": "of which the later of two facts holds",
    "ledger": "about where somebody is now",
    "niah_single_1": "for one number hidden in filler",
    "niah_single_2": "for one number hidden in essays",
    "niah_single_3": "for one long code hidden in essays",
    "niah_multikey_1": "for one of four numbers hidden in essays",
    "niah_multikey_2": "for one number among nothing but others",
    "niah_multikey_3": "for one long code among nothing but others",
    "niah_multivalue": "for four numbers of one key",
    "niah_multiquery": "for the numbers of four keys",
    "vt": "for all names to which one number is passed on",
    "cwe": "for the ten most frequent words of a list",
    "fwe": "for the three most frequent coded words",
    "qa_1": "in SQuAD's form among other paragraphs",
    "qa_2": "in HotpotQA's form among other paragraphs",
}
# metric -> what its mean over questions is
METRICS = {
    "sub_em": "share of right answers",
    "em": "share of exact answers",
    "reward": "mean reward",
    "f1": "mean overlap of words (F1)",
}


def in_words(kind: str) -> str:
    """Return what a kind of questions is in the middle of a sentence.

    >>> in_words("one_fact"), in_words("hotpotqa"), in_words("4 single-hop, F1")
    ('questions that need one fact', 'hotpotqa questions', "questions '4 single-hop, F1'")
    """
    name, comma, more = kind.partition(",")
    if name in KINDS:
        return f"questions {KINDS[name]}{comma}{more}"
    if name == "questions":
        return kind
    return f"questions '{kind}'" if comma else f"{kind} questions"


def title_of(kind: str) -> str:
    """Return a heading for a kind of questions: its own name where there are no words for it.

    >>> title_of("one_fact"), title_of("hotpotqa")
    ('Questions that need one fact', 'hotpotqa')
    """
    known = kind.partition(",")[0] in KINDS
    return in_words(kind).replace("questions", "Questions", 1) if known else kind
