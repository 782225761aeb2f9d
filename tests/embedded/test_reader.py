"""The script that makes the reader: its commands, what they train on, and that they run."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import typer.main
import yaml
from huggingface_hub import metadata_load
from safetensors.torch import load_file, save_file
from test_passages import squad
from test_readers import lines
from typer.testing import CliRunner

import cli
import suites
from agents.find import best_by_length, trained_agent
from config.options import EMBEDDED, READER
from config.realmodels import PACKAGED, adapter_config, is_adapter, named_folder
from embedded import reader
from tasks import passages, seen
from tasks.readers import read

ROOT = Path(__file__).parents[2]
SOURCES = {name: f"folder/{file}" for name, file in reader.LOCAL.items()}


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
    built = [name for name, (of, *_) in reader.SETS.items() if of in sources]
    assert [*parsed] == [*built, "facts", "hops", "grpo", "export"]
    assert [parsed[name][0] for name in parsed] == ["build"] * len(
        built
    ) + "sft sft train export".split()
    made = {str(path) for stage in plan for path in stage.makes}
    for name, before in (
        ("facts", None),
        ("hops", "out/facts/adapter"),
        ("grpo", "out/hops/adapter"),
    ):
        given = parsed[name][1]
        assert given["adapter"] == before and given["seed"] == 0 and given["model"] == "smollm2"
        assert given["steps"] == round(reader.TRAININGS[name][1] / 2)
        for part in given["data"].split(","):  # out of files that an earlier stage makes
            file, _, weight = part.rpartition("=")
            assert file in made and float(weight) > 0
    assert parsed["grpo"][1]["outcome"] == "f1" and parsed["facts"][1]["lora_rank"] == 16
    for name in built:
        given = parsed[name][1]
        assert given["source_split"] == (
            "train" if sources is SOURCES or name == "passages" else None
        )
        assert (given["filler"] is not None) == (sources is SOURCES and name == "passages")
    assert all(name.endswith(":train") for name in reader.HUB.values())


def test_what_is_reported_was_not_trained_on():
    """By its split; the articles are the training's others. dev/untrained.py compares the rows."""
    found = reader.evaluations(SOURCES, Path("out"))
    parsed = {stage.name: parse(stage.words)[1] for stage in found}
    assert [*parsed] == [*reader.EVALUATIONS]
    train = parse(
        next(s for s in reader.stages(SOURCES, Path("out")) if s.name == "passages").words
    )
    for name, given in parsed.items():
        policy = "smollm2" if "untrained" in name else "out/shipped"
        assert given["model"] == ("out/hops/adapter" if name == "passages-warm" else policy)
        assert given["temperatures"] == "0" and given["n"] == 128
        if given["suite"] == "passages":
            assert given["source_split"] == "test"
            default = suites.find("passages").Config().test_articles
            assert (given["test_articles"] or default) == train[1]["test_articles"]
        else:
            assert given["source_split"] == "validation"


