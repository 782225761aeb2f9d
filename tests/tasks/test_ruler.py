"""RULER's thirteen tasks: sizes, needles, answers, and that nothing depends on other items."""

import math
import random
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from config.errors import UserError
from data import Pool, Task, grade
from embedded import tiny
from tasks import ruler
from tasks.readers import read, read_passages
from tasks.ruler import KINDS, NIAH, make_tasks, sentences
from tasks.writers import write_built
from tokens.codec import Codec

SHARED = Path(__file__).parents[3] / "shared" / "data"
real = pytest.mark.skipif(not SHARED.is_dir(), reason=f"the real data is not at {SHARED}")
# Kinds whose evidence stands somewhere
EVIDENT = [kind for kind in KINDS if kind not in ("cwe", "fwe")]


def prose(seed: int, n: int) -> list[str]:
    """n sentences of 5 to 12 of wonderwords' words."""
    rng, words = random.Random(seed), ruler._words()[2]
    return [" ".join(rng.choices(words, k=rng.randint(5, 12))).capitalize() + "." for _ in range(n)]


HAYSTACK = prose(0, 400)
FILLER = Pool(
    [f"Filler {i}" for i in range(2500)], [" ".join(prose(100 + i, 2 + i % 4)) for i in range(2500)]
)


def questions(own: int) -> list[Task]:
    """Make twelve questions with `own` paragraphs, of which one (or two, if there are so many)
    supports; the answer is in the last of these."""
    tasks, titles, texts = [], [], []
    for i in range(12):
        for k in range(own):
            titles.append(f"Own {i}.{k}")
            texts.append(
                f"{' '.join(prose(5000 + 10 * i + k, 2))} It says zyx{i}."
                if k == min(own, 2) - 1
                else HAYSTACK[10 * i + k]
            )
        gold = (0,) if own == 1 else (1, 0) if i % 2 else (0, 1)
        tasks.append(
            Task(
                f"q{i}",
                f"What is said in {i}?",
                (f"zyx{i}.",),
                order=range(own * i, own * i + own),
                gold=gold,
            )
        )
    pool = Pool(titles, texts)
    for task in tasks:
        task.pool = pool
    return tasks


QUESTIONS = {"qa_1": questions(1), "qa_2": questions(6)}


@cache
def codec(name: str) -> Codec:
    if name == "embedded":
        return Codec(tiny.make_tokenizer())
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4000, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(prose(1, 3000), trainer)
    return Codec(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>"))


@cache
def made(kind: str, tokens: int = 4096, n: int = 3, name: str = "bpe", seed: int = 0) -> list[Task]:
    return make_tasks(kind, tokens, n, codec(name), seed, HAYSTACK, QUESTIONS.get(kind, ()), FILLER)


def passages(task: Task) -> list[str]:
    return [task.pool.texts[k] for k in task.order]


def check_length(task: Task, encoder: Codec, least: float = 0.95) -> None:
    room = ruler.ALLOWANCE[task.kind.partition("_")[0]] + 100
    used = len(encoder.encode(task.document)) + len(encoder.encode(task.question)) + room
    assert least * task.tokens <= used <= task.tokens, (task.id, used)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["embedded", "bpe"])
def test_the_length_is_held_and_used(kind, name):
    for task in made(kind, 4096, 3, name):
        check_length(task, codec(name))
        assert (task.kind, task.dataset, task.tokens) == (kind, "ruler", 4096)
    check_length(*made(kind, 1500, 1, name), codec(name), 0.7)


# Every way a document is made
@pytest.mark.parametrize("kind", ["niah_single_2", "niah_multikey_3", "vt", "cwe", "fwe", "qa_2"])
def test_the_length_is_held_and_used_at_131072_tokens(kind):
    (task,) = made(kind, 131072, 1)
    check_length(task, codec("bpe"), 0.99)


