"""Suites and the commands on task files, with a scripted engine or the embedded tokenizer."""

import json
from dataclasses import replace

import pytest
import yaml
from conftest import asked_of, parts_of
from test_readers import hotpot, lines, paragraphs

import eval
import suites
from agents import find
from config.errors import UserError
from config.options import EMBEDDED, EvalConfig
from embedded import tiny
from engines import open as opening
from engines.scripted import ScriptedEngine
from suites import ruler
from suites.ruler import ESSAY
from tokens.codec import Codec

QUICK = EvalConfig(agents=("memagent",), temperatures=(0.0,), n=2, in_flight=8)

ONE_FACT = suites.make("world", {"kinds": ("one_fact",)})


def agents_of(config, **settings):
    """Make the agents of an evaluation that reads as the embedded policy does."""
    names = {name.partition("@")[0] for name in config.agents}
    return {name: tiny.agent(name, **settings) for name in names}


@pytest.fixture
def questions(tmp_path):
    return str(lines(tmp_path / "questions.jsonl", [paragraphs(k) for k in range(6)]))


@pytest.fixture
def filler(tmp_path):
    passages = [{"title": f"F{k}", "text": f"Filler {k}. Another one."} for k in range(300)]
    return str(lines(tmp_path / "filler.jsonl", passages))


def asked(codec, **other):
    """Unit, columns as (question, length), and the tasks of each."""
    unit, columns = asked_of(lambda: codec, **{"n": 2} | other)
    made = {(c.question, c.length): c.make() for c in columns}
    return unit, [*made], made


def test_the_world_may_stand_in_a_text(codec, filler):
    _, _, made = asked(codec, suite="world", filler=(filler,), lengths=(3,), kinds=("changed",))
    (tasks,) = made.values()
    assert len(tasks) == 2
    assert all(
        {"Filler", "Another"} >= {t.split()[0] for t in task.pool.texts[1::2]} for task in tasks
    )


def test_ruler_hqa_asks_each_dataset_at_every_length(codec, tmp_path, questions, filler):
    other = str(lines(tmp_path / "hotpot.jsonl", [hotpot(k) for k in range(9)]))
    hqa = dict(suite="ruler-hqa", filler=(filler,))
    unit, columns, made = asked(codec, **hqa, data=(questions, other), lengths=(20, 14), n=3)
    assert unit == "documents"
    assert columns == [("made", 14), ("hotpotqa", 14), ("made", 20), ("hotpotqa", 20)]
    assert all(t.n_documents == n for (_, n), tasks in made.items() for t in tasks)
    assert [t.id for t in made["made", 14]] == [t.id for t in made["made", 20]]
    with pytest.raises(UserError, match="two columns"):
        asked(codec, suite="ruler-hqa", data=(questions, questions), lengths=(20,))


def test_ruler_hqa_with_distant_evidence_and_one_split(codec, questions, filler):
    other = dict(suite="ruler-hqa", data=(questions,), filler=(filler,), lengths=(50,), n=5)
    _, _, made = asked(codec, **other, evidence_order="reverse", min_distance=0.5)
    assert all(t.gold[0] - t.gold[1] > 25 for t in made["made, evidence reverse 0.5", 50])
    assert len(made["made, evidence reverse 0.5", 50]) == 5
    assert asked(codec, **other, source_split="train")[0] == "documents"
    with pytest.raises(UserError, match="no split 'dev'; there are train"):
        asked(codec, **other, source_split="dev")


def test_where_questions_come_from(codec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="data get hotpotqa"):
        asked(codec, suite="ruler-hqa")
    (tmp_path / "data" / "hotpotqa").mkdir(parents=True)
    lines(tmp_path / "data" / "hotpotqa" / "dev.jsonl", [hotpot(k) for k in range(6)])
    lines(tmp_path / "data" / "hotpotqa" / "train-00000.jsonl", [hotpot(k) for k in range(6)])
    # What was downloaded and is not for training
    assert asked(codec, suite="ruler-hqa", lengths=(12,))[1] == [("hotpotqa", 12)]


