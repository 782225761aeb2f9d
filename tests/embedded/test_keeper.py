"""The embedded policy that keeps a store: tokens, demonstrator, and what the shipped one can."""

import random

import pytest
import torch
from typer.testing import CliRunner

import cli
from agents.memupdate import NO_ENTRIES
from agents.store import Entry
from embedded import keeper, tiny, trainer
from engines.hf import TransformersEngine
from memagent import Finish, Turn
from models.load import load_model
from rollout import Sampling, rollout
from tasks import ledger, worlds
from tokens.codec import Codec


@pytest.fixture(scope="module")
def codec():
    return Codec(keeper.make_tokenizer())


def names(codec, text):
    return codec.tokenizer.convert_ids_to_tokens(codec.encode(text))


def test_a_call_is_six_or_eight_tokens_and_an_id_is_one(codec):
    create = f"{keeper.CREATE} Anna reached Lima.{keeper.END}"
    update = f"{keeper.UPDATE} Anna reached Lima.{keeper.ID}m32{keeper.END}"
    delete = f"{keeper.DELETE}m7{keeper.END}"
    assert [len(names(codec, call)) for call in (create, update, delete)] == [6, 8, 3]
    line = Entry("m12", "Anna reached Lima.", date="2024-01-09").line
    assert (
        names(codec, line)[:4] == ["[", "m12", "]", "2024-01-09"] and len(names(codec, line)) == 8
    )
    # what is decoded is a call that the tools can read
    calls = keeper.agent().on(codec).format.parse(str(codec.decode(codec.encode(update))))[2]
    assert calls[0].arguments["content"].strip() == "Anna reached Lima."
    assert calls[0].arguments["memory_id"] == "m32"


def play(codec, task, careful, seed=0):
    """Run the demonstrator in the agent; return (prompt, what it wrote) of each session."""
    rng, said = random.Random(seed), []
    steps = keeper.agent().on(codec).run(task)
    prompt = next(steps)
    while True:
        text = "" if prompt.frozen else keeper.demonstrate(rng, prompt, careful)
        said += [] if prompt.frozen else [(prompt, text)]
        try:
            prompt = steps.send(Turn(prompt, [], [1], [], Finish.STOP, codec.text(text)))
        except StopIteration:
            return said


def test_a_careful_demonstrator_writes_each_place_once_and_updates_by_name(codec):
    for seed in range(20):
        task = ledger.make_ledger(seed, 12)
        updates = 0
        for prompt, text in play(codec, task, 1.0):
            stored = {person: id for id, _, person, *_ in keeper.ENTRY.findall(prompt.memory)}
            for call in text.split("<tool_call>")[1:]:
                person = call.partition('"content": "')[2].split()[0]
                assert (person in stored) == ('"update"' in call)
                if person in stored:
                    assert f'"memory_id": "{stored[person]}"' in call
                    updates += 1
            assert " met " not in text
        assert updates


def test_a_careless_one_does_all_sorts_of_things(codec):
    written = "".join(
        text for seed in range(20) for _, text in play(codec, ledger.make_ledger(seed, 12), 0.0)
    )
    counts = [written.count(start) for start in (keeper.CREATE, keeper.UPDATE, keeper.DELETE)]
    assert all(counts) and counts[0] > counts[1] > counts[2] and " met " in written


def test_answers_follow_the_newest_entry_about_the_person():
    memory = "2024-01-05 Anna toured Rome.\n2024-01-01 Anna reached Lima.\n2024-01-01 Ida met Anna."
    assert keeper.answer("Where is Anna?", memory) == " Anna toured Rome. \\boxed{ Rome}"
    assert keeper.answer("Where is Otto?", memory) == " \\boxed{ unknown}"
    assert keeper.answer("Where is Anna?", NO_ENTRIES) == " \\boxed{ unknown}"


def test_one_head_finds_the_id_of_the_name_that_was_just_written(codec):
    """Before any training: four of ten ids with it, where chance and the other heads have two."""
    vocabulary = codec.tokenizer
    ids = [vocabulary.convert_tokens_to_ids(f"m{k}") for k in range(1, 11)]
    examples, rng = keeper.Examples(codec, 0.3), random.Random(5)
    cases = []
    while len(cases) < 60:
        for prompt, said, _ in examples.draw(rng, 1.0):
            at = [k for k, token in enumerate(said) if vocabulary.decode([token]) == keeper.ID]
            cases += [(prompt + said[: k + 1], said[k + 1]) for k in at]

    def right(finds_ids):
        model = tiny.make_model(len(vocabulary), 0, 128, 3, 256, finds_ids=finds_ids).eval()
        found = 0
        for ids_before, wanted in cases:
            with torch.no_grad():
                scores = model(torch.tensor([ids_before])).logits[0, -1]
            there = [i for i in ids if i in ids_before]
            found += max(there, key=lambda i: scores[i].item()) == wanted
        return found / len(cases)

    assert right(True) > 0.35 > 0.3 > right(False)


def test_the_shipped_policy_answers_and_edits_beside_chance_and_below_a_perfect_editor():
    codec = Codec.load(keeper.WEIGHTS)
    model = load_model(keeper.WEIGHTS, "float32", "cpu")
    agent, tasks = keeper.agent(), [*ledger.make_questions(5, 40, 6, "dev")]
    engine = TransformersEngine(model, codec)
    done = list(rollout(engine, agent, ((t, 0) for t in tasks), Sampling(1.0)))
    share = sum(agent.reward(t) for t in done) / len(done)
    assert 0.2 < share < 0.85  # careless by construction: there is something to learn
    # from the right entries it answers without a mistake
    wrong = 0
    for k, task in enumerate(tasks[:20]):
        person = task.question.split()[-1].rstrip("?")
        old = next(p for p in worlds.PLACES if p != task.answers[0])
        memory = f"2024-01-0{k % 8 + 2} {person} reached {task.answers[0]}.\n"
        memory += f"2024-01-01 {person} reached {old}."
        asking = agent.on(codec).prompt("answer", 12, problem=task.question, memory=memory)
        key = engine.add(asking, Sampling(0.0), 0)
        while not (answered := dict(engine.step())):
            pass
        wrong += task.answers[0] not in str(answered[key].response).rpartition("{")[2]
    assert wrong == 0


def test_the_base_command_trains_it(tmp_path):
    words = ["base", "--agent", "memupdate", "--out", str(tmp_path / "k"), "--steps", "2"]
    done = CliRunner().invoke(cli.app, [*words, "--careless-steps", "1", "--dense-steps", "1"])
    assert done.exit_code == 0, done.output
    codec = Codec.load(tmp_path / "k")
    assert codec.fingerprint == Codec.load(keeper.WEIGHTS).fingerprint
    assert (tmp_path / "k" / "templates" / "build.txt").is_file()
    assert trainer("memupdate") is keeper and trainer("memagent") is tiny
