"""Train the embedded base policies from nothing, on generated English.

    python -m dev.base --out runs/base                        # an hour of one core
    python -m dev.base --agent memupdate --out runs/keeper    # the policy that keeps a store

An imperfect demonstrator, who knows an agent's protocol, writes responses to its prompts, and a
small Llama learns them. What differs for the policy that keeps a store is in dev/keeper.py.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import nn

from agents.rememr1 import NOT_RECALLED
from config import files
from data import Task
from embedded.tiny import READING, agent
from memagent import NO_MEMORY, Prompt
from tasks import worlds
from tokens.codec import Codec

Example = tuple[list[int], list[int], list[float]]  # prompt, completion, weight of each of its ids
Fact = worlds.Fact
PEOPLE = frozenset(worlds.PEOPLE)


@dataclass(frozen=True, slots=True)
class BaseConfig:
    """Settings of the supervised training of a base policy; each one is a flag."""

    steps: int = 8000  # optimizer steps with a demonstrator that is always careful
    careless_steps: int = 1600  # after these, with one that is careful only now and then
    careful: float = 0.3  # how often that one keeps exactly the facts that matter
    dense_steps: int = 120  # first steps, mostly on lists of facts given twice
    lr: float = 1.5e-3  # peak learning rate of AdamW
    absent: float = 0.3  # share of questions whose answer is missing; "unknown" is then right
    updates: int = 40  # update turns per step
    answers: int = 12  # answers from a memory per step
    recalls: int = 40  # update turns with a look back per step
    recall_answers: int = 12  # answers after a look back per step
    full: int = 4  # documents read whole per step
    full_sections: int = 16  # most sections of a document that is read whole
    hidden: int = 128  # width of the model, a multiple of 32
    layers: int = 3
    intermediate: int = 256  # width of the feed-forward layers
    seed: int = 0


# ---------------------------------------------------------------- tokenizer


def make_tokenizer(pieces: Iterable[str] | None = None, after_blank: Iterable[str] = ()):
    """Make a tokenizer for any text: one token a word of the generated English, else bytes.

    pieces: further strings of one token each; None: `template_pieces`. after_blank: likewise, with
    or without a blank before them. A text that starts without a space gets one, so that "Anna" and
    " Anna" are the same token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = (*worlds.PEOPLE, *worlds.PLACES, *worlds.TO_PLACE, *worlds.TO_PERSON)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # a long match always wins: its score is higher than the sum of its bytes' scores
    vocab = [("<pad>", 0.0), ("<eos>", 0.0)] + [(byte, -10.0) for byte in alphabet]
    vocab += [("Ġ" + word, -1.0) for word in (*names, "Where", "is", "unknown")]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=None, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    pieces = sorted(template_pieces() if pieces is None else {*pieces})
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.add_tokens(
        [AddedToken(piece, normalized=False, lstrip=True) for piece in sorted(after_blank)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast


def template_pieces() -> set[str]:
    """Return the fixed pieces of prompts and responses, in every layout and form."""
    pieces = {NO_MEMORY, NOT_RECALLED, " \\boxed{", "\\boxed{"}
    pieces |= {"<update>", "</update>", "<recall>", "</recall>"}
    for layout in ("shared", "paper"):
        for form in ("boxed", "sentence"):
            for name in ("memagent", "full", "rememr1"):
                reader = agent(name, layout=layout, form=form)
                for prompt in reader.prompts:
                    pieces |= {piece for piece, constant in reader.template(prompt) if constant}
    return pieces


# ---------------------------------------------------------------- model

HEAD_DIM = 32
GAIN = 1.8  # scale of the later layers' queries and keys


def make_model(vocab_size: int, config: BaseConfig, finds_ids: bool = False):
    """Make a Llama model with attention biases whose heads start near an induction circuit.

        layer 0, head j       attends j + 1 tokens back (by q/k biases and RoPE) and writes what it
                              sees into a subspace of its own
        later, heads 0 to 2   attend to places whose token j + 1 back is their own token j back:
                              induction, what comes next
        later, other heads    attend to places with their own token

    finds_ids: head 3 of layer 1 attends to the places with the token 4 before it, and reads what
    is 3 before them: the id in the line of an entry whose first word was just written.
    Every weight stays trainable.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, seed, heads = config.hidden, config.seed, config.hidden // HEAD_DIM
    sizes = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=config.intermediate,
        tie_word_embeddings=True,
        max_position_embeddings=1 << 17,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        attention_bias=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(sizes).float()
    draw = torch.Generator().manual_seed(seed)

    def orthonormal(rows: int) -> torch.Tensor:
        return torch.linalg.qr(torch.randn(hidden, rows, generator=draw))[0].T

    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.normal_(0.0, hidden**-0.5 if "embed" in name else 0.03, generator=draw)
            elif name.endswith("bias"):
                p.zero_()
        # otherwise tied logits are too soft to sample from at temperature 1
        model.model.norm.weight.fill_(3.0)
        subspaces = list(orthonormal(hidden).split(HEAD_DIM))[:heads]  # of the heads of layer 0
        see = orthonormal(HEAD_DIM)
        first, *later = (layer.self_attn for layer in model.model.layers)
        look_back(first, see, subspaces)
        for attention in later:
            for j, subspace in enumerate(subspaces):
                rows = slice(j * HEAD_DIM, (j + 1) * HEAD_DIM)
                if j < 3:  # places whose token j + 1 back is my token j back
                    query, key = (see if j == 0 else subspaces[j - 1]), subspace
                else:
                    query = key = orthonormal(HEAD_DIM)
                attention.q_proj.weight[rows] = GAIN * query
                attention.k_proj.weight[rows] = GAIN * key
                attention.v_proj.weight[rows] = value = orthonormal(HEAD_DIM)
                attention.o_proj.weight[:, rows] = value.T / 2
        if finds_ids:
            head, rows = later[0], slice(3 * HEAD_DIM, 4 * HEAD_DIM)
            head.q_proj.weight[rows], head.k_proj.weight[rows] = GAIN * subspaces[3], GAIN * see
            head.v_proj.weight[rows] = subspaces[2]
            head.o_proj.weight[:, rows] = 1.5 * see.T  # as the token that stands there
    return model


def look_back(attention: nn.Module, see: torch.Tensor, subspaces: list[torch.Tensor]) -> None:
    """Make head j attend j + 1 tokens back and write what it sees into subspaces[j].

    A constant key and a constant query, whose first `n_pairs` planes are turned back by j + 1
    positions: under RoPE their product is largest at that distance.
    """
    n_pairs, scale = 8, 7.0
    freq = 1e6 ** (-torch.arange(n_pairs) * 2 / HEAD_DIM)
    for j, subspace in enumerate(subspaces):
        rows = slice(j * HEAD_DIM, (j + 1) * HEAD_DIM)
        k, q = torch.zeros(HEAD_DIM), torch.zeros(HEAD_DIM)
        k[:n_pairs] = scale
        q[:n_pairs] = scale * torch.cos(-(j + 1) * freq)
        q[HEAD_DIM // 2 : HEAD_DIM // 2 + n_pairs] = scale * torch.sin(-(j + 1) * freq)
        attention.k_proj.bias[rows], attention.q_proj.bias[rows] = k, q
        attention.v_proj.weight[rows] = see
        attention.o_proj.weight[:, rows] = subspace.T * see.shape[1] ** -0.5


# ---------------------------------------------------------------- the demonstrator


def parse_facts(text: str) -> list[Fact]:
    """Return the facts of a section's or a memory's complete sentences."""
    sentences = map(str.split, text.split("."))
    return [tuple(words) for words in sentences if len(words) == 3 and words[0] in PEOPLE]


def chain(question: str, facts: list[Fact]) -> list[Fact]:
    """Return the facts among `facts` that answer "Where is X?": X's and, if X followed Y, Y's.

    Of several facts about one person the first counts.
    """
    by_subject = {fact[0]: fact for fact in reversed(facts)}
    fact = by_subject.get(question.split()[-1].rstrip("?"))
    if fact is None:
        return []
    return [fact, by_subject[fact[2]]] if fact[2] in PEOPLE & by_subject.keys() else [fact]


def demonstrate(rng: random.Random, prompt: Prompt, question: str, careful: float) -> str:
    """Write the response of the demonstrator, who copies whole sentences, mostly the wrong ones.

    With probability `careful`, drawn anew every turn, it writes exactly the facts in sight that the
    question needs. Otherwise it keeps the last sentence it read, and nothing of the old memory.
    """
    facts = parse_facts(prompt.memory) + parse_facts(prompt.section)
    needed = chain(question, facts)
    if prompt.final:
        return written_answer(needed)
    return written(facts[-1:] if rng.random() >= careful else needed) or NO_MEMORY


def demonstrate_recall(rng: random.Random, prompt: Prompt, question: str, careful: float) -> str:
    """Write the demonstrator's response to a prompt of ReMemR1.

    While nothing that the question needs is in sight, the careful one writes down who came to a
    place: one of them may turn out to matter. When it reads whom X followed, it looks back for
    that person.
    """
    slot = prompt.text.partition("<recalled_memory>\n")[2].partition("\n</recalled_memory>")[0]
    section = parse_facts(prompt.section)
    facts = parse_facts(prompt.memory) + parse_facts(slot) + section
    needed = chain(question, facts)
    if prompt.final:
        return written_answer(needed)
    query = ""
    if rng.random() < careful:
        if needed and needed[-1][2] in PEOPLE and needed[-1] in section:
            query = needed[-1][2]
        kept = needed or [fact for fact in section if fact[2] not in PEOPLE][-3:]
    else:
        kept = facts[-1:]
        if rng.random() < 0.3:
            query = rng.choice(facts)[0]
    memory = written(kept) or NO_MEMORY
    return f"<update> {memory}</update>" + f"<recall> {query}</recall>" * bool(query)


def written(facts: Iterable[Fact]) -> str:
    return " ".join(map(worlds.sentence, facts))


def written_answer(needed: list[Fact]) -> str:
    """Write the needed facts and, in the box, the place that the last one names."""
    place = needed[-1][2] if needed and needed[-1][2] not in PEOPLE else "unknown"
    return " ".join([*map(worlds.sentence, needed), f"\\boxed{{ {place}}}"])


# ---------------------------------------------------------------- examples


def example(codec: Codec, prompt: Prompt, response: str) -> Example:
    """Return a turn of which the whole response is learnt."""
    ids = [*codec.encode(response), codec.tokenizer.eos_token_id]
    return prompt.ids(codec), ids, [1.0] * len(ids)


def examples(
    rng: random.Random, config: BaseConfig, codec: Codec, careful: float
) -> Iterator[Example]:
    """Yield one step's turns: updates, answers, both with a look back, documents read whole."""
    memagent, rememr1, full = (agent(name).on(codec) for name in ("memagent", "rememr1", "full"))

    def draw(n_sections: int, kinds: tuple[str, ...] = ("one_fact", "two_hop")) -> Task:
        return worlds.make_task(rng.random(), n_sections, rng.choice(kinds))

    def asking(reader, name: str, task: Task, section: str = "", **slots: str) -> Prompt:
        slots |= {"problem": task.question} | ({"section": section} if section else {})
        return reader.prompt(name, 0, final=not section, **slots)

    for final in [False] * config.updates + [True] * config.answers:
        task = draw(2)  # an update is of its first or its second section
        parts = codec.cut(task.document, memagent.config.chunk_tokens)
        n = len(parts) if final else rng.randrange(2)
        before = parse_facts(" ".join(parts[:n]))  # known only by what the memory holds of it
        memory = some_memory(rng, task.question, before, config.absent)
        name, section = ("final", "") if final else ("update", parts[n])
        prompt = asking(memagent, name, task, section, memory=memory)
        yield example(codec, prompt, demonstrate(rng, prompt, task.question, careful))
    for final in [False] * config.recalls + [True] * config.recall_answers:
        task = draw(3, ("one_fact", "two_hop", "two_hop_reverse"))
        parts = codec.cut(task.document, rememr1.config.chunk_tokens)
        n = len(parts) if final else rng.randrange(3)
        before = [parse_facts(section) for section in parts[:n]]
        memory, recalled = some_state(rng, task.question, before, config.absent)
        slots = {"memory": memory, "recalled_memory": recalled or NOT_RECALLED}
        name, section = ("recall_final", "") if final else ("recall_update", parts[n])
        prompt = asking(rememr1, name, task, section, **slots)
        yield example(codec, prompt, demonstrate_recall(rng, prompt, task.question, careful))
    for _ in range(config.full):  # now and then the document does not hold the answer
        task = draw(rng.randint(1, config.full_sections))
        if rng.random() < config.absent:
            subjects = {fact[0] for fact in parse_facts(task.document)}
            if absent := [person for person in worlds.PEOPLE if person not in subjects]:
                task.question = f"Where is {rng.choice(absent)}?"
        prompt = next(full.run(task))
        yield example(codec, prompt, demonstrate(rng, prompt, task.question, careful))


def some_memory(rng: random.Random, question: str, facts: list[Fact], absent: float) -> str:
    """Draw a memory of up to three of `facts`, in any order.

    It holds what the question needs or, with probability `absent`, only part of it.
    """
    needed = present = chain(question, facts)
    if needed and rng.random() < absent:
        present = rng.sample(needed, rng.randrange(len(needed)))
    return with_others(rng, present, facts, needed) or NO_MEMORY


def some_state(
    rng: random.Random, question: str, before: list[list[Fact]], absent: float
) -> tuple[str, str]:
    """Draw a memory and a recalled one ("": nothing recalled), each of up to three facts.

    before: facts of the sections read. What the question needs is in the one or the other, or,
    with probability `absent`, only part of it.
    """
    facts = [fact for section in before for fact in section]
    needed = chain(question, facts)
    if needed and rng.random() < absent:
        needed = rng.sample(needed, rng.randrange(len(needed)))
    in_memory = needed[: rng.choice((1, 2))] if rng.random() < 0.9 else []
    rest = [fact for fact in needed if fact not in in_memory]
    if needed or rng.random() < 0.2:
        memory = with_others(rng, in_memory, facts, needed)
    else:  # candidates, as the careful demonstrator writes them down
        places = [fact for fact in (before[-1] if before else []) if fact[2] not in PEOPLE]
        memory = written(places[-3:])
    recalled = ""
    if rest or rng.random() < 0.4:
        recalled = with_others(rng, rest, rng.choice(before) if before else [], needed)
    return memory or NO_MEMORY, recalled


def with_others(rng: random.Random, facts: list[Fact], pool: list[Fact], needed: list[Fact]) -> str:
    """Write facts and others of a pool that are not needed, up to three in all, in any order."""
    others = rng.sample(pool, min(len(pool), rng.randint(0, 3 - len(facts))))
    facts = facts + [fact for fact in others if fact not in needed]
    return written(rng.sample(facts, len(facts)))


def dense(rng: random.Random, codec: Codec, n: int, n_facts: int = 8) -> Iterator[Example]:
    """Yield lists of facts, each followed by the same facts in another order.

    What follows a subject is determined, and nothing else is trained.
    """
    for _ in range(n):
        facts, _ = worlds.make_facts(rng, 4 * n_facts, "two_hop")
        unique = list({fact[0]: fact for fact in facts}.values())[:n_facts]
        again = rng.sample(unique, len(unique))
        first, second = (list(codec.encode(written(order))) for order in (unique, again))
        yield first, second, [0.0, 1.0, 1.0, 1.0] * len(again)  # subject; verb, object, full stop


# ---------------------------------------------------------------- training


def batches(
    items: list[Example], pad: int, max_tokens: int = 1024
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield batches of examples of similar length, each at most `max_tokens` with its padding.

    A batch: ids [N, T]; rows [R], the flat indices in [N, T] of the completions' tokens, which are
    trained; their weights [R].
    """
    items = sorted(items, key=lambda e: len(e[0]) + len(e[1]))
    start = 0
    while start < len(items):
        width, stop = 0, start
        while stop < len(items):
            width_new = max(width, len(items[stop][0]) + len(items[stop][1]))
            if stop > start and width_new * (stop + 1 - start) > max_tokens:
                break
            width, stop = width_new, stop + 1
        ids = torch.full((stop - start, width), pad)
        rows, weights = [], []
        for n, (prompt, completion, weight) in enumerate(items[start:stop]):
            ids[n, : len(prompt) + len(completion)] = torch.tensor(prompt + completion)
            rows += range(n * width + len(prompt), n * width + len(prompt) + len(completion))
            weights += weight
        yield ids, torch.tensor(rows), torch.tensor(weights)
        start = stop


def step_loss(model, ids: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of the completions' negative log-probs, a scalar; of a batch."""
    hidden = model.model(input_ids=ids).last_hidden_state.flatten(0, 1)  # [N*T, D]
    logits = model.lm_head(hidden[rows - 1])  # [R, V]
    nll = nn.functional.cross_entropy(logits, ids.flatten()[rows], reduction="none")
    return (nll * weights).sum()


def base_rate(step: int, config: BaseConfig) -> float:
    """Return the learning rate of a step, as a share of the peak.

    Warm-up over 30 steps, constant, linear from 40 % of the careful steps to a tenth at their end,
    linear to a hundredth over the careless ones.
    """
    late = max(0.0, (step - config.steps) / max(1, config.careless_steps))
    falling = (config.steps - step) / (0.6 * config.steps)
    return min(1.0, (step + 1) / 30) * min(1.0, max(0.1 - 0.09 * late, falling))


def step_items(
    step: int, rng: random.Random, config: BaseConfig, codec: Codec, careful: float
) -> list[Example]:
    """Draw the examples of a step: at first mostly lists of facts, and few, short turns."""
    early = step < config.dense_steps
    if early:
        most = {"updates": 8, "answers": 8, "recalls": 8, "recall_answers": 8, "full": 2}
        fewer = {name: min(n, getattr(config, name)) for name, n in most.items()}
        config = replace(config, full_sections=2, **fewer)
    return [*dense(rng, codec, 32 if early else 4), *examples(rng, config, codec, careful)]


def show(step: int, loss: float) -> None:
    if step % 100 == 0:
        print(f"step {step}: loss {loss:.4f}", flush=True)


Draw = Callable[[int, random.Random, BaseConfig, Codec, float], list[Example]]


def imitate(
    model, tokenizer, config: BaseConfig, out: Path, draw: Draw = step_items, log=show
) -> None:
    """Train a model on what a demonstrator writes, and write it to `out`.

    At first the demonstrator is always careful: the policy learns to find and to copy. Then, for
    `careless_steps` at a low rate, it is careful only now and then, and the policy becomes as
    careless without losing what it can do.
    """
    codec = Codec(tokenizer)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: base_rate(step, config))
    rng = random.Random(config.seed)
    for step in range(config.steps + config.careless_steps):
        items = draw(step, rng, config, codec, 1.0 if step < config.steps else config.careful)
        total, summed = sum(sum(weight) for _, _, weight in items), 0.0
        for ids, rows, weights in batches(items, codec.end_id):
            loss = step_loss(model, ids, rows, weights) / total
            loss.backward()
            summed += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        log(step + 1, summed)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def train_base(config: BaseConfig, out: Path, log=show) -> None:
    """Train the base policy of MemAgent and ReMemR1 and write it to `out`."""
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer), config)
    imitate(model, tokenizer, config, out, log=log)
    files.dump(out / "agent.yaml", agent=READING | {"layout": "shared"})


def main(arguments: Sequence[str] | None = None) -> int:
    from dev import keeper

    parser = argparse.ArgumentParser(prog="python -m dev.base", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder that is not there yet")
    parser.add_argument("--agent", default="memagent", choices=["memagent", "memupdate"])
    for field in fields(BaseConfig):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(field.default), default=argparse.SUPPRESS)
    given = vars(parser.parse_args(arguments))
    out, name = given.pop("out"), given.pop("agent")
    out.mkdir(parents=True)
    if name == "memupdate":
        keeper.train_base(BaseConfig(**keeper.TRAINING | given), out)
    else:
        train_base(BaseConfig(**given), out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