def test_ruler_asks_what_it_has_sources_for(tmp_path, questions, filler):
    def names(**other):  # no tokenizer is needed
        return [c.question for c in asked_of(lengths=(4096,), n=2, suite="ruler", **other)[1]]

    generated = [kind for kind in ruler.KINDS if kind not in (*ESSAY, "qa_1", "qa_2")]
    assert names() == generated
    essay = tmp_path / "essay.txt"
    essay.write_text("One thing. Another thing. " * 40)
    assert names(haystack=(str(essay),)) == [k for k in ruler.KINDS if k[:2] != "qa"]
    assert names(data=(questions,), filler=(filler,)) == [k for k in ruler.KINDS if k != "qa_1"]
    for kind, words in (
        ("niah_single_2", "--haystack"),
        ("qa_1", "--squad"),
        ("qa_2", "--data"),
        ("all", "niah_single_2 needs --haystack"),
        ("niah", "'niah'"),
    ):
        with pytest.raises(UserError, match=words):
            names(ruler_tasks=(kind,))


def test_the_haystack_is_named():
    scope, column = suites.Scope(("b/q.jsonl",)), suites.Column(ESSAY[0], 4096, list)
    for files, name in (("a/essays", "essays"), ("", "passages of q.jsonl, f.gz")):
        suite = suites.make("ruler", {"haystack": (files,) * bool(files), "filler": ("c/f.gz",)})
        assert suite.about(scope, column) == {"seed": 0, "haystack": name}


def test_agents_and_their_weights():
    agents = ("memagent", "memagent@untrained", "full", "bm25@untrained")
    config = replace(QUICK, model="m", untrained="u", agents=agents)
    weights = {False: [agents[0], agents[2]], True: [agents[1], agents[3]]}
    # over an endpoint --model is no more than the tokenizer
    assert eval.weights_of(config) == eval.weights_of(replace(config, untrained="m")) == weights
    for changed in ({"agents": ("full@m",)}, {"untrained": ""}):
        with pytest.raises(UserError, match="@"):
            eval.weights_of(replace(config, **changed))


def test_one_command_makes_the_whole_table(tmp_path, questions, filler):
    agents = ("memagent", "memagent@untrained", "none", "oracle")
    config = replace(QUICK, suite="ruler-hqa", data=(questions,), lengths=(12, 20), agents=agents)
    config = replace(config, untrained=str(EMBEDDED), runs=str(tmp_path), name="e", n=1)
    suite = suites.from_config(config, {"filler": (filler,)})
    folder = eval.run_suite(config, agents_of(config, chunk_tokens=256), suite)
    summary = json.loads((folder / "summary.json").read_text())
    assert tuple(parts_of(summary, "agent")) == agents and summary["metric"] == "sub_em"
    for agent in agents:
        cell = {"agent": agent, "question": "made", "temperature": "0.0"}
        assert parts_of(summary, "length", **cell) == [12, 20]
    rows = read_rows(folder)
    assert len(rows) == 8 and not any(row["error"] for row in rows)
    read = {(r["agent"], r["length"]): r["document_tokens"] for r in rows}
    assert read["none", 20] == 0 and read["oracle", 20] < read["memagent", 20]
    said = {(r["agent"], r["length"]): r["prediction"] for r in rows}
    for length in (12, 20):
        assert said["memagent@untrained", length] == said["memagent", length]
    assert {p["b"] for p in summary["paired"]} == {*agents[1:]}
    assert (folder / "table.md").read_text().count("| made |") == 4


