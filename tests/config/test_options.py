import math
from dataclasses import replace
from pathlib import Path

import pytest

from agents import find
from agents.rememr1 import ReMemR1Config
from config import files, options, settings
from config.errors import UserError
from config.options import EMBEDDED, AskConfig, EvalConfig, GRPOConfig, RunConfig, StreamConfig
from config.plugins import load_file


@pytest.mark.parametrize(
    ("cls", "field", "values"),
    [
        (GRPOConfig, "steps", (0, -1, 2**63)),
        (GRPOConfig, "tasks_per_step", ((), (8, 0))),
        (GRPOConfig, "betas", ((0.9,), (0.9, 1.0), (-0.1, 0.9), (0.9, 0.9, 0.9))),
        (GRPOConfig, "lr", (-1.0, math.nan, math.inf)),
        (GRPOConfig, "grad_clip", (-1.0, 0.0, math.nan)),
        (GRPOConfig, "clip_low", (-0.1, 1.1)),
        (GRPOConfig, "dual_clip", (-1.0, 0.5)),
        (GRPOConfig, "temperature", ((), (0.0,), (1.0, math.inf))),
        (GRPOConfig, "top_p", (0.0, 1.1)),
        (GRPOConfig, "grow_at", (math.nan,)),
        (GRPOConfig, "seed", (-1, 2**63)),
        (ReMemR1Config, "memory_reward", ("new",)),
        (RunConfig, "data", ("",)),
        (RunConfig, "lengths", ((), (0,))),
        (RunConfig, "dtype", ("float33", "dtype")),
        (EvalConfig, "lengths", ((0,), (4, 4))),
        (EvalConfig, "temperatures", ((), (-1.0,), (math.nan,))),
    ],
)
def test_a_value_out_of_range_is_one_sentence_that_names_the_setting(cls, field, values):
    for value in values:
        with pytest.raises(UserError, match=rf"^{field} (must|has) [^\n]+\.$"):
            replace(cls(), **{field: value})


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (GRPOConfig, {"rows_per_update": 64, "updates_per_rollout": 2}),
        (GRPOConfig, {"quantise": True}),
        (EvalConfig, {"quantise": True, "engine": "vllm"}),
        (EvalConfig, {"quantise": True, "endpoint": ("http://a",)}),
        (AskConfig, {"dtype": "float32", "endpoint": ("http://a",)}),
        (EvalConfig, {"agents": ("full", "full")}),
        (StreamConfig, {"arms": ("rag", "rag")}),
        (StreamConfig, {"model": "a"}),
        (StreamConfig, {"dtype": "float32"}),
    ],
)
def test_values_that_do_not_go_together_are_refused(cls, fields):
    with pytest.raises(UserError, match=next(iter(fields)).partition("_")[0]):
        cls(**fields)


def test_values_at_the_edge_of_a_range_are_allowed():
    GRPOConfig(lr=0.0, warmup=0, grad_clip=math.inf, decay_from=0.0, grow_at=2.0, betas=(0.0, 0.0))
    RunConfig(keep_trajectories=0, keep_checkpoints=0, save_every=1)
    EvalConfig(temperatures=(0.0,))


def test_the_presets_are_the_published_settings():
    """Those of the released code of MemAgent and vime, field by field; every one can be built."""
    for name in find.presets():
        find.resolve(name, options.EMBEDDED, {}, {})
    common = dict(
        clip_low=0.2, kl=1e-3, lr=1e-6, top_p=1.0, temperature=(1.0,), grad_clip=1.0,
        decay_from=1.0, turns_per_trajectory=0, without_signal="keep",
    )  # fmt: skip
    grpo = {
        "paper": common | dict(
            tasks_per_step=(128,), group_size=16, updates_per_rollout=16, credit="share",
            normalisation="mean", aggregation="token_mean", clip_high=0.2, dual_clip=3.0,
            importance="none", warmup=20, betas=(0.9, 0.999), weight_decay=0.01,
            rows_per_update=0, warmup_from="zero",
        ),
        "vime": common | dict(
            tasks_per_step=(8,), group_size=8, credit="split", normalisation="std",
            aggregation="turn_mean", clip_high=0.3, dual_clip=0.0, importance="none",
            rows_per_update=64, updates_per_rollout=1, warmup=0, betas=(0.9, 0.98),
            weight_decay=0.1,
        ),
    }  # fmt: skip
    agent = {
        "paper": dict(
            chunk_tokens=5000, memory_tokens=1024, final_tokens=1024, max_sections=8,
            over="center", empty="placeholder", thinking=False,
        ),
        "vime": dict(
            chunk_tokens=2048, memory_tokens=1024, final_tokens=256, max_sections=64,
            over="head", empty="keep", thinking=True,
        ),
    }  # fmt: skip
    run = {
        "paper": {"shuffle": False, "save_every": 10},
        "vime": {"shuffle": True, "save_every": 50},
        "rememr1": {"shuffle": False, "save_every": 20},
    }
    for name, wanted in run.items():
        config = RunConfig(**find.preset_of(name)["run"])
        assert {k: getattr(config, k) for k in wanted} == wanted
    for name in ("paper", "vime"):
        grpo_config, reader = find.resolve(name, "no model folder", {}, {})
        assert {k: getattr(grpo_config, k) for k in grpo[name]} == grpo[name]
        assert {k: getattr(reader.config, k) for k in agent[name]} == agent[name]
        assert reader.config.layout == "paper"


