"""The script that makes the reader: its commands, what they train on, and what ships of it."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import pytest
import torch
import typer.main
from huggingface_hub import metadata_load
from safetensors.torch import load_file

import cli
from agents.find import best_by_length, trained_agent
from config.errors import UserError
from config.options import EMBEDDED, READER
from config.realmodels import PACKAGED, adapter_config, is_adapter, named_folder
from data import Task
from dev import reader
from tasks.readers import read
from tasks.seen import add_trained_on
from tests.report.run_folders import folder_of, row

ROOT = Path(__file__).parents[2]
SOURCES = {name: f"folder/{file}" for name, file in reader.LOCAL.items()}


def digest_of(question: str) -> str:
    return Task("t", question, ("Lima",), text="x").question_digest


def parse(words):
    """Parse a command line as cli.py does, without running it: (command, parameters given)."""
    group = typer.main.get_command(cli.app)
    ctx = group.make_context("cli.py", [*words])
    name, command, rest = group.resolve_command(ctx, [*words])
    while hasattr(command, "resolve_command"):  # data build
        ctx = command.make_context(name, rest, parent=ctx)
        name, command, rest = command.resolve_command(ctx, rest)
    return name, command.make_context(name, rest, parent=ctx).params


@pytest.mark.parametrize("sources", [SOURCES, reader.HUB], ids=["files", "hub"])
def test_each_command_parses_with_its_own_flags(sources):
    plan = reader.stages(sources, Path("out"), scale=0.5)
    parsed = {stage.name: parse(stage.words) for stage in plan}
    assert not any("xquad" in word for stage in plan for word in stage.words)
    built = [name for name, (of, *_) in reader.SETS.items() if of in sources]
    assert [*parsed] == [*built, *reader.TRAININGS, "export"]
    assert [*reader.TRAININGS] == ["short", "hops", "reading", "grpo"]
    assert [parsed[name][0] for name in parsed] == ["build"] * len(
        built
    ) + "sft sft sft train export".split()
    made = {str(path) for stage in plan for path in stage.makes}
    for name, before in (
        ("short", None),
        ("hops", "out/short/adapter"),
        ("reading", "out/hops/adapter"),
        ("grpo", "out/reading/adapter"),
    ):
        given = parsed[name][1]
        assert given["adapter"] == before and given["seed"] == 0 and given["model"] == "smollm2"
        assert given["steps"] == round(reader.TRAININGS[name][1] / 2)
        for part in given["data"].split(","):  # out of files that an earlier stage makes
            file, _, weight = part.rpartition("=")
            assert file in made and float(weight) > 0
    assert parsed["grpo"][1]["outcome"] == "f1" and parsed["short"][1]["lora_rank"] == 16
    for name in built:
        given = parsed[name][1]
        divided = name == "passages" or (sources is SOURCES and name.startswith("hops"))
        assert given.get("source_split") == ("train" if divided else None)
        assert (bool(given["filler"])) == (sources is SOURCES and name == "passages")
        assert (given.get("absent") == 0.15) == (not name.startswith("hops"))
    assert all(parsed[name][1]["not_found"] == "say" for name in reader.TRAININGS)
    assert all(name.endswith(":train") for name in reader.HUB.values())


def test_what_is_reported_was_not_trained_on():
    """XQuAD is in no set of training, and HotpotQA's questions are another split's."""
    found = reader.evaluations(SOURCES, Path("out"))
    parsed = {stage.name: parse(stage.words)[1] for stage in found}
    assert {name.rpartition("-")[0] for name in parsed} == {*reader.EVALUATIONS}
    assert [*parsed].index("passages-1") > [*parsed].index("hotpotqa-0") and "passages-2" in parsed
    for name, given in parsed.items():
        policy = "smollm2" if "untrained" in name else "out/shipped"
        warm = name.startswith("passages-warm")
        assert given["model"] == ("out/reading/adapter" if warm else policy)
        assert given["seed"] == int(name[-1]) and ("untrained" not in name or given["seed"] == 0)
        assert given["temperatures"] == ["0"] and given["not_found"] == "say"
        if given["suite"] == "passages":
            assert given["data"] == [SOURCES["xquad"]] and given["n"] == 96
            assert (given["absent"] == 1) == name.startswith("absent")
        else:
            assert given["source_split"] == "validation"
    sources = {source for source, *_ in reader.SETS.values()}
    assert "xquad" not in sources and sources <= {*SOURCES}


def test_a_stage_is_made_once_and_one_that_fails_ends_the_call(tmp_path, monkeypatch):
    calls, codes = [], iter([0, 0, 3])
    monkeypatch.setattr(
        reader.subprocess, "call", lambda words: calls.append([*words[2:]]) or next(codes)
    )
    there, other = tmp_path / "a", tmp_path / "b"
    there.touch()
    make = reader.make
    make([reader.Stage("one", ("x",), (there,)), reader.Stage("two", ("y",), (other,))])
    assert calls == [["y"]]
    run = tmp_path / "run"
    run.mkdir()  # of a training that was stopped
    plan = [
        reader.Stage("three", ("z",), (other,), run=run),
        reader.Stage("four", ("w",), (other,)),
    ]
    with pytest.raises(UserError, match="The stage four ended with exit code 3"):
        make(plan)
    assert calls[1:] == [["z", "--resume"], ["w"]]
    (run / "config.yaml").write_text("sft: {steps: 5}\n")
    of_five, of_six = (
        reader.Stage("five", ("sft", "--steps", steps), (there,), run=run) for steps in "56"
    )
    assert of_five.done
    with pytest.raises(UserError, match="has 5 steps, not 6"):
        make([of_six])


@pytest.mark.parametrize(
    ("question", "sentence", "right"),
    [
        ("When did Ida leave?", "Ida left on 4 May 1931 with a friend.", "4 May 1931"),
        ("When did Ida leave?", "Born in 1911, Ida left on 4 May 1931.", "4 May 1931"),
        ("When did Ida leave?", "Ida left in 1931.", "1931"),
        ("In which year did Ida leave?", "Born on May 4, 1911, Ida left in 1931.", "1931"),
        ("When did Ida leave?", "Ida, born in 1911, left in 1931.", ""),  # one of several
        ("When did Ida, born in 1911, leave?", "Ida, born in 1911, left in 1931.", "1931"),
        ("When did Ida leave?", "Ida left 1,931 days later, in section 3.1931.", ""),
        ("Who left in 1931?", "Ida left in 1911.", ""),
    ],
)
def test_the_answer_is_the_one_date_or_year_of_its_sentence(question, sentence, right):
    assert reader.answer(question, sentence) == right


def test_questions_with_an_answer_are_written_with_their_sentence(tmp_path):
    records = [
        {"question": "When did Ida leave?", "sentence": "Ida left in 1931."},
        {"question": "Who left?", "sentence": "Ida left in 1931.", "answer": "Ida"},
        {"question": "Why?", "sentence": "Nobody knows."},
    ]
    with gzip.open(tmp_path / "s.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))
    reader.write_sentences(tmp_path / "s.jsonl.gz", tmp_path / "out.json")
    tasks = read(tmp_path / "out.json")
    assert [(task.id, task.answers) for task in tasks] == [("s0", ("1931",)), ("s1", ("Ida",))]
    assert {task.document for task in tasks} == {tasks[0].document} and "Nobody" not in str(tasks)


def test_a_question_is_known_by_its_words():
    asked = {digest: words for words in ("Who?", "Where?") for digest in [digest_of(words)]}
    known = {digest_of(words) for words in ("where", "When?")}
    rows = [{"id": f"{words}{k}", "asked": digest} for digest, words in asked.items() for k in "12"]
    assert reader.met(rows + rows, known) == ["Where?1", "Where?2"]
    assert reader.met(rows, set()) == []


def answered(length, tokens, **shares):
    """The cells of an evaluation at one length."""
    return {"cells": [
        {"agent": agent, "question": "", "temperature": 0.0, "length": length,
         "mean": mean, "document_tokens": tokens} for agent, mean in shares.items()
    ]}  # fmt: skip


def test_ask_reads_with_what_answered_best(tmp_path):
    out = tmp_path / "out"
    of = {
        "passages": {"cells": [
            *answered(16, 2700.4, memagent=0.4, full=0.2, bm25=0.4, oracle=0.9)["cells"],
            *answered(4, 700.6, memagent=0.3, full=0.2, bm25=0.6)["cells"],
        ]},
        "passages-256": answered(256, 46000.0, memagent=0.1, full=0.2, bm25=0.1, none=0.0),
        "absent": {"cells": [
            *answered(16, 2690.0, memagent=0.0, full=0.0, bm25=0.0)["cells"],
            *answered(4, 690.0, memagent=0.9, full=0.0, bm25=0.0)["cells"],
        ]},
        "absent-256": answered(256, 45000.0, memagent=0.9, full=0.0, bm25=0.0),
    }  # fmt: skip
    of["passages"]["cells"][2]["document_tokens"] = 500.0  # what bm25 has read of it
    # among four .8 * .3 + .2 * .9 = .42 against .48; among 256 .26 against .16
    best = [[701, "bm25"], [2700, "memagent"], [46000, "memagent"]]
    weighed = [(of[name], weight) for name, weight in reader.CHOSEN_BY.items()]
    assert reader.best_by_length(weighed) == best
    for name, summary in of.items():
        out.mkdir(exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps(summary))
    (out / "shipped").mkdir()
    (out / "shipped" / "agent.yaml").write_text("run: {agent: memagent}\n")
    reader.note_best(out / "shipped", out)
    assert best_by_length(out / "shipped") == [tuple(pair) for pair in best]
    assert trained_agent(out / "shipped") == "memagent"


def test_the_seeds_of_an_evaluation_are_pooled_and_none_asks_what_was_trained_on(
    tmp_path, monkeypatch
):
    """What several seeds ask is one question, and the documents that it was in count as one."""
    monkeypatch.setattr(reader, "EVALUATIONS", {"passages": reader.EVALUATIONS["passages"]})
    for seed in reader.SEEDS:
        rows = [
            row(agent, "squad", "0.0", id=f"q{k}", reward=float(agent == "memagent" and seed < 2),
                asked=f"digest {k}", document=f"{seed} {k % 2}")
            for agent in ("memagent", "full") for k in range(4)
        ]  # fmt: skip
        folder = folder_of(tmp_path / f"passages-{seed}", rows, "documents")
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "config.yaml").write_text("eval: {lengths: [4], n: 4}\n")
    add_trained_on(tmp_path, {}, 0, [("digest 7", "x")])
    reader.pool(tmp_path, tmp_path)
    cells = json.loads((tmp_path / "passages.json").read_text())["cells"]
    assert [(c["n"], c["documents"], round(c["mean"], 2)) for c in cells] == [
        (4, 2, 0.67), (4, 2, 0.0)
    ]  # fmt: skip
    assert "- memagent - full, 4: +0.667 (" in (tmp_path / "passages.md").read_text()
    add_trained_on(tmp_path, {}, 0, [("digest 3", "x")])
    with pytest.raises(UserError, match="passages-0 asks what was trained on: q3"):
        reader.pool(tmp_path, tmp_path)


def test_the_shipped_reader_says_what_answered_best_at_each_length():
    best = best_by_length(READER)
    assert [tokens for tokens, _ in best] == [593, 2295, 9179, 37802]  # docs/results.md
    assert [agent for _, agent in best] == ["memagent"] * 3 + ["bm25"]


LICENCES = (  # of what the adapters that ship were trained on
    ("HotpotQA", "CC BY-SA 4.0"),
    ("XQuAD", "CC BY-SA 4.0"),
    ("MuSiQue", "CC BY 4.0"),
    ("2WikiMultiHopQA", "Apache-2.0"),
)


def test_beside_all_weights_that_ship_stand_base_licence_and_data():
    listed = ["git", "ls-files", "*.safetensors"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {(ROOT / name).parent for name in names.splitlines()}
    adapters = {folder for folder in folders if is_adapter(folder)}
    assert named_folder(READER) in adapters and EMBEDDED in folders - adapters
    for folder in folders:
        text, card = (folder / "README.md").read_text(), metadata_load(folder / "README.md")
        assert card["license"] == ("cc-by-sa-4.0" if folder in adapters else "mit")
        assert all(f"**{word}**" in text for word in ("Base", "Trained on"))
    for folder in adapters:
        text = (folder / "README.md").read_text()
        base = PACKAGED[adapter_config(folder)["base_model_name_or_path"]]
        card = metadata_load(folder / "README.md")
        assert base.licence == "apache-2.0" and card["base_model"] == base.hub_name
        assert f"{base.hub_name})" in text and "Apache-2.0" in text
        rows = [line for line in text.splitlines() if line.startswith("| [")]
        for name, licence in LICENCES:
            (row,) = (row for row in rows if row.startswith(f"| [{name}]"))
            assert row.endswith(f"| {licence} |")


def test_the_adapters_that_ship_have_at_most_ten_mebibytes_together():
    listed = ["git", "ls-files", f"*{reader.WEIGHTS}"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in names.splitlines()]
    assert ROOT / "models/packages" / READER / reader.WEIGHTS in paths
    assert sum(path.stat().st_size for path in paths) <= 10 * 2**20
    assert {w.dtype for path in paths for w in load_file(path).values()} == {torch.bfloat16}
