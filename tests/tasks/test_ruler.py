"""RULER's thirteen tasks: sizes, needles, answers, and that nothing depends on other items."""

import random
import re
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from test_readers import SHARED, real
from wonderwords import is_profanity

from config.errors import UserError
from data import Pool, Task, grade
from embedded import tiny
from suites import ruler
from suites.ruler import KINDS, NIAH, make_tasks, sentences
from tasks.readers import read, read_passages
from tasks.writers import write_built
from tokens.codec import Characters, Codec

EVIDENT = [kind for kind in KINDS if kind not in ("cwe", "fwe")]  # evidence stands somewhere


def prose(seed: int, n: int) -> list[str]:
    """n sentences of 5 to 12 of wonderwords' words."""
    rng, words = random.Random(seed), ruler._words()[2]
    return [" ".join(rng.choices(words, k=rng.randint(5, 12))).capitalize() + "." for _ in range(n)]


HAYSTACK = prose(0, 400)
FILLER = Pool(
    [f"Filler {i}" for i in range(800)], [" ".join(prose(100 + i, 2 + i % 4)) for i in range(800)]
)


def questions(own: int) -> list[Task]:
    """Make twelve questions with `own` paragraphs, of which one (or two, if there are so many)
    supports; the answer is in the last of these."""
    pool = Pool([f"Own {i}.{k}" for i in range(12) for k in range(own)], [])
    tasks = []
    for i in range(12):
        texts = HAYSTACK[10 * i : 10 * i + own]
        texts[min(own, 2) - 1] = f"{' '.join(prose(5000 + i, 2))} It says zyx{i}."
        order, gold = range(own * i, own * i + own), (0,) if own == 1 else (i % 2, 1 - i % 2)
        asked = f"What is said in {i}?", (f"zyx{i}.",)
        tasks.append(Task(f"q{i}", *asked, pool=pool, order=order, gold=gold))
        pool.texts += texts
    return tasks


QUESTIONS = {"qa_1": questions(1), "qa_2": questions(6)}


@cache
def codec(name: str) -> Codec:
    if name == "embedded":
        return Codec(tiny.make_tokenizer())
    if name == "characters":
        return Characters()
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(prose(1, 600), trainer)
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
    if kind in ("niah_single_2", "niah_multikey_3", "vt", "cwe", "fwe", "qa_2") and name == "bpe":
        check_length(*made(kind, 32768, 1), codec("bpe"), 0.99)


@pytest.mark.parametrize("kind", KINDS)
def test_the_right_answers_stand_in_the_evidence_and_nothing_else_is_worth_anything(kind):
    def scored(task: Task, said: list[str]) -> float:
        return grade(f"\\boxed{{{', '.join(said)}}}", task.answers, "boxed", not qa).sub_em

    qa, tasks = kind.startswith("qa"), made(kind)
    for task, other in zip(tasks, tasks[1:] + tasks[:1], strict=True):
        texts, gold = passages(task), {*task.gold}
        assert task.asks_for_all == (not qa) and (len(texts) > 20 or qa)
        assert scored(task, list(task.answers[-1:] if qa else task.answers)) == 1
        assert scored(task, []) == scored(task, ["I do not know"]) == 0
        if kind in EVIDENT:  # the ten words of the others may come again
            assert scored(task, list(other.answers)) == 0
            for answer in task.answers:
                holders = {k for k, text in enumerate(texts) if answer.lower() in text.lower()}
                assert answer not in task.question and holders and holders <= gold
        if kind in NIAH:
            pairs = zip(task.answers, task.gold, strict=True)
            assert all(answer in texts[k] for answer, k in pairs)
        wrong = {text for k, text in enumerate(texts) if k not in gold}
        assert scored(task, sorted(wrong - {*task.answers})) == 0  # all else of the document


