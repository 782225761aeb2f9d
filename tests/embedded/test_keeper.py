"""The embedded policy that keeps a store: its tokens, what the shipped one can, its training."""

from agents.store import Entry
from dev import base, keeper
from engines.hf import TransformersEngine
from models.load import load_model
from rollout import Sampling, rollout
from suites import ledger
from tasks import worlds
from tokens.codec import Codec


def test_a_call_is_six_or_eight_tokens_and_an_id_is_one():
    codec = Codec(keeper.make_tokenizer())
    assert codec.fingerprint == Codec.load(keeper.WEIGHTS).fingerprint
    create = f"{keeper.CREATE} Anna reached Lima.{keeper.END}"
    update = f"{keeper.UPDATE} Anna reached Lima.{keeper.ID}m32{keeper.END}"
    delete = f"{keeper.DELETE}m7{keeper.END}"
    assert [len(codec.encode(call)) for call in (create, update, delete)] == [6, 8, 3]
    ids = codec.encode(Entry("m12", "Anna reached Lima.", date="2024-01-09").line)
    names = codec.tokenizer.convert_ids_to_tokens(ids)
    assert names[:4] == ["[", "m12", "]", "2024-01-09"] and len(names) == 8
    # what is decoded is a call that the tools can read
    calls = keeper.agent().on(codec).format.parse(str(codec.decode(codec.encode(update))))
    assert calls[0].arguments["content"].strip() == "Anna reached Lima."
    assert calls[0].arguments["memory_id"] == "m32"


def test_the_careful_one_writes_a_place_once_and_keeps_the_budget():
    at, other = ("Anna", "reached", "Lima"), ("Anna", "toured", "Oslo")
    assert keeper.careful_calls({"m1": at}, at) == []
    assert keeper.careful_calls({"m1": at}, ("Anna", "met", "Otto")) == []
    assert keeper.careful_calls({"m1": at}, other) == [keeper.update(other, "m1")]
    full = {f"m{k}": (f"P{k}", "reached", "Lima") for k in range(keeper.ENTRIES)}
    delete = f"{keeper.DELETE}m0{keeper.END}"
    assert keeper.careful_calls(full, at) == [delete, keeper.create(at)]


def test_the_shipped_policy_answers_and_edits_beside_chance_and_below_a_perfect_editor():
    codec = Codec.load(keeper.WEIGHTS)
    model = load_model(keeper.WEIGHTS, "float32", "cpu")
    agent, tasks = keeper.agent(), [*ledger.make_questions(5, 16, 6, "dev")]
    engine = TransformersEngine(model, codec)
    done = list(rollout(engine, agent, ((t, 0) for t in tasks), Sampling(1.0)))
    share = sum(agent.reward(t) for t in done) / len(done)
    assert 0.2 < share < 0.85  # careless by construction: there is something to learn
    # from the right entries it answers without a mistake
    wrong = 0
    for k, task in enumerate(tasks):
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


def test_the_command_trains_it(tmp_path):
    out = tmp_path / "k"
    words = ["--agent", "memupdate", "--out", str(out), "--steps", "1"]
    assert base.main([*words, "--careless-steps", "1", "--dense-steps", "1"]) == 0
    assert Codec.load(out).fingerprint == Codec.load(keeper.WEIGHTS).fingerprint
    assert (out / "agent.yaml").read_bytes() == (keeper.WEIGHTS / "agent.yaml").read_bytes()
    assert (out / "templates" / "build.txt").is_file()
