import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cli
from agents import find
from agents.find import resolve
from commands.dryrun import dry_run
from commands.plan import card_of
from config import options
from config.errors import UserError
from config.options import GRPOConfig, RunConfig
from models.plan import geometry, plan, step_seconds
from tasks.downloads import SOURCES

RECIPES = sorted(Path(__file__).parent.parent.joinpath("recipes").glob("*.yaml"))


def recipe(name):
    stored = find.stored_settings(next(path for path in RECIPES if path.stem == name))
    run = RunConfig(**stored["run"])
    fields = stored.get("grpo", {}), stored.get("agent", {})
    return run, *find.resolve("default", run.model or options.EMBEDDED, *fields, run.agent)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_holds_what_differs_from_the_defaults_alone(path):
    stored = find.stored_settings(path)
    agent = find.find(stored["run"].get("agent", find.DEFAULT))
    kinds = {"run": RunConfig, "grpo": GRPOConfig, "agent": agent.Config}
    for section, values in stored.items():
        usual = asdict(kinds[section]())
        assert not [name for name, value in values.items() if value == usual[name]], section


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_commands_take_a_recipe(path, monkeypatch):
    tried = []
    monkeypatch.setattr("commands.dryrun.dry_run", lambda *how: tried.extend(how[:2]))
    monkeypatch.setattr("sys.argv", ["cli.py"])
    done = CliRunner().invoke(cli.app, ["train", "--config", str(path), "--dry-run"])
    assert done.exit_code == 0 and tried == [*recipe(path.stem)[:2]], done.output
    if path.stem != "laptop":
        done = CliRunner().invoke(cli.app, ["plan", "--config", str(path)])
        assert done.exit_code == 0 and str(path) in done.output, done.output


# a whole training, adapters on one card, and another agent, here on one rank: see the last test
@pytest.mark.parametrize("name", ["laptop", "qwen3-0.6b-24gb", "rememr1-qwen2.5-7b"])
def test_a_recipe_can_be_dry_run(name):
    said, (run, *rest) = [], recipe(name)
    dry_run(replace(run, devices=1, num_nodes=1, device="cpu"), *rest, said.append)
    assert said[-2].startswith("2 steps") and said[-2].endswith("the export loads.")
    assert any(run.data in line for line in said) is (run.data != "world")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_files_that_its_own_commands_bring(path):
    """And never those that `eval` asks without --data."""
    text = path.read_text(encoding="utf-8").splitlines()
    lines = [line.removeprefix("# First:").strip("# ") for line in text if line.startswith("#")]
    commands = [shlex.split(line)[3:] for line in lines if line.startswith("python cli.py data ")]
    there = {"world", ""}
    for verb, name, *words in commands:
        if verb == "get":
            there |= {f"data/{name}/{file.name}" for file in SOURCES[name][2]}
            continue
        source, out, *flags = (name, *words)
        assert source in there and not Path(source).name.startswith(("validation", "dev", "test"))
        assert [flag for flag in flags if flag.startswith("--")] == ["--lengths", "--n"]
        there |= {f"{out}/hqa_{n}.jsonl.gz" for n in flags[1].split(",")}
    run, config, _ = recipe(path.stem)
    assert {run.data, run.validation} <= there
    sizes = {f"{words[2]}/": int(words[-1]) for words in commands if words[0] == "build"}
    least = max(config.tasks_per_step)
    assert all(n >= least for out, n in sizes.items() if run.data.startswith(out))
    # the questions of training and validation are of different files
    sources = [words[1] for words in commands if words[0] == "build"]
    assert len(sources) == len(set(sources))