@pytest.mark.parametrize("kind", EVIDENT)
def test_gold_passages_hold_the_answers_and_nothing_else_does(kind):
    for task in made(kind):
        texts, gold = passages(task), {*task.gold}
        assert len(texts) > 20 or kind.startswith("qa")
        for answer in task.answers:
            assert answer not in task.question
            holders = {k for k, text in enumerate(texts) if answer.lower() in text.lower()}
            assert holders and holders <= gold
        if kind in NIAH:
            assert [task.answers[i] in texts[k] for i, k in enumerate(task.gold)] == [True] * len(
                task.answers
            )


@pytest.mark.parametrize("kind", KINDS)
def test_the_right_answers_are_right_and_others_are_worth_nothing(kind):
    def scored(task: Task, said: list[str]) -> float:
        return grade(
            "\\boxed{" + ", ".join(said) + "}", task.answers, "boxed", task.asks_for_all
        ).sub_em

    tasks = made(kind)
    for task, other in zip(tasks, tasks[1:] + tasks[:1], strict=True):
        qa = kind.startswith("qa")
        assert task.asks_for_all == (not qa)
        assert scored(task, list(task.answers[-1:] if qa else task.answers)) == 1
        assert scored(task, list(reversed(task.answers))) == 1
        assert scored(task, []) == scored(task, ["I do not know"]) == 0
        if kind not in ("cwe", "fwe"):  # whose ten words may come again
            assert scored(task, list(other.answers)) == 0
        wrong = {text for k, text in enumerate(passages(task)) if k not in task.gold} - {
            *task.answers
        }
        assert scored(task, sorted(wrong)) == 0  # everything else that stands in the document
        if not qa and len(task.answers) > 1:
            assert scored(task, list(task.answers[:1])) == pytest.approx(1 / len(task.answers))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_file_and_comes_back(kind, tmp_path):
    for name in "ab":
        tasks = make_tasks(
            kind, 2000, 3, codec("bpe"), 5, HAYSTACK, QUESTIONS.get(kind, ()), FILLER
        )
        write_built(tmp_path / f"{name}.jsonl", tasks, seed=5)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    back = read(tmp_path / "a.jsonl")
    assert back == tasks and [task.tokens for task in back] == [2000] * 3
    assert [task.document for task in back] == [task.document for task in tasks]
    assert len({id(task.pool) for task in tasks}) == 1
    pool, used = tasks[0].pool, {k for task in tasks for k in task.order}
    assert used == {*range(len(pool.texts))} and len(
        {*zip(pool.titles or pool.texts, pool.texts, strict=True)}
    ) == len(used)
    others = make_tasks(kind, 2000, 3, codec("bpe"), 6, HAYSTACK, QUESTIONS.get(kind, ()), FILLER)
    assert all(a.document != b.document for a, b in zip(tasks, others, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_items_do_not_depend_on_n_and_questions_not_on_the_length(kind):
    few, many, longer = made(kind, 2000, 2), made(kind, 2000, 5), made(kind, 5000, 5)
    for a, b in zip(few, many, strict=False):
        expected = (b.id, b.question, b.answers, b.document, b.gold)
        assert (a.id, a.question, a.answers, a.document, a.gold) == expected
    for a, b in zip(many, longer, strict=True):
        assert (a.id, a.question, a.answers) == (b.id, b.question, b.answers) and len(
            a.document
        ) < len(b.document)
    assert len({task.id for task in many}) == len({task.answers for task in many}) == 5
    if kind in EVIDENT:
        shares = [[round(depth, 1) for depth in task.depths] for task in (*many, *longer)]
        assert shares[:5] != shares[5:]  # drawn again


@pytest.mark.parametrize("kind", NIAH)
def test_needles(kind):
    setting = NIAH[kind]
    shape = {
        "word": "[a-z]+-[a-z]+",
        "number": "[1-9][0-9]{6}",
        "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    }
    needle = re.compile(
        ruler.NEEDLE.format(key="(?P<k>\\S+)", type=setting.value, value="(?P<v>\\S+)")
    )
    for task in made(kind):
        bound = [(m["k"], m["v"]) for text in passages(task) if (m := needle.fullmatch(text))]
        keys, values = Counter(key for key, _ in bound), [value for _, value in bound]
        assert len({*values}) == len(values) and {*keys.values()} == {setting.values}
        assert all(re.fullmatch(shape[setting.key], key) for key in keys)
        assert all(re.fullmatch(shape[setting.value], value) for value in values)
        if setting.haystack == "needles":
            assert len(bound) == len(task.order)
        else:
            assert len(keys) == setting.keys
        asked = [key for key in keys if key in task.question]
        assert (
            len(asked) == setting.queries and len(task.answers) == setting.queries * setting.values
        )
        assert {*task.answers} == {value for key, value in bound if key in asked}
        if setting.haystack == "essay":
            rest = [text for text in passages(task) if not needle.fullmatch(text)]
            assert rest == [HAYSTACK[k % len(HAYSTACK)] for k in range(len(rest))]
    if setting.queries > 1:  # answers in the order of the question
        assert task.answers == tuple(
            dict(bound)[key] for key in sorted(asked, key=task.question.index)
        )


def test_questions_say_how_many_answers_there_are_only_where_the_originals_do():
    """NVIDIA asks for all values, all variables, and for the 10 and the three most common words."""
    numbers = re.compile(r"\b(\d+|one|two|three|four|five|ten)\b", re.IGNORECASE)
    said = {}
    for kind in (*NIAH, "vt", "cwe", "fwe"):
        for task in made(kind):
            words = (
                task.question.partition("keep for ")[0]
                if kind in NIAH
                else re.sub(r"\d{5}", "", task.question)
            )
            said.setdefault(kind, set()).update(
                numbers.findall(words + task.question.partition("?")[2])
            )
            assert ("all of them" in task.question) == (
                kind in ("niah_multivalue", "niah_multiquery", "vt")
            )
    assert said == {kind: set() for kind in said} | {"cwe": {"10"}, "fwe": {"3"}}


def test_needles_of_each_task():
    asked = {kind: len(made(kind)[0].answers) for kind in KINDS}
    assert asked == dict.fromkeys(KINDS, 1) | {
        "niah_multivalue": 4,
        "niah_multiquery": 4,
        "vt": 5,
        "cwe": 10,
        "fwe": 3,
    }
    placed = {
        kind: sum(text not in HAYSTACK for text in passages(made(kind)[0]))
        for kind in NIAH
        if NIAH[kind].haystack == "essay"
    }
    assert [*placed.values()] == [1, 1, 4, 4, 4]


def test_a_short_haystack_begins_again_and_what_it_holds_is_no_answer(monkeypatch):
    (task,) = make_tasks(
        "niah_single_2", 3000, 1, codec("bpe"), haystack=["One  two\nthree.", "Four 1234567 five."]
    )
    rest = [text for k, text in enumerate(passages(task)) if k not in task.gold]
    assert (
        rest[:3] == ["One two three.", "Four 1234567 five.", "One two three."]
        and len(task.pool.texts) == 3
    )
    drawn = {"number": iter(["1234567", "7654321"]), "word": iter(["two-three", "four-five"])}
    for what, values in drawn.items():
        monkeypatch.setitem(ruler.DRAW, what, lambda rng, values=values: next(values))
    (task,) = make_tasks(
        "niah_single_2", 3000, 1, codec("bpe"), haystack=["One two-three.", "Four 1234567 five."]
    )
    assert task.answers == ("7654321",) and "four-five" in task.question


def test_a_distractor_that_has_an_items_own_key_or_value_is_left_out(monkeypatch):
    # Of few there are many alike
    monkeypatch.setitem(ruler.DRAW, "number", lambda rng: str(rng.randint(1000000, 1000400)))
    monkeypatch.setitem(ruler.DRAW, "word", lambda rng: f"k-{rng.randint(0, 400)}")
    for task in make_tasks("niah_multikey_2", 2500, 20, codec("bpe")):
        words = " ".join(passages(task)).split()
        key = task.question.split("keep for ")[1].split("?")[0]
        assert words.count(key) == words.count(task.answers[0] + ".") == 1


def test_depths_lie_on_the_grid_and_all_over_it():
    for kind, n in (
        ("niah_single_1", 80),
        ("niah_multikey_2", 80),
        ("vt", 20),
        ("niah_multivalue", 20),
    ):
        seen = Counter()
        for task in made(kind, 2500, n):
            haystack = len(task.order) - len(task.gold)
            for before, k in enumerate(sorted(task.gold)):
                depths = [depth for depth in range(40) if haystack * depth // 39 == k - before]
                assert depths
                seen[depths[0]] += 1
        assert (
            min(seen) <= 2
            and max(seen) >= 36
            and len(seen) > 20
            and seen.most_common(1)[0][1] < 0.2 * seen.total()
        )


def test_fit_comes_near_the_limit_whatever_the_pieces():
    rng = random.Random(0)
    for _ in range(500):
        piece, more, n = rng.randint(1, 400), rng.uniform(-0.02, 0.02), rng.randint(30, 300)
        limit = piece * n - rng.randint(1, 3)  # the next piece would be just too long
        if limit > 300:
            item = ruler.Item(
                Task("x", "", ()),
                lambda size, p=piece, m=more: ([int(size * (1 + m)) // p * p], ()),
                100,
            )
            pieces, _, used = ruler._fit(item, lambda pieces: pieces[0], limit)
            assert [used] == pieces and limit - limit / 100 - 2 * piece <= used <= limit


def test_vt_is_one_chain_in_reading_order():
    for task in made("vt", 4096, 5):
        value = re.search(r"\d{5}", task.question)[0]
        held, names, places = {value: value}, [], []
        for place, text in enumerate(passages(task)):
            if text != ruler.FILLER:
                name, source = re.fullmatch(
                    r"Now ([A-Z]{5}) is given (?:the value (\d+)|what ([A-Z]{5}) has)\.", text
                ).group(1, 2)
                source = source or text.split()[5]
                # Each from the one before, the first from the value
                assert source == (names[-1] if names else value)
                held[name] = held[source]
                names.append(name)
                places.append(place)
        assert (
            tuple(names) == task.answers
            and tuple(places) == task.gold
            and len({*names}) == 5
            and {*held.values()} == {value}
        )


def test_cwe_counts():
    single = {*ruler._words()[2]}
    for tokens, repeats in ((8192, (30, 3)), (4000, (6, 1))):
        for task in made("cwe", tokens, 2):
            said = re.findall(r"(\d+)\. (\S+)", task.document)
            assert [int(number) for number, _ in said] == [*range(1, len(said) + 1)]
            counts = Counter(word for _, word in said)
            assert {word for word, n in counts.most_common(10)} == {*task.answers}
            assert {n for word, n in counts.items() if word in task.answers} == {repeats[0]}
            assert {n for word, n in counts.items() if word not in task.answers} == {repeats[1]}
            assert {*counts} <= single and not any(
                a in word for word in counts for a in task.answers if a != word
            )
    # 300 entries do not fit in
    assert Counter(passages(made("cwe", 4096, 3, "embedded")[0])).most_common(1)[0][1] == 6
    for number in range(100):
        answers = ruler._cwe(ruler.ItemKey("cwe", 0, number, 4096))[0].task.answers
        assert (
            not any(a in b for a in answers for b in answers if a != b)
            and min(map(len, answers)) > 3
        )
    item, _ = ruler._cwe(ruler.ItemKey("cwe", 0, 0, 4096))
    counts = Counter(item.build(9000)[0])  # more than there are single words
    pairs, answers = {*counts} - single, item.task.answers
    assert (
        len(counts) == 9010
        and {*counts.values()} == {30, 3}
        and {word for word, _ in counts.most_common(10)} == {*answers}
    )
    assert len(pairs) > 900 and all({*word.split("-")} <= single for word in pairs)
    assert not any(answer in word for word in counts for answer in answers if answer != word)


@pytest.mark.parametrize(("tokens", "n"), [(700, 5), (4096, 5), (131072, 1)])
def test_fwe_counts(tokens, n):
    for task in made("fwe", tokens, n):
        counts = Counter(task.document.split())
        noise, *ranks = counts.most_common()
        assert noise[0] == "..." and tuple(word for word, _ in ranks[:3]) == task.answers
        assert noise[1] > ranks[0][1] > ranks[1][1] > ranks[2][1] > ranks[3][1] >= 1
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranks)
        assert noise[1] / ranks[0][1] == pytest.approx(4, abs=0.5) and noise[1] / ranks[1][
            1
        ] == pytest.approx(9, abs=2)


def test_fwe_ranks_never_tie():
    (item,) = ruler._fwe(ruler.ItemKey("fwe", 0, 0, 4096))
    for size in (*range(item.least, 400), *range(400, 3000, 37)):
        counts = sorted(Counter(item.build(size)[0]).values(), reverse=True)
        assert counts == [
            n for rank in range(1, 82) if (n := int(size / rank**2 / (math.pi**2 / 6)))
        ]
        assert counts[1] > counts[2] > counts[3] > counts[4]


@pytest.mark.parametrize("kind", ["qa_1", "qa_2"])
def test_qa_documents(kind):
    by_id = {task.id: task for task in QUESTIONS[kind]}
    for task in made(kind, 4096, 8):
        source = by_id[task.id]
        own = [source.pool.titles[k] for k in source.order]
        titles = [task.pool.titles[k] for k in task.order]
        assert [titles[k] for k in task.gold] == [own[k] for k in source.gold] and len(
            {*titles}
        ) == len(titles)
        assert {*own} <= {*titles}  # all fit in here
        assert (task.question, task.answers) == (source.question, source.answers)
        assert "Document 1:\n" in task.document and task.n_documents == len(titles)
    assert len({task.gold for task in made(kind, 4096, 8)}) > 3
    ids = [[task.id for task in made(kind, 4096, 8, "bpe", seed)] for seed in (0, 1)]
    assert ids[0] != ids[1] and all(chosen != [*by_id][:8] for chosen in ids)


def test_qa_has_no_second_version_of_a_questions_paragraph():
    own = QUESTIONS["qa_2"][0].pool
    twins = [(title.upper(), "Other words.") for title in own.titles] + [
        (f"Copy {k}", text) for k, text in enumerate(own.texts)
    ]
    extra = Pool(
        [title for title, _ in twins] + FILLER.titles[:50],
        [text for _, text in twins] + FILLER.texts[:50],
    )
    for task in make_tasks(
        "qa_2", 5000, 12, codec("bpe"), 0, questions=QUESTIONS["qa_2"], extra=extra
    ):
        first = 6 * int(task.id[1:])
        titles, texts = own.titles[first : first + 6], own.texts[first : first + 6]
        document = [(task.pool.titles[k], task.pool.texts[k]) for k in task.order]
        akin = [
            (title, text) for title, text in document if title.title() in titles or text in texts
        ]
        assert sorted(akin) == sorted(zip(titles, texts, strict=True)) and len(document) > 50


def test_no_profanity_and_no_odd_words():
    from wonderwords import is_profanity

    adjectives, nouns, words = ruler._words()
    assert len(adjectives) > 850 and len(nouns) > 6500 and len(words) > 7800
    assert all(re.fullmatch("[a-z]+", word) for word in words) and not any(map(is_profanity, words))


def test_sentences():
    text = (
        'It rains.  He said "Stop!" Then\n(quietly) he left. 7 came? "Yes." '
        "It cost 3.5 francs. the end"
    )
    assert sentences([text, "", " One.\n"]) == [
        "It rains.",
        'He said "Stop!"',
        "Then (quietly) he left.",
        "7 came?",
        '"Yes."',
        "It cost 3.5 francs. the end",
        "One.",
    ]


def test_settings_that_cannot_be_built_are_refused():
    make, c = make_tasks, codec("bpe")
    with pytest.raises(UserError, match="'niah' is no task of RULER; these are: niah_single_1"):
        make("niah", 4096, 1, c)
    with pytest.raises(UserError, match="must be 1 or more, not 0"):
        make("vt", 4096, 0, c)
    for kind in ("niah_single_2", "niah_multiquery"):
        with pytest.raises(UserError, match=f"{kind} needs the sentences of a haystack"):
            make(kind, 4096, 1, c, haystack=["", " "])
    for kind in KINDS:
        with pytest.raises(
            UserError, match=r"150 tokens are too few for .*: its smallest document has more than"
        ):
            make(kind, 150, 1, c, 0, HAYSTACK, QUESTIONS.get(kind, ()), FILLER)
    for bad in ([], [Task("x", "Q?", ("A",), text="C")], made("vt")):
        with pytest.raises(UserError, match="need questions with paragraphs"):
            make("qa_2", 4096, 1, c, questions=bad)
    with pytest.raises(UserError, match="13 questions are wanted and there are 12"):
        make("qa_1", 4096, 13, c, questions=QUESTIONS["qa_1"])
    with pytest.raises(
        UserError, match=r"q\d+: all 12 passages have \d+ tokens and \d+ are wanted; give more"
    ):
        make("qa_1", 9000, 1, c, questions=QUESTIONS["qa_1"])


def test_other_paragraphs_of_a_squad_article_come_first():
    pool = Pool(
        ["Bees"] * 4 + [f"Other {k}" for k in range(400)],
        [f"Bees, part {k}." for k in range(4)] + [f"Text {k}." for k in range(400)],
    )
    source = [
        Task("s", "Which part?", ("part 0",), pool=pool, order=(0,), gold=(0,), dataset="squad")
    ]
    (task,) = make_tasks("qa_1", 1024, 1, codec("embedded"), questions=source, extra=pool)
    titles = [task.pool.titles[k] for k in task.order]
    assert (
        titles.count("Bees") == 4
        and len(titles) < 200
        and task.evidence == "Document 1:\nBees\nBees, part 0."
    )
    (task,) = make_tasks(
        "qa_1",
        1024,
        1,
        codec("embedded"),
        questions=[replace(source[0], dataset="hotpotqa")],
        extra=pool,
    )
    assert [task.pool.titles[k] for k in task.order].count("Bees") == 1


# ---- the real data beside the checkout ----


@real
@pytest.mark.parametrize("tokens", [4096, 131072])
@pytest.mark.parametrize(
    "kind, file", [("qa_1", "xquad_en.json.gz"), ("qa_2", "hotpotqa_dev.jsonl.gz")]
)
def test_real_questions(kind, file, tokens, tmp_path):
    source, extra = read(SHARED / file), read_passages(SHARED / "passages_extra.jsonl.gz")
    tasks = make_tasks(
        kind, tokens, 6 if tokens < 9999 else 1, codec("bpe"), 0, questions=source, extra=extra
    )
    by_id = {task.id: task for task in source}
    for task in tasks:
        check_length(task, codec("bpe"))
        own = by_id[task.id]
        assert [passages(task)[k] for k in task.gold] == [
            own.pool.texts[own.order[k]] for k in own.gold
        ]
        titles = [task.pool.titles[k].casefold() for k in task.order]
        article = {own.pool.titles[k].casefold() for k in own.order}
        assert (
            sum(title in article for title in titles) > 1
            if kind == "qa_1"
            else all(titles.count(titles[k]) == 1 for k in task.gold)
        )
        assert (
            any(answer in passages(task)[k] for answer in task.answers for k in task.gold)
            or kind == "qa_2"
        )
    write_built(tmp_path / "set.jsonl.gz", tasks)
    assert read(tmp_path / "set.jsonl.gz") == tasks


@real
def test_real_haystack():
    haystack = sentences(read_passages(SHARED / "passages_extra.jsonl.gz").texts)
    assert len(haystack) > 40_000
    for name in ("embedded", "bpe"):
        for task in make_tasks("niah_multiquery", 16384, 2, codec(name), haystack=haystack):
            check_length(task, codec(name))
