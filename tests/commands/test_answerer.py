"""What answers frozen questions: --answerer of train and eval, from the flag to the records."""

import gzip
import json
from contextlib import closing
from dataclasses import replace

import pytest
import yaml
from conftest import random_policy
from test_endpoint import SECRET, Server

import engines.open as opening
from commands import train
from commands.dryrun import dry_run
from config.errors import UserError
from config.options import EvalConfig, GRPOConfig, RunConfig
from dev import keeper
from embedded import tiny
from engines import endpoint, vllm_colocated
from engines.frozen import WithFrozen
from engines.hf import TransformersEngine
from engines.open import engine_fingerprint, fingerprint, open_reader, open_sampler
from engines.scripted import ScriptedEngine
from eval import evaluate
from memagent import Finish, Prompt
from models.load import load_model
from models.packaged import located
from models.plan import answerer_gib, geometry
from report.rows import Cell
from rollout import Sampling
from tasks import ledger
from tokens.codec import Codec, Text

GRPO = GRPOConfig(steps=1, tasks_per_step=(2,), group_size=2, warmup=0, kl=0.0)
AGENT = keeper.agent()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random policy with the tokenizer of memagent's, which is another than the keeper's."""
    path = tmp_path_factory.mktemp("other")
    codec = Codec(tiny.make_tokenizer())
    random_policy(codec).save_pretrained(path)
    codec.tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def server(codec, monkeypatch):
    monkeypatch.setattr(endpoint, "READY_S", 0.1)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    made = Server(codec)
    yield made
    made.stop()


def run_config(runs, answerer, **more):
    settings = dict(name="a", model=str(keeper.WEIGHTS), data="ledger", lengths=(5,), device="cpu",
                    keep_checkpoints=0)  # fmt: skip
    return RunConfig(runs=str(runs), answerer=answerer, **settings | more)


def records_of(folder):
    with gzip.open(folder / "trajectories.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def probes_of(records):
    turns = [turn for record in records for turn in record["turns"]]
    return [turn for turn in turns if turn.get("notes", {}).get("phase") == "probe"]


def said_by(folder, turns):
    """Ask an engine of a folder the very prompts of recorded turns; return ids and log-probs."""
    codec = Codec.load(folder)
    engine = TransformersEngine(load_model(folder, "float32", "cpu"), codec)
    said = []
    for turn in turns:
        prompt = Prompt(((Text("", turn["prompt_ids"]), False),), AGENT.config.final_tokens)
        engine.add(prompt, Sampling(0.0), 0)
        while not (done := engine.step()):
            pass
        said.append(done[0][1])
    return said


# ---------------------------------------------------------------- training


def test_another_model_answers_the_probes_of_a_training(folder, tmp_path):
    out = train.train(run_config(tmp_path, f"hf:{folder}"), GRPO, AGENT)
    probes = probes_of(records_of(out))
    theirs = said_by(folder, probes)
    assert len(probes) >= 2
    for turn, expected in zip(probes, theirs, strict=True):
        assert turn["response_ids"] == expected.response_ids
        assert turn["response"] == str(expected.response)
        assert turn["logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)
    # they were asked in the other model's own tokens; by the keeper's these would be other words
    theirs, own = (Codec.load(path) for path in (folder, keeper.WEIGHTS))
    for turn in probes:
        assert turn["memory"] and turn["memory"] in str(theirs.decode(turn["prompt_ids"]))
        assert own.decode(turn["prompt_ids"]) != theirs.decode(turn["prompt_ids"])


def test_a_server_answers_the_probes_and_its_key_is_written_nowhere(server, tmp_path):
    server.faults = ["", (400, {"error": "no"})]
    out = train.train(run_config(tmp_path, f"openai:{server.url}#m"), GRPO, AGENT)
    records = records_of(out)
    failed = [record for record in records if record["error"]]
    assert len(failed) == 1 and "HTTP 400: no" in failed[0]["error"] and not failed[0]["reward"]
    probes = [turn for turn in probes_of(records) if turn["finish"] != "error"]
    assert len(probes) == len(server.bodies) - 1 >= 2
    assert all(turn["response"].startswith(" Anna joined ") for turn in probes)
    assert all(body["temperature"] == 0 for body in server.bodies)
    assert server.keys == {f"Bearer {SECRET}"}
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["run"]["answerer"] == f"openai:{server.url}#m"
    written = [path.read_bytes() for path in out.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in content for content in written)
    assert not any(SECRET in json.dumps(record) for record in records)


@pytest.mark.parametrize("answerer", [
    "openai:http://127.0.0.1:9/v1#m", "openai:http://me:word@127.0.0.1:9/v1#m", "hf:/nowhere",
    "SERVER#n", "", "hf:", "somewhere", "openai:http://127.0.0.1:9/v1", "#",
])  # fmt: skip
def test_an_answerer_that_is_not_there_is_refused_at_the_start(server, tmp_path, answerer):
    """As is another form of a name, and a model that the server does not have."""
    with pytest.raises(UserError) as refused:
        named = answerer.replace("SERVER", f"openai:{server.url}")
        train.train(run_config(tmp_path, named), GRPO, AGENT)
    assert "word@" not in str(refused.value) and not [*tmp_path.iterdir()]


def test_an_agent_that_asks_no_other_policy_takes_no_answerer(folder, tmp_path):
    run = run_config(tmp_path, f"hf:{folder}", model="", data="world")
    with pytest.raises(UserError):
        train.train(run, GRPO, tiny.agent())


def test_in_a_dry_run_the_model_that_stands_in_answers(tmp_path, monkeypatch):
    def begin(run, *_, **__):
        raise UserError(f"{run.answerer} beside {run.model}")

    monkeypatch.setattr(train, "train", begin)
    for answerer in ("hf:/nowhere", "openai:http://127.0.0.1:9/v1#m"):
        with pytest.raises(UserError, match=" beside ") as stopped:
            dry_run(run_config(tmp_path, answerer, name=""), GRPO, AGENT, lambda line: None)
        other, _, model = str(stopped.value).removeprefix("hf:").partition(" beside ")
        assert other == model and "memagent-" in model
    vllm = run_config(tmp_path, "base", name="", engine="vllm")
    with pytest.raises(UserError, match="vLLM holds one set of weights"):
        dry_run(vllm, GRPO, AGENT, lambda line: None)


# ---------------------------------------------------------------- vLLM


class Colocated(ScriptedEngine):
    """Stands for vLLM: it sleeps outside `awake` and takes no prompt then."""

    def __init__(self, folder, codec, *settings, **options):
        super().__init__(codec, lambda _: "")
        self.asleep, self.policy = True, None

    def add(self, prompt, sampling=Sampling(), seed=0):
        assert not self.asleep and not prompt.frozen
        return super().add(prompt, sampling, seed)

    def awake(self, policy=None):
        self.asleep, self.policy = False, policy
        return self

    __enter__ = lambda self: self  # noqa: E731

    def __exit__(self, *error):
        self.asleep = True


def test_with_vllm_another_model_answers_where_the_policy_before_training_is_lost(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(vllm_colocated, "ColocatedEngine", Colocated)
    codec, policy = Codec.load(keeper.WEIGHTS), load_model(keeper.WEIGHTS, "float32", "cpu")

    def sampler(answerer, rank=0, **more):
        run = run_config(tmp_path, answerer, engine="vllm", **more)
        grpo = replace(GRPO, lora_rank=rank)
        run, grpo, setup = train.resolved(run, grpo, AGENT)
        return open_sampler(run, grpo, AGENT, located(setup), policy, codec)

    with pytest.raises(UserError, match="--answerer hf:FOLDER or openai:URL#MODEL"):
        sampler("base")
    assert isinstance(sampler("base", rank=2), Colocated)  # vLLM answers, without the adapter
    with pytest.raises(UserError, match="nor --sampler merged"):
        sampler("base", rank=2, sampler=("merged",))
    merged = sampler(f"hf:{folder}", rank=2, sampler=("merged",))
    assert isinstance(merged, WithFrozen) and "--sampler merged" in merged.hint
    engine = sampler(f"hf:{folder}")
    assert isinstance(engine, WithFrozen) and engine.engine.asleep
    where = Prompt((("Where is Anna?", False),), 6)
    with engine.awake(policy):
        assert not engine.engine.asleep and engine.engine.policy is policy
        keys = [engine.add(replace(where, frozen=k == 1), Sampling(0.0), 0) for k in range(2)]
        turns = {}
        while len(turns) < 2:
            turns |= engine.step()
    assert engine.engine.asleep
    assert not str(turns[keys[0]].response) and turns[keys[0]].finish is Finish.STOP
    answer = turns[keys[1]]
    (expected,) = said_by(folder, [{"prompt_ids": answer.prompt_ids}])
    assert answer.response_ids == expected.response_ids[:6]


def test_vllm_leaves_the_room_that_another_model_takes(folder, tmp_path, monkeypatch):
    gib = opening.gib_of_answerer
    small = answerer_gib(geometry(str(folder)))
    assert gib(f"hf:{folder}") == gib(str(folder)) == small > 1
    assert gib("base") == gib("") == gib("openai:http://127.0.0.1:9/v1#m") == 0
    # 4 billion weights in 16 bits, and the keys and values of 32,768 tokens
    assert gib("hf:Qwen/Qwen3-4B") == pytest.approx(7.49 + 4.5 + 1, abs=0.01)


# ---------------------------------------------------------------- evaluations


def evaluation(runs, **more):
    return EvalConfig(
        **dict(runs=str(runs), model=str(keeper.WEIGHTS), data=("ledger",), lengths=(5,), n=2,
               agents=("memupdate",), temperatures=(0.0,), device="cpu") | more
    )  # fmt: skip


def test_an_evaluation_takes_the_same_answerers(folder, server, tmp_path):
    fingerprints = {}
    for name, answerer in {
        "none": "", "bare": str(folder), "hf": f"hf:{folder}", "openai": f"openai:{server.url}#m"
    }.items():  # fmt: skip
        config = evaluation(tmp_path, name=name, answerer=answerer)
        engine = open_reader(config, [AGENT])
        assert isinstance(engine, WithFrozen) == bool(answerer)
        fingerprints[name] = engine_fingerprint(config, engine)
        engine.close()
    own = fingerprints["none"]
    assert fingerprints["bare"] == fingerprints["hf"] == f"{own} {fingerprint(str(folder))}"
    assert fingerprints["openai"] == f"{own} openai:#m"  # a server may move
    # a server may also be asked what to keep, and another model answer from that
    config = evaluation(tmp_path, answerer=f"hf:{folder}", model="", endpoint=(server.url,))
    engine = open_reader(config, [AGENT])
    assert not engine.codec.exact and engine.frozen.codec.exact
    assert engine_fingerprint(config, engine).endswith(f"characters {fingerprint(str(folder))}")
    engine.close()
    with pytest.raises(UserError, match="must be a folder, hf:FOLDER or openai:URL#MODEL"):
        evaluation(tmp_path, answerer="openai:m")


def test_the_rows_of_an_evaluation_are_what_the_answerer_said(server, tmp_path):
    config = evaluation(tmp_path, answerer=f"openai:{server.url}#m")
    tasks = [*ledger.make_questions(0, 2, 5)]
    with closing(open_reader(config, [AGENT])) as engine, engine.awake():
        rows = evaluate(engine, AGENT, tasks, Sampling(0.0), Cell("a", "", "", 5), tmp_path / "r")
    assert [row["response"] for row in rows] == [
        f" Anna joined {len(body['messages'][0]['content'])} Boris." for body in server.bodies
    ]
    assert len(rows) == 2 and not any(row["error"] for row in rows)