@pytest.mark.parametrize("kind", KINDS)
def test_an_item_is_decided_by_its_seed_and_comes_back(kind, tmp_path):
    def anew(seed: int, n: int = 3, tokens: int = 2000) -> list[Task]:
        given = HAYSTACK, QUESTIONS.get(kind, ()), FILLER
        return make_tasks(kind, tokens, n, codec("characters"), seed, *given)

    def same(a: Task, b: Task, *names: str) -> bool:
        return all(getattr(a, name) == getattr(b, name) for name in names)

    tasks, longer, other = anew(5), anew(5, 5, 4000), anew(6)
    assert anew(5) == tasks
    write_built(tmp_path / "a.jsonl", tasks, seed=5)
    back = read(tmp_path / "a.jsonl")
    assert back == tasks and [task.tokens for task in back] == [2000] * 3
    assert [task.document for task in back] == [task.document for task in tasks]
    pool, used = tasks[0].pool, {k for task in tasks for k in task.order}
    assert all(task.pool is pool for task in tasks) and used == {*range(len(pool.texts))}
    assert all(a.document != b.document for a, b in zip(tasks, other, strict=True))
    for a, b, c in zip(tasks, anew(5, 5), longer, strict=False):
        assert same(a, b, "id", "question", "answers", "document", "gold")
        assert same(a, c, "id", "question", "answers") and len(a.document) < len(c.document)
    assert len({task.id for task in longer}) == len({task.answers for task in longer}) == 5
    if kind in EVIDENT:  # places are drawn again
        places = [[k / len(t.order) for k in t.gold] for t in (*tasks, *longer[:3])]
        assert places[:3] != places[3:]


