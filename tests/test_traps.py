"""What went wrong in ReMemR1's published code and cannot here: the plumbing around agents."""

import ast
import contextlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

import grpo
from agents.rewards import grade
from config.errors import UserError
from config.options import GRPOConfig, RunConfig
from embedded import tiny
from engines import vllm_colocated
from engines.scripted import ScriptedEngine
from grpo import advantages_of
from memagent import Finish, Group, Prompt, Trajectory, Turn
from rollout import rollout
from tasks import worlds

ROOT = Path(__file__).parents[1]
ROOMS = "agents commands config embedded engines models report suites tasks tokens".split()
MODULES = sorted(
    [*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).glob("*.py"))]
)


@pytest.mark.parametrize("form", ["boxed", "sentence"])
def test_validation_and_reward_grade_the_form_that_the_prompt_asks_for(codec, policy, form):
    answers = {"boxed": "\\boxed{Lima}", "sentence": "Therefore, the answer is Lima."}
    task = replace(worlds.make_task(0, 2, "one_fact"), answers=("Lima",))
    agent = tiny.agent("rememr1", form=form, final_tokens=60, step_tokens=60)
    for written, answer in answers.items():
        score = float(written == form)
        final = Turn(Prompt((), 8, final=True), [], [], [], Finish.STOP, codec.text(answer))
        grade(agent.on(codec), trajectory := Trajectory(task, [final]), "exact")
        assert trajectory.reward == final.rewards["format"] == score
        engine = ScriptedEngine(
            codec, lambda prompt, answer=answer: answer if prompt.final else "<update>x</update>"
        )
        module = grpo.GRPO(policy, engine, agent, None, GRPOConfig(), validation=[task])
        assert module.validate() == {"score": score, "n": 1}


def test_nothing_of_one_machine_is_in_the_repository():
    """No paths of a home or a mount, no keys, no addresses but this machine's own.

    Nor GPUs picked by number; one GPU is the default.
    """
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    texts = [
        ROOT / name
        for name in tracked or map(str, MODULES)
        if Path(name).suffix in (".py", ".yaml", ".toml", ".txt", ".md", ".json", "")
    ]
    for path in texts:
        text = path.read_text(encoding="utf-8", errors="ignore")
        found = re.search(
            r"(?<![\w.~])/(home|root|mnt|Users|workspace|work)/\w+|\b(sk|hf|ghp)[-_][\w-]{20,}"
            r"|\b(?!127\.|0\.0\.0\.0)\d+\.\d+\.\d+\.\d+:\d"
            r"|CUDA_VISIBLE_DEVICES\s*=\s*[\"']?\d",
            text,
        )
        assert path.name == "test_traps.py" or not found, (path.name, found)
    assert RunConfig().devices == 1


def test_the_environment_is_put_back(monkeypatch):
    """What an engine sets, changes or removes while it is built."""
    monkeypatch.setenv("MEMAGENT_A", "1")
    monkeypatch.setenv("MEMAGENT_B", "2")
    before = dict(os.environ)
    with vllm_colocated.preserve_process():
        os.environ |= {"MEMAGENT_A": "9", "MEMAGENT_C": "3"}
        del os.environ["MEMAGENT_B"]
    assert dict(os.environ) == before


def names_in(requirement: str) -> str:
    """Return the package that a line of requirements names."""
    return re.split(r"[^\w.-]", requirement.split("#")[0].strip())[0].lower().replace("_", "-")


def imported(path: Path) -> set[str]:
    """Return the packages that a module imports, anywhere in it."""
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    names = [a.name for node in nodes if isinstance(node, ast.Import) for a in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def test_whatever_is_imported_is_required():
    """The lists of packages, of pinned versions, have everything the modules import."""
    lists = ("", "-gpu", "-environments", "-embeddings")
    lines = [
        x for part in lists for x in (ROOT / f"requirements{part}.txt").read_text().split("\n")
    ]
    required = {names_in(line) for line in lines} - {""}
    todo = [*required]
    while todo:  # and what these bring with them
        with contextlib.suppress(PackageNotFoundError):  # of the GPU's list
            brought = {names_in(x) for x in requires(todo.pop()) or () if "extra ==" not in x}
            todo += brought - required
            required |= brought
    own = {path.stem for path in MODULES} | {*ROOMS, "__future__"}
    known = packages_distributions()
    for path in MODULES:
        for top in imported(path) - own - sys.stdlib_module_names:
            packages = {name.lower().replace("_", "-") for name in known.get(top, [top])}
            # refused where it lacks; comes with textworld
            optional = (path.name, top) in (
                ("office.py", "kreuzberg"),
                ("_alf_worker.py", "fast_downward"),
            )
            assert optional or packages & required, (path.name, top)


def test_rewards_of_turns_that_do_not_fit_the_turns_are_an_error(codec, policy):
    """A list that is too short is no list that is padded."""
    engine = ScriptedEngine(
        codec, lambda prompt: "\\boxed{x}" if prompt.final else "<update>x</update>"
    )
    agent = tiny.agent("rememr1", step_tokens=30)
    (trajectory,) = rollout(engine, agent, [(worlds.make_task(0, 2, "two_hop"), 0)])
    module = grpo.GRPO(policy, engine, agent, None, GRPOConfig())
    grade(module.agent, trajectory, module.config.outcome)
    assert [turn.rewards["format"] for turn in trajectory.turns] == [1, 1, 1]
    assert len(advantages_of(Group(trajectory.task, [trajectory]), GRPOConfig())[0]) == 3
    rewards = agent.turn_rewards(trajectory)
    for wrong in (rewards[:-1], [*rewards, {"memory": 0.0}]):
        module.agent.turn_rewards = lambda trajectory, wrong=wrong: wrong
        with pytest.raises(UserError, match=f"{len(wrong)} rewards for the 3 turns"):
            grade(module.agent, trajectory, module.config.outcome)