def test_numbers_as_people_write_them(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "grpo: {lr: 1e-3, kl: 0, betas: [0, 0.9]}\nagent: {max_sections: null}\nrun:\n"
    )
    assert find.stored_settings(tmp_path / "c.yaml") == {
        "grpo": {"lr": 1e-3, "kl": 0.0, "betas": (0.0, 0.9)},
        "agent": {"max_sections": None},
        "run": {},
    }


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"run: 5", "run must be"),
        (b"run: {lengths: 4}", "run.lengths"),
        (b"run: {lengths: [4, x]}", "run.lengths"),
        (b"run: {lengths: [0]}", "run.lengths"),
        (b"run: {name: 5}", "run.name"),
        (b"run: {name: !!binary aGk=}", "run.name must"),
        (b"run: {name: 2024-07-26 10:00:00}", "run.name must"),
        (b'run: {name: "\\ud800"}', "invalid Unicode"),
        (b"run: {trust_remote_code: 1}", "run.trust_remote_code"),
        (b"agent: {chunk_tokens: 2.5}", "agent.chunk_tokens"),
        (b"agent: {chunk_tokens: true}", "agent.chunk_tokens"),
        (b"agent: {chunk_tokens: null}", "agent.chunk_tokens"),
        (b"agent: {template_date: 2026-11-29}", "template_date"),  # it went
        (b"grpo: {lr: fast}", "grpo.lr"),
        (b"grpo: {lr: true}", "grpo.lr"),
        (b"grpo: {betas: [0.9]}", "grpo.betas"),
        (b"grpo: {aggregation: [1]}", "grpo.aggregation"),
        (b"grpo: {1: 2}", "no setting 1"),
        (b"grpo: {chunk_tokens: 9}", "no setting 'chunk_tokens'"),
        (b"other: {}", "'other'"),
        (b"run: {engine_window: 4096}", "engine_window"),  # of an earlier version
        (b"grpo: {steps: " + b"9" * 5000 + b"}", "no valid YAML"),
        (b"run: {name: \xff}", "no valid YAML"),
    ],
)
def test_what_is_wrong_in_a_file_of_settings_is_named(tmp_path, content, named):
    (tmp_path / "c.yaml").write_bytes(content)
    with pytest.raises(UserError) as error:
        find.stored_settings(tmp_path / "c.yaml")
    message = str(error.value)
    assert "c.yaml" in message and named in message and "\n" not in message


def test_what_a_model_says_about_reading_is_checked_too(tmp_path):
    (tmp_path / "agent.yaml").write_text("agent: {chunk_tokens: 2.5}")
    with pytest.raises(UserError, match=r"agent\.yaml: agent\.chunk_tokens must"):
        find.resolve("default", tmp_path, {}, {})


def test_settings_that_an_agent_would_not_have_by_itself_are_named():
    usual = find.of_model(EMBEDDED)
    agents = {
        "bm25": find.make("bm25", usual | {"top_k": 2}),
        "full": find.make("full", usual),
        "memagent": find.make("memagent", usual | {
            "chunk_tokens": 32, "memory_tokens": 20, "max_sections": 8, "over": "head",
        }),
        "memupdate": find.make("memupdate", usual | {"embedder": "openai:https://key@host/v1#m"}),
    }  # fmt: skip
    said = find.altered(agents, EvalConfig())
    assert {name: said.get(name) for name in ("bm25", "full", "memupdate")} == {
        "bm25": "top_k 2", "full": None, "memupdate": "embedder openai:#m",
    }  # fmt: skip
    assert said["memagent"] == "chunk_tokens 32, memory_tokens 20, max_sections 8, over head"
    # beside a server nothing is known of its model: the agent's own defaults are the usual ones
    assert "chunk_tokens 24" in find.altered(agents, EvalConfig(endpoint=("http://h/v1",)))["full"]