@pytest.mark.parametrize("kind", NIAH)
def test_needles(kind):
    setting = NIAH[kind]
    shape = {
        "word": "[a-z]+-[a-z]+",
        "number": "[1-9][0-9]{6}",
        "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    }
    form = ruler.NEEDLE.format(key="(?P<k>\\S+)", type=setting.value, value="(?P<v>\\S+)")
    for task in made(kind):
        found = [re.fullmatch(form, text) for text in passages(task)]
        bound = [(m["k"], m["v"]) for m in found if m]
        keys, values = Counter(key for key, _ in bound), [value for _, value in bound]
        assert len({*values}) == len(values) and {*keys.values()} == {setting.values}
        assert all(re.fullmatch(shape[setting.key], key) for key in keys)
        assert all(re.fullmatch(shape[setting.value], value) for value in values)
        asked = sorted((k for k in keys if k in task.question), key=task.question.index)
        assert len(asked) == setting.queries
        # answers in the order of the question
        assert [*task.answers] == [v for key in asked for k, v in bound if k == key] or (
            setting.values > 1 and {*task.answers} == {v for k, v in bound if k in asked}
        )
        if setting.haystack == "needles":
            assert len(bound) == len(task.order)
            continue
        assert len(keys) == setting.keys
        rest = [t for t, match in zip(passages(task), found, strict=True) if not match]
        lines = HAYSTACK if setting.haystack == "essay" else [ruler.FILLER]
        assert rest == [lines[k % len(lines)] for k in range(len(rest))]
    n_answers = {kind: len(made(kind)[0].answers) for kind in KINDS}
    several = {"niah_multivalue": 4, "niah_multiquery": 4, "vt": 5, "cwe": 10, "fwe": 3}
    assert n_answers == dict.fromkeys(KINDS, 1) | several


def test_a_short_haystack_begins_again_and_what_it_holds_is_no_answer(monkeypatch):
    (task,) = make_tasks(
        "niah_single_2", 3000, 1, codec("bpe"), haystack=["One  two\nthree.", "Four 1234567 five."]
    )
    rest = [text for k, text in enumerate(passages(task)) if k not in task.gold]
    assert rest[:3] == ["One two three.", "Four 1234567 five.", "One two three."]
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
    for task in make_tasks("niah_multikey_2", 2500, 20, codec("characters")):
        words = " ".join(passages(task)).split()
        key = task.question.split("keep for ")[1].split("?")[0]
        assert words.count(key) == words.count(task.answers[0] + ".") == 1


@pytest.mark.parametrize(
    ("kind", "n"),
    [("niah_single_1", 40), ("niah_multikey_2", 40), ("vt", 20), ("niah_multivalue", 20)],
)
def test_depths_lie_on_the_grid_and_all_over_it(kind, n):
    seen = Counter()
    for task in made(kind, 2500, n, "characters"):
        haystack = len(task.order) - len(task.gold)
        for before, k in enumerate(sorted(task.gold)):
            seen[next(d for d in range(40) if haystack * d // 39 == k - before)] += 1
    assert min(seen) <= 2 and max(seen) >= 36 and len(seen) > 20
    assert seen.most_common(1)[0][1] < 0.2 * seen.total()


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
    form = r"Now ([A-Z]{5}) is given (?:the value (\d+)|what ([A-Z]{5}) has)\."
    for task in made("vt", 4096, 5):
        before, names, places = re.search(r"\d{5}", task.question)[0], [], []
        for place, text in enumerate(passages(task)):
            if text != ruler.FILLER:
                name, value, other = re.fullmatch(form, text).groups()
                # Each from the one before, the first from the value
                assert before == (value or other) and bool(value) == (not names)
                before = name
                names.append(name)
                places.append(place)
        assert (tuple(names), tuple(places)) == (task.answers, task.gold) and len({*names}) == 5


def test_cwe_counts():
    single = {*ruler._words()[2]}
    assert len(single) > 7800 and not any(map(is_profanity, single))
    for tokens, repeats in ((8192, (30, 3)), (4000, (6, 1))):
        for task in made("cwe", tokens, 2):
            said = re.findall(r"(\d+)\. (\S+)", task.document)
            assert [int(number) for number, _ in said] == [*range(1, len(said) + 1)]
            counts = Counter(word for _, word in said)
            assert {word for word, n in counts.most_common(10)} == {*task.answers}
            assert {n for word, n in counts.items() if word in task.answers} == {repeats[0]}
            assert {n for word, n in counts.items() if word not in task.answers} == {repeats[1]}
            assert {*counts} <= single and min(map(len, task.answers)) > 3
            assert not any(a in word for word in counts for a in task.answers if a != word)
    # 300 entries do not fit in
    assert Counter(passages(made("cwe", 4096, 3, "embedded")[0])).most_common(1)[0][1] == 6
    item, _ = ruler._cwe(ruler.ItemKey("cwe", 0, 0, 4096))
    counts = Counter(item.build(9000)[0])  # more than there are single words: pairs follow
    pairs, answers = {*counts} - single, item.task.answers
    assert len(counts) == 9010 and len(pairs) > 900
    assert all({*word.split("-")} <= single for word in pairs)
    assert not any(answer in word for word in counts for answer in answers if answer != word)


@pytest.mark.parametrize(("tokens", "n"), [(700, 5), (4096, 5), (32768, 1)])
def test_fwe_counts(tokens, n):
    for task in made("fwe", tokens, n):
        counts = Counter(task.document.split())
        noise, *ranks = counts.most_common()
        assert noise[0] == "..." and tuple(word for word, _ in ranks[:3]) == task.answers
        assert noise[1] > ranks[0][1] > ranks[1][1] > ranks[2][1] > ranks[3][1] >= 1
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranks)
        assert noise[1] / ranks[0][1] == pytest.approx(4, abs=0.5)
        assert noise[1] / ranks[1][1] == pytest.approx(9, abs=2)


@pytest.mark.parametrize("kind", QUESTIONS)
def test_qa_documents_hold_the_own_paragraphs_first_and_no_second_version(kind):
    by_id = {task.id: task for task in QUESTIONS[kind]}
    own = QUESTIONS[kind][0].pool
    copies = [f"Copy {k}" for k in range(len(own.texts))]
    titles = [*(title.upper() for title in own.titles), *copies, *FILLER.titles]
    more = Pool(titles, [*["Other words."] * len(own.titles), *own.texts, *FILLER.texts])
    tasks, again = (
        make_tasks(kind, 5000, 12, codec("characters"), seed, questions=QUESTIONS[kind], extra=more)
        for seed in (0, 1)
    )
    for task in tasks:
        source = by_id[task.id]
        mine = [(own.titles[k], own.texts[k]) for k in source.order]
        document = [(task.pool.titles[k], task.pool.texts[k]) for k in task.order]
        akin = [(a, b) for a, b in document if (a.title(), b) in mine or b in dict(mine).values()]
        assert {*akin} == {*mine} and len(document) == task.n_documents > 20
        assert not {a for a, _ in document} & {title.upper() for title, _ in mine}
        assert [document[k] for k in task.gold] == [mine[k] for k in source.gold]
        assert (task.question, task.answers) == (source.question, source.answers)
    assert len({task.gold for task in tasks}) > 3
    orders = [[task.id for task in made] for made in (tasks, again)]
    assert orders[0] != orders[1] and [*by_id] not in orders


def test_sentences():
    text = (
        'It rains.  He said "Stop!" Then\n(quietly) he left. 7 came? "Yes." '
        "It cost 3.5 francs. the end"
    )
    assert sentences([text, "", " One.\n"]) == [
        "It rains.", 'He said "Stop!"', "Then (quietly) he left.", "7 came?", '"Yes."',
        "It cost 3.5 francs. the end", "One.",
    ]  # fmt: skip


def test_settings_that_cannot_be_built_are_refused():
    c, qa = codec("bpe"), {"questions": QUESTIONS["qa_1"]}
    whole = {"haystack": HAYSTACK, "extra": FILLER}
    for kind, tokens, given in (
        *((kind, 150, whole | {"questions": QUESTIONS.get(kind, ())}) for kind in KINDS),
        ("qa_2", 4096, {"questions": [Task("x", "Q?", ("A",), text="C")]}),
        ("qa_2", 4096, {"questions": made("vt")}),
        ("qa_1", 9000, qa),  # too few passages
    ):
        with pytest.raises(UserError):
            make_tasks(kind, tokens, 1, c, **given)


def test_other_paragraphs_of_a_squad_article_come_first():
    titles = ["Bees"] * 4 + [f"Other {k}" for k in range(400)]
    pool = Pool(titles, [f"Bees, part {k}." if k < 4 else f"Text {k}." for k in range(404)])
    source = Task("s", "Which part?", ("part 0",), pool=pool, order=(0,), gold=(0,))
    for dataset, n in (("squad", 4), ("hotpotqa", 1)):
        given = [replace(source, dataset=dataset)]
        (task,) = make_tasks("qa_1", 1024, 1, codec("embedded"), questions=given, extra=pool)
        titles = [task.pool.titles[k] for k in task.order]
        assert titles.count("Bees") == n and len(titles) < 200
        assert task.evidence == "Document 1:\nBees\nBees, part 0."


@cache
def real_passages() -> Pool:
    return read_passages(SHARED / "passages_extra.jsonl.gz")


@real
@pytest.mark.parametrize(
    ("kind", "file"), [("qa_1", "xquad_en.json.gz"), ("qa_2", "hotpotqa_dev.jsonl.gz")]
)
def test_real_questions(kind, file):
    source, extra = read(SHARED / file), real_passages()
    by_id = {task.id: task for task in source}
    for task in make_tasks(kind, 8192, 2, codec("bpe"), 0, questions=source, extra=extra):
        check_length(task, codec("bpe"))
        own = by_id[task.id]
        evidence = [own.pool.texts[own.order[k]] for k in own.gold]
        assert [passages(task)[k] for k in task.gold] == evidence
        titles = [task.pool.titles[k].casefold() for k in task.order]
        if kind == "qa_1":
            article = {own.pool.titles[k].casefold() for k in own.order}
            assert sum(title in article for title in titles) > 1
            assert any(answer in evidence[0] for answer in task.answers)
        else:
            assert all(titles.count(titles[k]) == 1 for k in task.gold)