def read_rows(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("endpoint", [(), ("http://x/v1",)])
def test_the_policy_before_training_answers_for_itself(tmp_path, monkeypatch, endpoint):
    """Also where the tokenizer of an endpoint is that of the policy before training."""
    opened = []

    def answers(word):
        made = ScriptedEngine(Codec(tiny.make_tokenizer()), lambda prompt: f"\\boxed{{{word}}}")
        made.dtype, made.model = "float32", word
        return made

    def open_engine(policy, config, use):
        opened.append(config.served_as if endpoint else policy.model)
        return answers("old" if opened[-1] == "u" else "new")

    monkeypatch.setattr(opening, "open_engine", open_engine)
    monkeypatch.setattr(opening, "fingerprint", lambda model, dtype: model)
    config = replace(QUICK, agents=("full", "full@untrained"), lengths=(1,), runs=str(tmp_path))
    config = replace(config, model="u" if endpoint else "m", untrained="u")
    config = replace(config, endpoint=endpoint, served_as="m" if endpoint else "")
    rows = read_rows(eval.run_suite(config, agents_of(config), ONE_FACT))
    predicted = {(row["agent"], row["prediction"]) for row in rows}
    assert predicted == {("full", "new"), ("full@untrained", "old")}
    assert opened == ["m", "u"] and len({row["settings"] for row in rows}) == 2


@pytest.mark.parametrize(("fields", "named"), [
    ({"evidence_order": "reverse"}, "evidence_order"),
    ({"suite": "ruler", "compat_seed4": True}, "compat_seed4"),
    ({"suite": "ruler-hqa", "squad": "x"}, "squad"),
    ({"suite": "llb-db", "judge": "openai:http://h#m"}, "judge"),
    ({"suite": "hle", "images": True}, "images"), ({"suite": "nowhere"}, "nowhere"),
    ({"suite": "nowhere.py"}, "nowhere.py"),
    ({"suite": "locomo", "data": ("x",), "lengths": (4,)}, "lengths"),
    ({"data": ("x.jsonl",), "lengths": (4,)}, "lengths"),
    ({"suite": "world", "data": ("x.jsonl",)}, "data"),
    ({"suite": "files"}, "data"), ({"suite": "passages"}, "data"),
    ({"suite": "locomo", "data": ("a", "b")}, "data"),
    ({"kinds": ("ten_hop",)}, "ten_hop"),
    ({"kinds": ("one_fact", "one_fact")}, "one_fact"),
    ({"split": "x"}, "'x'"),
    ({"agents": ("full", "bm25", "full")}, "agents"),
    ({"temperatures": (0.0, 1.0, 0.0)}, "temperatures"),
    ({"lengths": (4, 4)}, "lengths"),
])  # fmt: skip
def test_what_means_nothing_is_refused(fields, named):
    with pytest.raises(UserError, match=named) as error:
        asked_of(**fields)
    assert "\n" not in str(error.value)


EARLIER = {  # an evaluation's settings as they were written when they held those of all suites
    "data": ["world"], "lengths": [1], "n": 2, "filler": [], "source_split": "",
    "metric": "official", "rules": "released", "few_shot": "", "judge": "", "together": 1,
    "evidence_order": "any", "ruler_tasks": [], "haystack": [], "kinds": ["one_fact"],
    "split": "dev",
}  # fmt: skip


@pytest.mark.parametrize(("suite", "more", "kept"), [
    ("", {}, {"kinds": ("one_fact",), "split": "dev"}), ("locomo", {}, {"source_split": ""}),
    ("ruler", {"together": 2}, {"together": 2}),
])  # fmt: skip
def test_settings_of_an_earlier_version_are_read_with_those_of_their_suite(
    tmp_path, suite, more, kept
):
    earlier = {name: v for name, v in EARLIER.items() if suite == "" or name != "kinds"}
    (path := tmp_path / "a.yaml").write_text(
        json.dumps({"eval": {"suite": suite} | earlier | more})
    )
    found = find.stored_settings(path)["eval"]
    assert kept.items() <= found.items()
    others = {"judge", "few_shot", "metric", "rules", "evidence_order"}
    others |= ({"split"} if suite else set()) | (
        set() if suite == "ruler" else {"ruler_tasks", "haystack"}
    )
    assert not others & found.keys()
    if suite == "ruler":  # its own suite does not have it: nothing is dropped that was set
        with pytest.raises(UserError, match="together"):
            suites.chosen(EvalConfig, found)


def test_a_folder_of_an_earlier_version_is_gone_on_with(tmp_path):
    config = replace(QUICK, agents=("none",), lengths=(1,), runs=str(tmp_path), name="e")
    folder = eval.run_suite(config, agents_of(config), ONE_FACT)
    path = folder / "config.yaml"
    settings = yaml.safe_load(path.read_text())
    settings["eval"] = EARLIER | settings["eval"]
    path.write_text(yaml.safe_dump(settings))
    eval.run_suite(config, agents_of(config), ONE_FACT)
    assert len(read_rows(folder)) == 2
    with pytest.raises(UserError, match="split 'dev', not 'test'"):
        eval.run_suite(config, agents_of(config), suites.make("world", {"split": "test"}))
