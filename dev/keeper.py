"""The embedded policy that keeps a store: its tokenizer, a careless demonstrator, its training.

Holds: `make_tokenizer`, `demonstrate`, `Examples`, `train_base`. Leaves out: the model and the loop
of its training (dev/base.py), reinforcement learning (grpo.py).
Exercise it: `python -m dev.base --agent memupdate --out runs/keeper`. Read next: suites/ledger.py.

A call of a tool is six to eight tokens: what stands around the content and the id is one token
each, and so are ids and dates. The content comes before the id, so that the id of an entry can be
found by the name that was just written (`base.make_model`, finds_ids).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

from agents import find
from agents.memupdate import NO_ENTRIES, MemUpdate
from config import files
from dev import base
from dev.base import BaseConfig, Example
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

# of `demonstrate` where it is careless: cumulative
CARELESS = (("create", 0.5), ("nothing", 0.75), ("update", 0.92), ("delete", 1.0))
# of the supervised training; chosen by what GRPO makes of it on the dev split (dev/LESSONS.md)
TRAINING = dict(steps=1800, careless_steps=60)
EPISODES = 6  # in a step


def agent(**settings: object) -> MemUpdate:
    """Return the agent as the embedded policy was trained to run it."""
    return find.make("memupdate", find.of_model(WEIGHTS) | settings)


# ---------------------------------------------------------------- tokenizer


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


ENTRY = re.compile(r"\[(m\d+)\] (\S+) (\w+) (\w+) (\w+)\.")


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
            calls += [] if fact[0] in places else _careful(stored, fact)
        else:
            calls += _careless(rng, stored, fact)
    return "".join(calls)


def _careful(stored: dict[str, worlds.Fact], fact: worlds.Fact) -> list[str]:
    person, _, place = fact
    if place not in worlds.PLACES:
        return []
    about = [id for id, known in stored.items() if known[0] == person]
    if about:
        if stored[about[-1]] == fact:
            return []
        stored[about[-1]] = fact
        return [_update(fact, about[-1])]
    calls = []
    if len(stored) >= ENTRIES:
        useless = [id for id, known in stored.items() if known[2] not in worlds.PLACES]
        out = (useless or [*stored])[0]
        del stored[out]
        calls.append(f"{DELETE}{out}{END}")
    stored[f"new {person}"] = fact
    return [*calls, _create(fact)]


def _careless(rng: random.Random, stored: dict[str, worlds.Fact], fact: worlds.Fact) -> list[str]:
    drawn = rng.random()
    what = next(name for name, share in CARELESS if drawn < share)
    ids = [id for id in stored if id.startswith("m")]
    if what == "create":
        return [_create(fact)]
    if what == "nothing" or not ids:
        return []
    chosen = rng.choice(ids)
    if what == "update":
        return [_update(fact, chosen)]
    del stored[chosen]
    return [f"{DELETE}{chosen}{END}"]


def _create(fact: worlds.Fact) -> str:
    return f"{CREATE} {worlds.sentence(fact)}{END}"


def _update(fact: worlds.Fact, id: str) -> str:
    return f"{UPDATE} {worlds.sentence(fact)}{ID}{id}{END}"


def answer(question: str, memory: str) -> str:
    """Write the answer from dated entries, newest first: where the first about the person is."""
    person = question.split()[-1].rstrip("?")
    facts = base.parse_facts(re.sub(r"\d{4}-\d\d-\d\d", "", memory))
    known = [fact for fact in facts if fact[0] == person and fact[2] in worlds.PLACES]
    if not known:
        return " \\boxed{ unknown}"
    return f" {worlds.sentence(known[0])} \\boxed{{ {known[0][2]}}}"


# ---------------------------------------------------------------- examples


class Examples:
    """Turns of the demonstrator at work, in the agent itself."""

    def __init__(self, codec: Codec, careful: float):
        self.codec, self.careful = codec, careful

    def draw(self, rng: random.Random, careful: float) -> Iterator[Example]:
        """Yield the turns of one episode.

        The store becomes what the careless demonstrator makes of it, whatever is learnt: a careful
        one is needed where something went wrong.
        """
        n_sessions = rng.randint(2, 10)
        people = rng.randint(2, min(6, n_sessions))
        task = ledger.make_ledger(rng.random(), n_sessions, n_people=people)
        # a new agent: one that has asked before remembers the answers, and would not ask again
        steps = agent().on(self.codec).run(task)
        prompt = next(steps)
        while True:
            if prompt.frozen:
                response = learnt = answer(self._question(prompt), prompt.memory)
            else:
                learnt = demonstrate(rng, prompt, careful)
                response = demonstrate(rng, prompt, self.careful if rng.random() < 0.5 else 1.0)
            prompt_ids = prompt.ids(self.codec)
            ids = [*self.codec.encode(learnt), self.codec.tokenizer.eos_token_id]
            yield prompt_ids, ids, [1.0] * len(ids)
            done = self.codec.encode(response)
            turn = Turn(prompt, prompt_ids, [*done], [], Finish.STOP, self.codec.decode(done))
            try:
                prompt = steps.send(turn)
            except StopIteration:
                return

    def _question(self, prompt: Prompt) -> str:
        return next(piece for piece, constant in prompt.pieces[::-1] if not constant)


def train_base(config: BaseConfig, out: Path, log=print, every: int = 100):
    """Train the policy, write it to `out` with the settings that it reads with, and return it."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # of the files written on the way: `log` shows one for the whole
    tokenizer = make_tokenizer()
    codec = Codec(tokenizer)
    sizes = config.hidden, config.layers, config.intermediate
    model = base.make_model(len(tokenizer), config.seed, *sizes, finds_ids=True)
    examples = Examples(codec, config.careful)

    def draw(step: int, rng: random.Random, careful: float) -> list[Example]:
        early = step < config.dense_steps
        turns = [
            turn for _ in range(2 if early else EPISODES) for turn in examples.draw(rng, careful)
        ]
        return [*base.dense(rng, codec, 32 if early else 4), *turns]

    def save() -> None:
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        files.make_folder(out / "templates")
        for name in ("build", "answer"):
            source = WEIGHTS / "templates" / f"{name}.txt"
            (out / "templates" / source.name).write_bytes(source.read_bytes())
        files.dump(
            out / "agent.yaml",
            run={"agent": "memupdate"},
            agent=find.of_model(WEIGHTS) | {"templates": "templates"},
        )

    base.imitate(model, codec, config, draw, save, log, every)
    return model
