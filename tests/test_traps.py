"""What went wrong in ReMemR1's published code and cannot here.

Holds: TRAPS, each with the tests that would notice.

Traps of one agent are tested beside it; those of the plumbing around it, here.
"""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from conftest import random_policy

import grpo
import suites
from agents import find
from agents.rewards import grade
from commands import train
from config.errors import UserError
from config.options import GRPOConfig, RunConfig
from embedded import tiny
from engines import vllm_colocated
from engines.hf import TransformersEngine
from engines.scripted import ScriptedEngine
from grpo import advantages_of
from memagent import Finish, Group, Prompt, Trajectory, Turn
from rollout import rollout
from tasks import worlds

ROOT = Path(__file__).parents[1]
ROOMS = (
    "agents",
    "commands",
    "config",
    "embedded",
    "engines",
    "models",
    "report",
    "suites",
    "tasks",
    "tokens",
)
MODULES = sorted(
    [*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).glob("*.py"))]
)
TRAPS = {
    # the memory before a turn is the prompt's own, nothing is searched for
    "a reward for the memory that never matched, because it searched a prompt": (
        "test_rememr1.test_gain_and_level_and_each_reward_alone"
    ),
    "a tag that was only found on one line": (
        "test_rememr1.test_format_and_level_of_an_update test_rememr1.test_the_parsers_table"
    ),
    "a turn's reward that counted twice unnoticed": "test_advantages.test_golden_advantages",
    "prompts that differed between training and evaluation": (
        "test_rememr1.test_training_and_evaluation_see_the_same_prompts "
        "test_rememr1.test_the_box_of_the_final_prompt_may_be_upstreams"
    ),
    "a memory that became the whole response, or nothing": (
        "test_rememr1.test_what_becomes_the_memory "
        "test_rememr1.test_a_response_without_an_update_never_wipes_the_memory_unnoticed"
    ),
    # that copying pays and length costs nothing stands in ReMemR1.turn_rewards
    "a lexical reward for parts of words and for other letters' case": (
        "test_rememr1.test_how_much_of_an_answer_a_text_holds"
    ),
    # the whole response is read; --outcome em normalises, the published one not
    "a format reward that left out half of the response": (
        "test_rememr1.test_format_and_level_of_an_update "
        "test_train.test_what_each_outcome_setting_pays_for_a_nearly_literal_answer"
    ),
    "validation that graded another form of the answer than the prompt asked for": (
        "test_traps.test_validation_grades_the_form_that_the_prompt_asks_for"
    ),
    # best by validation, not by the training batch
    "the best checkpoint chosen by the training batch": (
        "test_train.test_the_best_and_the_last_checkpoints_are_kept_and_exported"
    ),
    # a word's weight in tfidf and bm25 depends on all candidates: these two are fitted at every
    # query, the default never
    "what is found depended on hashes, or was found with nothing in common": (
        "test_memory.test_what_is_found_does_not_depend_on_hashes "
        "test_memory.test_ties_go_to_the_most_recent_and_nothing_in_common_is_not_found "
        "test_memory.test_the_words_of_an_item_are_taken_once"
    ),
    # with one task alone
    "a batch of one task that failed": (
        "test_rememr1.test_training_and_evaluation_see_the_same_prompts"
    ),
    "failed requests that left the denominator": (
        "test_eval.test_failures_and_empty_answers_are_wrong_and_stay_in_n "
        "test_eval.test_failures_are_tried_again_then_written_and_redone_when_asked"
    ),
    "rows doubled by a second run": (
        "test_eval.test_cut_at_any_byte_and_resumed_gives_the_rows_of_an_uninterrupted_run "
        "test_eval.test_killed_with_sigkill_at_random_moments"
    ),
    # one way, all answers; upstream's two-way one under its own name
    "a metric that gave an article or one letter full marks": "test_grading.test_metrics",
    "evidence at the same places in every document": (
        "test_hqa.test_fixed_places_under_compat_seed4_only "
        "test_hqa.test_every_possible_choice_is_drawn_alike"
    ),
    "other questions at every length, and titles listed twice": (
        "test_readers.test_eval_files_say_where_the_evidence_stands "
        "test_hqa.test_the_same_questions_at_every_length "
        "test_hqa.test_questions_whose_evidence_cannot_stand_so_are_passed_over "
        "test_hqa.test_build_refuses "
        "test_hqa.test_no_second_version_of_an_own_title"
    ),
    "a rule about the distance of evidence that was not checked": (
        "test_hqa.test_the_fast_check_of_evidence_places_equals_the_definition "
        "test_hqa.test_evidence_stands_as_asked"
    ),
    "a switch without effect, and an environment that was set for good": (
        "test_rememr1.test_what_is_looked_for_stands_in_the_next_prompt_and_only_there "
        "test_rememr1.test_the_question_is_looked_for_whether_or_not_the_policy_asks "
        "test_traps.test_the_environment_is_put_back"
    ),
    "paths, hosts and keys of one machine": (
        "test_traps.test_nothing_of_one_machine_is_in_the_repository"
    ),
    "one limit of tokens for all turns": "test_traps.test_each_turn_ends_at_its_own_limit",
    "packages that were imported and not required": (
        "test_traps.test_whatever_is_imported_is_required"
    ),
    "modules and names that do not exist": (
        "test_traps.test_every_module_can_be_imported_and_names_nothing_undefined "
        "test_advantages.test_alpha_one_is_the_outcome_alone_and_alpha_zero_the_turns_alone"
    ),
    "lists of turns' rewards padded in silence": (
        "test_traps.test_rewards_of_turns_that_do_not_fit_the_turns_are_an_error"
    ),
    "advantages that differ from their description": (
        "test_advantages.test_a_group_of_one_has_no_baseline "
        "test_advantages.test_divided_by_the_deviation_the_scale_of_turn_rewards_cancels "
        "test_rememr1.test_compat_sets_every_axis"
    ),
}