def name(i: int) -> str:
    """A name that is no part of another."""
    return "".join(
        "bdfgklmnprst"[i // 12**k % 12] + "aeiou"[i // 7**k % 5] for k in range(3)
    ).title()


def hops(i: int, kind: str) -> dict:
    """A question of two hops with ten paragraphs, every third one of the validation split."""
    film, man, town = f"Film {name(i)}", f"{name(i + 200)}", f"{name(i + 400)}"
    texts = {film: f"{film} is by {man}.", man: f"{man} died in {town}."}
    texts |= {f"{kind} {name(i)} {k}": f"Else {k}." for k in range(8)}
    triples = [[film, "director", man], [man, "place of death", town]]
    steps = [{"question": f"{s} >> {r}", "answer": o} for s, r, o in triples]
    return {
        "id": f"{kind}{i}", "dataset": kind, "type": "bridge", "answers": [town], "hops": [0, 1],
        "question": f"{kind}: where did the director of {film} die?",
        "orig_split": "train" if i % 3 else "validation",
        "paragraphs": [{"title": title, "text": text} for title, text in texts.items()],
        **({"evidences": triples} if kind == "2wiki" else {}),
        **({"decomposition": steps} if kind == "musique" else {}),
    }  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Everything, made of generated files by the embedded policy in a few steps."""
    folder = tmp_path_factory.mktemp("reader")
    data = folder / "data"
    data.mkdir()
    shutil.move(squad(data / "x.json"), data / reader.LOCAL["squad"].removesuffix(".gz"))
    for k, kind in enumerate(("2wiki", "musique", "hotpotqa")):
        lines(data / reader.LOCAL[kind], [hops(i, kind) for i in range(40 * k, 40 * k + 24)])
    extra = [{"title": f"E {name(k)}", "text": f"It is {name(k)}."} for k in range(500, 590)]
    lines(data / reader.LOCAL["extra"], extra)
    text = (data / "xquad_en.json").read_text()
    lines(data / reader.LOCAL["squad"], [text])
    model = folder / "model"
    shutil.copytree(EMBEDDED, model)
    settings = yaml.safe_load((model / "agent.yaml").read_text())
    # most of these texts are bytes to the embedded tokenizer
    settings["agent"] |= {"chunk_tokens": 160, "memory_tokens": 32, "final_tokens": 40}
    (model / "agent.yaml").write_text(yaml.safe_dump(settings))
    arguments = ["--data", str(data), "--out", str(folder / "out"), "--model", str(model)]
    calls = []
    (folder / "out" / "facts").mkdir(parents=True)  # of a call that was stopped at once

    def call(words):
        calls.append([*words])
        done = CliRunner().invoke(cli.app, [*words])
        assert done.exit_code == 0, (shlex.join(words), done.output, done.exception)
        return done.exit_code

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "call", call)
        assert reader.main([*arguments, "--steps-scale", "0.01"]) == 0
        first, calls[:] = [*calls], []
        assert reader.main([*arguments, "--steps-scale", "0.01"]) == 0
        again, calls[:] = [*calls], []
        # stopped before the last training was exported
        shutil.rmtree(folder / "out/grpo/model"), shutil.rmtree(folder / "out/reader")
        assert reader.main([*arguments, "--steps-scale", "0.01"]) == 0
    return folder, [first, again, [*calls]]


def test_it_runs_from_the_data_to_the_adapter(made):
    folder, (first, again, resumed) = made
    assert [words[0] for words in first] == [*["data"] * 5, "sft", "sft", "train", "export"]
    assert again == []
    assert [words[0] for words in resumed] == ["train", "export"]
    goes_on = [words[-1] == "--resume" for words in first]
    assert goes_on == [False] * 5 + [True] + [False] * 3 and resumed[0][-1] == "--resume"
    out = folder / "out"
    for path in (out / "reader" / "model.safetensors", out / "reader-adapter/adapter_config.json"):
        assert path.is_file()
    half, whole = (load_file(out / name / reader.WEIGHTS) for name in ("shipped", "reader-adapter"))
    assert {w.dtype for w in half.values()} == {torch.bfloat16}
    assert whole.keys() == half.keys()
    assert all(torch.equal(half[name], w.bfloat16()) for name, w in whole.items())
    assert is_adapter(out / "shipped") and adapter_config(out / "shipped")["r"] == 16
    # everything that was trained on, of all three trainings, comes with all of them
    runs = {digest for run in ("facts", "hops", "grpo") for digest in seen.trained_on(out / run)}
    for name in ("reader", "reader-adapter", "shipped"):
        assert {*seen.trained_on(out / name)} == runs
    assert len(runs) > 20


def test_neither_test_articles_nor_validation_splits_are_trained_on(made):
    folder, _ = made
    data = folder / "data"
    held_out = {t.question_digest for kind in ("2wiki", "musique", "hotpotqa")
                for t in read(data / reader.LOCAL[kind]) if t.split == "validation"}  # fmt: skip
    is_test = passages.article_rule("4/5")
    questions = passages.split_by_article(read(data / reader.LOCAL["squad"]), is_test)
    test = [task for task in questions if task.split == "test"]
    held_out |= {task.question_digest for task in test}
    texts = {task.pool.texts[task.order[0]] for task in test}
    assert len(held_out) == 3 * 8 + 18 and len(texts) == 6
    # single facts of validation questions too
    names = {name(40 * k + i + of) for k in range(2) for i in range(24) for of in (0, 200)
             if (40 * k + i) % 3 == 0}  # fmt: skip
    files = sorted((folder / "out/data").glob("*/*.jsonl.gz"))
    assert len(files) == 9
    seen_in_training = {
        d for run in ("facts", "hops", "grpo") for d in seen.trained_on(folder / "out" / run)
    }
    built = set()
    for file in files:
        for task in read(file):
            built.add(task.question_digest)
            if file.parent.name == "passages":
                assert not texts & {task.pool.texts[k] for k in task.order}
            if file.parent.name.startswith("facts"):
                assert not any(f"{word}?" in task.question for word in names)
    assert not built & held_out and seen_in_training <= built


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
            *answered(4, 700.6, memagent=0.3, full=0.2, bm25=0.5)["cells"],
        ]},
        "passages-256": answered(256, 46000.0, memagent=0.1, full=0.2, bm25=0.1, none=0.0),
    }  # fmt: skip
    of["passages"]["cells"][2]["document_tokens"] = 500.0  # what bm25 has read of it
    best = [[701, "bm25"], [2700, "memagent"], [46000, "full"]]
    assert reader.best_by_length([*of.values()]) == best
    for name, summary in of.items():
        (out / name).mkdir(parents=True)
        (out / name / "summary.json").write_text(json.dumps(summary))
    (out / "shipped").mkdir()
    (out / "shipped" / "agent.yaml").write_text("run: {agent: memagent}\n")
    reader.note_best(out / "shipped", out)
    assert best_by_length(out / "shipped") == [tuple(pair) for pair in best]
    assert trained_agent(out / "shipped") == "memagent"


def test_the_shipped_reader_says_what_answered_best_at_each_length():
    best = best_by_length(READER)
    assert [tokens for tokens, _ in best] == [593, 2295, 9179, 37802]  # docs/results.md
    assert [agent for _, agent in best] == ["memagent"] * 3 + ["bm25"]


def test_mistakes_are_one_sentence(tmp_path, monkeypatch, capsys):
    for arguments, said in (
        (["--data", str(tmp_path)], "lacks xquad_en.json.gz, 2wiki"),
        (["--hub", "--steps-scale", "0"], "must be a positive number"),
        (["--hub", "--steps-scale", "nan"], "must be a positive number"),
        (["--hub", "--out", str(tmp_path / "a,b")], "must not have a comma"),
        (["--hub", "--evaluate"], "needs --data"),
    ):
        assert reader.main(arguments) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1
    monkeypatch.setattr(reader, "call", lambda words: 3)
    assert reader.main(["--hub", "--out", str(tmp_path / "out")]) == 2
    assert "The stage facts-2wiki ended with exit code 3" in capsys.readouterr().err
    assert reader.main(["--hub", "--out", "out", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 8 and all(line.startswith("python cli.py ") for line in listed)
    assert reader.main(["--hub", "--out", "out", "--list", "--processes", "2"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.endswith("--device cpu --devices 2") for line in listed] == 4 * [0] + 3 * [1] + [0]


def test_commands_run_in_a_process_of_their_own():
    assert reader.call(["data", "look", "nowhere.jsonl"]) == 2


LICENCES = {  # source -> name, licence
    "hotpotqa": ("HotpotQA", "CC BY-SA 4.0"),
    "squad": ("XQuAD", "CC BY-SA 4.0"),
    "musique": ("MuSiQue", "CC BY 4.0"),
    "2wiki": ("2WikiMultiHopQA", "Apache-2.0"),
}


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
    trained = {reader.SETS[name][0] for parts in reader.MIXTURES.values() for name, _ in parts}
    for folder in adapters:
        text = (folder / "README.md").read_text()
        base = PACKAGED[adapter_config(folder)["base_model_name_or_path"]]
        card = metadata_load(folder / "README.md")
        assert base.licence == "apache-2.0" and card["base_model"] == base.hub_name
        assert f"{base.hub_name})" in text and "Apache-2.0" in text
        rows = [line for line in text.splitlines() if line.startswith("| [")]
        for name, licence in (LICENCES[source] for source in trained):
            (row,) = (row for row in rows if row.startswith(f"| [{name}]"))
            assert row.endswith(f"| {licence} |")


def test_what_ships_anew_keeps_its_licences(tmp_path):
    new, there = tmp_path / "new", tmp_path / "there"
    shutil.copytree(named_folder(READER), there)
    shutil.copytree(there, new)
    weights = load_file(new / reader.WEIGHTS)
    save_file({name: weight + 1 for name, weight in weights.items()}, new / reader.WEIGHTS)
    (new / "README.md").write_text("of the run")
    before = (there / "README.md").read_text()
    reader.ship(new, there)
    assert (there / "README.md").read_text() == before
    assert not reader._same(load_file(there / reader.WEIGHTS), weights)


def test_the_adapters_that_ship_have_at_most_ten_mebibytes_together():
    listed = ["git", "ls-files", f"*{reader.WEIGHTS}"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in names.splitlines()]
    assert ROOT / "models/packages" / READER / reader.WEIGHTS in paths
    assert sum(path.stat().st_size for path in paths) <= 10 * 2**20
    assert {w.dtype for path in paths for w in load_file(path).values()} == {torch.bfloat16}