@pytest.mark.parametrize("name", [path.stem for path in RECIPES if path.stem != "laptop"])
def test_a_recipe_fits_the_cards_that_it_names(name):
    (run, config, agent), mode = recipe(name), "full"
    if config.lora_rank:
        mode = "lora"
    gib, devices = 24 if name.endswith("24gb") else 80, run.devices * run.num_nodes
    g = geometry(run.model)
    p = plan(g, mode, gib, devices, config, agent)
    assert p.fits and p.micro_tokens >= config.micro_tokens
    assert p.sleep == ("never" if config.lora_rank else "2")
    # what it says of its cost
    text = next(path for path in RECIPES if path.stem == name).read_text(encoding="utf-8")
    found = re.search(
        r"# By plan, --sections (\d+): (\d+) of (\d+) GiB, ([\d,]+) s a step, ([\d.]+) h for (\d+) "
        r"steps on (one|\d+) (.+) \(estimate\)\n", text,
    )  # fmt: skip
    sections, peak, memory, s, hours, steps, n, card = (w.replace(",", "") for w in found.groups())
    sections, peak, memory, s, steps = map(int, (sections, peak, memory, s, steps))
    seconds = sum(step_seconds(g, p, devices, config, agent, sections, card))
    assert (memory, steps, n.replace("one", "1")) == (gib, config.steps, str(devices))
    assert [round(max(p.rollout, p.update)), round(seconds)] == [peak, s]
    assert f"{seconds * steps / 3600:.1f}" == hours and card_of(gib, card) == (gib, card)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("laptop", "demo"),
        ("paper-qwen2.5-7b", "paper"),
        ("vime-qwen3-4b", "vime"),
        ("rememr1-qwen2.5-7b", "rememr1"),
    ],
)
def test_the_published_settings_are_those_of_the_preset(name, preset):
    run, config, agent = recipe(name)
    theirs = find.preset_of(preset)
    different = {key for key, value in theirs["grpo"].items() if getattr(config, key) != value}
    assert not different - {"micro_tokens"}
    assert all(getattr(agent.config, key) == value for key, value in theirs["agent"].items())
    assert all(getattr(run, key) == value for key, value in theirs["run"].items())


def test_what_stands_in_is_named_and_what_is_wrong_is_said(tmp_path):
    said, there = [], {"runs": str(tmp_path)}
    fields = {"tasks_per_step": (2,), "lora_rank": 4}
    config, agent = resolve("default", options.EMBEDDED, fields, {})
    run = RunConfig(model="Qwen/Qwen3-4B", data="mine.jsonl", engine="vllm", devices=2)
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="lora_targets 'w_q' do not fit"):
        dry_run(replace(run, devices=1), replace(config, lora_targets="w_q"), agent, said.append)
    for words in ("tokenizer", "Qwen3ForCausalLM", "mine.jsonl", "vLLM"):
        assert any(words in line for line in said), words
    for changed, resume, why in (
        ({"devices": 16}, False, "2 tasks and there are 16 ranks"),
        (there | {"name": "there"}, False, "is there already"),
        (there | {"name": "nowhere"}, True, "There is no run"),
        ({"sleep": "2"}, False, "Sleep level 2"),
        ({"model": "foo/bar"}, False, r"needs its config\.json"),
    ):
        with pytest.raises(UserError, match=why):
            dry_run(replace(run, **changed), config, agent, said.append, resume)


def test_a_dry_run_exports_always_and_two_ranks_stand_in_for_many(monkeypatch):
    """Its own checkpoints are small, and what is tried is more than the run needs."""
    asked, said = [], []

    def stop(run, config, *_, **__):
        asked.append((run.keep_checkpoints, run.devices, run.num_nodes, config.tasks_per_step))
        raise UserError("far enough")

    monkeypatch.setattr("commands.train.train", stop)
    config, agent = resolve("default", options.EMBEDDED, {}, {})
    for kept in (0, 3):
        with pytest.raises(UserError, match="far enough"):
            dry_run(RunConfig(device="cpu", keep_checkpoints=kept), config, agent, [].append)
    assert asked == [(1, 1, 1, (1,)), (3, 1, 1, (1,))]
    run, *rest = recipe("rememr1-qwen2.5-7b")
    with pytest.raises(UserError, match="far enough"):
        dry_run(run, *rest, said.append)
    assert asked[-1][1:] == (2, 1, (2,)) and any("2 processes" in line for line in said)