def test_every_trap_has_tests_that_are_there():
    assert len(TRAPS) == 24
    for tests in TRAPS.values():
        for name in tests.split():
            module, _, test = name.partition(".")
            assert callable(getattr(importlib.import_module(module), test)), name


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ("boxed", "\\boxed{Lima}", "Therefore, the answer is Lima."),
        ("sentence", "Therefore, the answer is Lima.", "\\boxed{Lima}"),
    ],
)
def test_validation_grades_the_form_that_the_prompt_asks_for(codec, policy, form, right, wrong):
    """In validation and in the rewards of training."""
    run = RunConfig(agent="rememr1", device="cpu")
    module = train.build(run, GRPOConfig(), tiny.agent("rememr1", form=form))
    for answer, score in ((right, 1.0), (wrong, 0.0)):
        final = Turn(Prompt((), 8, final=True), [], [], [], Finish.STOP, codec.text(answer))
        trajectory = Trajectory(
            replace(worlds.make_task(0, 2, "one_fact"), answers=("Lima",)), [final]
        )
        grade(module.agent, trajectory, module.config.outcome)
        assert trajectory.reward == final.rewards["format"] == score
    task = replace(worlds.make_task(0, 2, "one_fact"), answers=("Lima",))
    for answer, score in ((right, 1.0), (wrong, 0.0)):
        engine = ScriptedEngine(
            codec, lambda prompt, answer=answer: answer if prompt.final else "<update>x</update>"
        )
        agent = tiny.agent("rememr1", form=form, final_tokens=60, step_tokens=60)
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


def test_each_turn_ends_at_its_own_limit(codec):
    engine = TransformersEngine(random_policy(codec), codec)
    agent = tiny.agent("rememr1", step_tokens=11, final_tokens=5)
    jobs = [(worlds.make_task(k, 3, "two_hop"), 0) for k in range(8)]
    for trajectory in rollout(engine, agent, jobs):
        for turn in trajectory.turns:
            assert len(turn.response_ids) <= (5 if turn.prompt.final else 11)
            assert (turn.finish == "length") == (turn.response_ids[-1] not in codec.eos_ids)


def test_whatever_is_imported_is_required():
    """One list of packages, of pinned versions, that has everything the modules import."""
    lines = [
        line.split("#")[0].strip()
        for name in (
            "requirements.txt",
            "requirements-gpu.txt",
            "requirements-documents.txt",
            "requirements-environments.txt",
        )
        for line in (ROOT / name).read_text().splitlines()
    ]
    required = {
        re.split(r"[=<>\[ ]", line)[0].lower().replace("_", "-")
        for line in lines
        if line and not line.startswith("-")
    }
    todo = [*required]
    while todo:  # and what these bring with them
        try:
            brought = {
                re.split(r"[^\w.-]", line)[0].lower().replace("_", "-")
                for line in requires(todo.pop()) or ()
                if "extra ==" not in line
            }
        except PackageNotFoundError:  # of the GPU's list
            continue
        todo += brought - required
        required |= brought
    own, known = {path.stem for path in MODULES} | {*ROOMS}, packages_distributions()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for top in (
                {name.partition(".")[0] for name in names}
                - own
                - sys.stdlib_module_names
                - {"__future__"}
            ):
                assert {p.lower().replace("_", "-") for p in known.get(top, [top])} & required, (
                    path.name,
                    top,
                )


def dotted(path: Path) -> str:
    """agents/rememr1.py -> agents.rememr1; agents/__init__.py -> agents"""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@cache
def found_by_ruff() -> list[dict]:
    """Check all modules in one call, for every process takes longer to start than to look."""
    words = "check --isolated --select F821,F401,F811,F841 --output-format json".split()
    command = [sys.executable, "-m", "ruff", *words, *map(str, MODULES)]
    done = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert done.returncode == bool(found), done.stderr
    assert {Path(one["filename"]) for one in found} <= {*MODULES}  # or none would be told apart
    return found


@cache
def texts() -> dict[Path, str]:
    paths = [*MODULES, *ROOT.glob("bench/*.py")]
    return {path: path.read_text(encoding="utf-8") for path in paths}


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_every_module_can_be_imported_and_names_nothing_undefined(path):
    """Ruff's rule F821, which `make lint` applies to all files, here to each module.

    And a module that nothing imports is noticed; an agent's is imported by its name.
    """
    importlib.import_module(dotted(path))
    assert not [one for one in found_by_ruff() if Path(one["filename"]) == path]
    others = "\n".join(text for other, text in texts().items() if other != path)
    room, _, name = dotted(path).rpartition(".")
    imports = rf"^\s*(from|import) {dotted(path)}\b"
    if room:
        imports += rf"|^\s*from {room} import [\w, ]*\b{name}\b"
    by_name = room == "agents" and name in find.names() and find.find(name).name == name
    by_name |= room == "suites" and name.replace("_", "-") in suites.names()
    # cli.py, and what `python -m` runs
    script = 'if __name__ == "__main__":' in texts()[path]
    assert by_name or script or re.search(imports, others, re.M)


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
