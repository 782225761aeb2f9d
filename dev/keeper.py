"""What differs for the embedded policy that keeps a store: tokens, demonstrator, examples.

A call of a tool is six to eight tokens: what stands around the content and the id is one token
each, and so are ids and dates. The content comes before the id, so that the id of an entry can be
found by the name that was just written (`base.make_model`, finds_ids).
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from agents import find
from agents.memupdate import NO_ENTRIES, MemUpdate
from config import files
from dev import base
from dev.base import BaseConfig, Example, Fact
from memagent import Finish, Prompt, Turn
from suites import ledger
from tasks import worlds
from tokens.codec import Codec

WEIGHTS = Path(__file__).parent.parent / "embedded" / "keeper_weights"
ENTRIES = 6  # the hard budget
IDS = 64  # m1 to m64 are one token each; further ids are several
CREATE = '<tool_call>{"name": "manage_memory", "arguments": {"operation": "create", "content": "'
UPDATE = '<tool_call>{"name": "manage_memory", "arguments": {"operation": "update", "content": "'
DELETE = '<tool_call>{"name": "delete_memory", "arguments": {"memory_id": "'
ID, END = '", "memory_id": "', '"}}</tool_call>'
ENTRY = re.compile(r"\[(m\d+)\] (\S+) (\w+) (\w+) (\w+)\.")
# fields of BaseConfig, chosen by what GRPO makes of it on the dev split (dev/LESSONS.md)
TRAINING = dict(steps=1800, careless_steps=60)
EPISODES = 6  # in a step


def agent(**settings: object) -> MemUpdate:
    """Return the agent as the embedded policy was trained to run it."""
    return find.make("memupdate", find.of_model(WEIGHTS) | settings)


def make_tokenizer():
    """Make the tokenizer of `base` with the pieces of this agent's prompts and calls."""
    reader = agent()
    pieces = {piece for name in ("build", "answer")
              for piece, constant in reader.template(name) if constant}  # fmt: skip
    pieces |= {NO_ENTRIES, CREATE, UPDATE, DELETE, ID, END, " \\boxed{", "\\boxed{"}
    pieces |= {"\n", "[", "]", *(f"m{k}" for k in range(1, IDS + 1))}
    days = [ledger.day(k) for k in range(1, ledger.MOST_SESSIONS + 1)]
    return base.make_tokenizer(pieces, after_blank=days)


# ---------------------------------------------------------------- the demonstrator


def demonstrate(rng: random.Random, prompt: Prompt, careful: float) -> str:
    """Write the calls of an imperfect demonstrator for one session.

    Of every sentence it draws whether it is careful. If so, a person's place is written once: by an
    update of the entry about that person, else by a new entry, for which an entry that is no place,
    or the oldest one, is deleted where the store is full. Otherwise it does anything.
    """
    stored = {
        id: (person, verb, place) for id, _, person, verb, place in ENTRY.findall(prompt.memory)
    }
    calls: list[str] = []
    facts = base.parse_facts(prompt.section.partition("\n")[2])
    for k, fact in enumerate(facts):
        if rng.random() < careful:
            places = {later[0] for later in facts[k + 1 :] if later[2] in worlds.PLACES}
            calls += [] if fact[0] in places else careful_calls(stored, fact)
        else:
            calls += careless_calls(rng, stored, fact)
    return "".join(calls)


def careful_calls(stored: dict[str, Fact], fact: Fact) -> list[str]:
    if fact[2] not in worlds.PLACES:
        return []
    about = [id for id, known in stored.items() if known[0] == fact[0]]
    if about:
        if stored[about[-1]] == fact:
            return []
        stored[about[-1]] = fact
        return [update(fact, about[-1])]
    calls = []
    if len(stored) >= ENTRIES:
        useless = [id for id, known in stored.items() if known[2] not in worlds.PLACES]
        out = (useless or [*stored])[0]
        del stored[out]
        calls.append(f"{DELETE}{out}{END}")
    stored[f"new {fact[0]}"] = fact
    return [*calls, create(fact)]


def careless_calls(rng: random.Random, stored: dict[str, Fact], fact: Fact) -> list[str]:
    drawn = rng.random()
    ids = [id for id in stored if id.startswith("m")]
    if drawn < 0.5:
        return [create(fact)]
    if drawn < 0.75 or not ids:
        return []
    chosen = rng.choice(ids)
    if drawn < 0.92:
        return [update(fact, chosen)]
    del stored[chosen]
    return [f"{DELETE}{chosen}{END}"]


def create(fact: Fact) -> str:
    return f"{CREATE} {worlds.sentence(fact)}{END}"


def update(fact: Fact, id: str) -> str:
    return f"{UPDATE} {worlds.sentence(fact)}{ID}{id}{END}"


def answer(question: str, memory: str) -> str:
    """Write the answer from dated entries, newest first: where the first about the person is."""
    person = question.split()[-1].rstrip("?")
    facts = base.parse_facts(re.sub(r"\d{4}-\d\d-\d\d", "", memory))
    known = [fact for fact in facts if fact[0] == person and fact[2] in worlds.PLACES]
    if not known:
        return " \\boxed{ unknown}"
    return f" {worlds.sentence(known[0])} \\boxed{{ {known[0][2]}}}"


# ---------------------------------------------------------------- training


def episode(rng: random.Random, codec: Codec, careful: float, careless: float) -> Iterator[Example]:
    """Yield the turns of one episode of the agent itself.

    The store becomes what the careless demonstrator makes of it, whatever is learnt: a careful
    one is needed where something went wrong.
    """
    n_sessions = rng.randint(2, 10)
    people = rng.randint(2, min(6, n_sessions))
    task = ledger.make_ledger(rng.random(), n_sessions, n_people=people)
    # a new agent: one that has asked before remembers the answers, and would not ask again
    steps = agent().on(codec).run(task)
    prompt = next(steps)
    while True:
        if prompt.frozen:
            question = next(piece for piece, constant in prompt.pieces[::-1] if not constant)
            response = learnt = answer(question, prompt.memory)
        else:
            learnt = demonstrate(rng, prompt, careful)
            response = demonstrate(rng, prompt, careless if rng.random() < 0.5 else 1.0)
        yield base.example(codec, prompt, learnt)
        done = codec.encode(response)
        turn = Turn(prompt, prompt.ids(codec), [*done], [], Finish.STOP, codec.decode(done))
        try:
            prompt = steps.send(turn)
        except StopIteration:
            return


def step_items(
    step: int, rng: random.Random, config: BaseConfig, codec: Codec, careful: float
) -> list[Example]:
    """Draw the examples of a step, at first mostly lists of facts."""
    early = step < config.dense_steps
    turns: list[Example] = []
    for _ in range(2 if early else EPISODES):
        turns += episode(rng, codec, careful, config.careful)
    return [*base.dense(rng, codec, 32 if early else 4), *turns]


def train_base(config: BaseConfig, out: Path) -> None:
    """Train the policy and write it to `out` with the settings that it reads with."""
    tokenizer = make_tokenizer()
    model = base.make_model(len(tokenizer), config, finds_ids=True)
    base.imitate(model, tokenizer, config, out, step_items)
    shutil.copytree(WEIGHTS / "templates", out / "templates")
    settings = find.of_model(WEIGHTS) | {"templates": "templates"}
    files.dump(out / "agent.yaml", run={"agent": "memupdate"}, agent=settings)