def test_a_resumed_run_has_the_settings_it_began_with_and_flags_on_top(tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    folder.mkdir()
    begun = (
        RunConfig(name="mine", runs=str(tmp_path), lengths=(3,)),
        GRPOConfig(steps=7, lr=1e-6),
        find.make("memagent", {"chunk_tokens": 9}).config,
    )
    name = {"name": "mine", "runs": str(tmp_path)}
    # stopped before it had written its settings
    assert find.resumed("default", name, {}, {}) == [name, {}, {}]
    files.dump(folder / "config.yaml", run=begun[0], grpo=begun[1], agent=begun[2])

    def now(preset="default", run=name, grpo=None, agent=None):
        run, grpo, agent = find.resumed(preset, run, grpo or {}, agent or {})
        grpo, agent = find.resolve(preset, options.EMBEDDED, grpo, agent)
        return RunConfig(**run), grpo, agent.config

    def changed(configs):
        return find.changed(
            find.begun(folder), **dict(zip(("run", "grpo", "agent"), configs, strict=True))
        )

    assert now() == begun and changed(now()) == []
    free = now(
        run=name | {"save_every": 3, "device": "cpu", "keep_trajectories": 0}, grpo={"steps": 9}
    )
    assert free[1].steps == 9 and free[1].lr == 1e-6 and changed(free) == []
    assert changed(now(grpo={"seed": 9, "lr": 0.5})) == [
        "grpo.lr 1e-06, not 0.5",
        "grpo.seed 0, not 9",
    ]
    assert changed(now(agent={"chunk_tokens": 8})) == ["agent.chunk_tokens 9, not 8"]
    assert changed(now(run=name | {"lengths": (2,)})) == ["run.lengths (3,), not (2,)"]
    # a preset given with --resume counts
    assert "agent.chunk_tokens 9, not 2048" in changed(now("vime"))
    folder.rename(tmp_path / "moved")
    moved = find.resumed("default", {"name": "moved", "runs": str(tmp_path)}, {}, {})[0]
    assert (moved["name"], moved["runs"], moved["lengths"]) == ("moved", str(tmp_path), (3,))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "moved").rename(tmp_path / "runs" / "mine")
    assert find.resumed("default", {"name": "mine"}, {}, {})[0] == moved | {
        "name": "mine",
        "runs": "runs",
    }
    with pytest.raises(UserError, match="by --name"):
        find.resumed("default", {}, {}, {})


def test_the_docs_name_all_settings_that_are_no_flags():
    text = Path(settings.__file__).parents[1].joinpath("docs/train.md").read_text(encoding="utf-8")
    for cls in (RunConfig, GRPOConfig, EvalConfig, find.find("memagent").Config):
        assert all(f"`{name}`" in text for name in settings.unflagged(cls)), cls


def test_a_class_of_a_users_own_is_checked_and_described(tmp_path):
    """By the plain decorator of dataclasses; its own fields and those that it inherits."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import dataclass\nfrom memagent import ReadConfig\n"
        "@dataclass(frozen=True)\nclass Mine(ReadConfig):\n"
        '    k: int = 3\n    """how\n    many"""\n'
        "    def __post_init__(self):\n        if self.k > 9: raise ValueError('k is large')\n"
    )
    cls = load_file(path).Mine
    assert settings.docs(cls)["k"] == "how many" and "section" in settings.docs(cls)["chunk_tokens"]
    assert replace(cls(k=4), chunk_tokens=9) == cls(chunk_tokens=9, k=4)
    for given in ({"k": "x"}, {"chunk_tokens": 0}, {"l": 1}, {"k": 10}):
        with pytest.raises(UserError, match=next(iter(given))):
            cls(**given)


SERVED = "openai:https://me:secret@host/v1#m"


@pytest.mark.parametrize(
    ("fields", "given", "refused"),
    [
        ({"reward": "x.py:f"}, {}, True),
        ({"reward": "x.py:f"}, {"trust_remote_code": True}, False),
        ({"reward": "x.py:f"}, {"trust_remote_code": False}, True),
        ({"reward": "x.py:f"}, {"reward": "y.py:f"}, False),
        ({"data": "mine.py:tasks"}, {}, True),
        ({"agent": "nowhere/my.py"}, {}, True),
        ({"agents": ("full", "my.py@untrained")}, {}, True),
        ({"also": ("my.py=0.1",)}, {}, True),
        ({"suite": "nowhere/my.py"}, {}, True),
        ({"logger": ("a.B",)}, {}, True),
        ({"interpreter": "python3"}, {}, True),
        ({"trust_remote_code": True}, {}, True),
        ({"embedder": SERVED}, {}, True),
        ({"embedder": SERVED}, {"trust_remote_code": True}, True),  # an address is no code
        ({"embedder": SERVED}, {"embedder": SERVED}, False),
        ({"bank": "x.db"}, {}, True),
        (
            {"agent": "memagent", "model": "a/b", "trust_remote_code": False, "reward": ""},
            {},
            False,
        ),
    ],
)
def test_what_came_with_data_runs_no_code_and_asks_no_address(fields, given, refused):
    try:
        find.check_reach(Path("c.yaml"), fields, given)
    except UserError as error:
        assert refused and "c.yaml" in str(error) and "--" in str(error)
        assert "secret" not in str(error)
    else:
        assert not refused
