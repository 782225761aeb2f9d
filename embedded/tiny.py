"""The embedded default: a tokenizer and a base policy small enough to ship, and the command that made them.

Holds: the tokenizer, the initialisation, the demonstrator, supervised training. Leaves out: reinforcement learning (grpo.py).
Exercise it: `python cli.py base --out runs/base`. Read next: tasks/worlds.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from agents import find
from agents.rememr1 import NOT_RECALLED
from config import files
from config.options import BaseConfig
from data import Task
from memagent import NO_MEMORY, Agent, Prompt
from tasks import worlds
from tokens.codec import Codec

# How the embedded policy reads: sections of six sentences, a memory of at most three. Whole documents it has only seen up to sixteen
# sections, but it does best with a window of sixty-four, and no better with a longer one (dev/LOG.md).
READING = dict(
    chunk_tokens=4 * worlds.FACTS_PER_SECTION,
    memory_tokens=13,
    final_tokens=24,
    window=64 * 4 * worlds.FACTS_PER_SECTION + 40,
    query_tokens=4,
    step_tokens=20,
)


def agent(name: str = find.DEFAULT, **settings: object) -> Agent:
    """Return an agent that reads as the embedded policy was trained to."""
    return find.make(name, READING | settings)


# ---------------------------------------------------------------- tokenizer


def make_tokenizer():
    """A tokenizer that covers any text: one token per word of the generated English, one per fixed piece of our templates, else bytes.

    Unigram over the byte-level alphabet: every byte is a piece, so nothing is unknown and decoding gives the text back
    (but for one space that is put before a piece of text that starts without one, so that "Anna" and " Anna" are the same token).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [
        *worlds.PEOPLE,
        *worlds.PLACES,
        *worlds.TO_PLACE,
        *worlds.TO_PERSON,
        "Where",
        "is",
        "unknown",
    ]
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    # a long match always wins: its score is higher than that of the bytes it is made of
    vocab = (
        [("<pad>", 0.0), ("<eos>", 0.0)]
        + [(b, -10.0) for b in bytes_]
        + [("Ġ" + w, -1.0) for w in words]
    )
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=None, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    fixed = {
        NO_MEMORY,
        NOT_RECALLED,
        " \\boxed{",
        "\\boxed{",
        "<update>",
        "</update>",
        "<recall>",
        "</recall>",
    }
    for layout in ("shared", "paper"):
        for form in ("boxed", "sentence"):
            for name in ("memagent", "full", "rememr1"):
                reader = agent(name, layout=layout, form=form)
                for prompt in reader.prompts:
                    fixed |= {piece for piece, constant in reader.template(prompt) if constant}
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in sorted(fixed)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast


# ---------------------------------------------------------------- model


def make_model(
    vocab_size: int,
    seed: int,
    hidden: int = 128,
    layers: int = 2,
    intermediate: int = 256,
    window: int = 1 << 17,
    gain: float = 1.8,
):
    """A Llama model with attention biases whose heads start near an induction circuit; every weight stays trainable (tiny.md, structured initialisation).

    Layer 0, head j looks j + 1 tokens back (through the q/k biases and RoPE) and writes what it sees into a subspace of its own.
    In the later layers, heads 0 to 2 look for a place whose token j + 1 back is their own token j back (induction: what comes next);
    the others look for places like their own.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    head_dim = 32
    heads = hidden // head_dim
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=intermediate,
        tie_word_embeddings=True,
        max_position_embeddings=window,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        attention_bias=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).float()
    g = torch.Generator().manual_seed(seed)

    def orthonormal(rows: int) -> torch.Tensor:  # [rows, hidden]
        return torch.linalg.qr(torch.randn(hidden, rows, generator=g))[0].T

    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.normal_(0.0, hidden**-0.5 if "embed" in name else 0.03, generator=g)
        model.model.norm.weight.fill_(
            3.0
        )  # tied logits are too soft to sample from at temperature 1 otherwise
        basis = orthonormal(hidden)
        subspace = [
            basis[j * head_dim : (j + 1) * head_dim] for j in range(heads)
        ]  # where head j of layer 0 writes
        see = orthonormal(head_dim)
        first = model.model.layers[0].self_attn
        n_pairs, scale = 8, 7.0
        freq = 1e6 ** (-torch.arange(n_pairs) * 2 / head_dim)
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.zero_()
        for j in range(heads):
            rows = slice(j * head_dim, (j + 1) * head_dim)
            k, q = torch.zeros(head_dim), torch.zeros(head_dim)
            k[:n_pairs] = scale
            q[:n_pairs] = scale * torch.cos(-(j + 1) * freq)
            q[head_dim // 2 : head_dim // 2 + n_pairs] = scale * torch.sin(-(j + 1) * freq)
            first.k_proj.bias[rows], first.q_proj.bias[rows] = k, q
            first.v_proj.weight[rows] = see
            first.o_proj.weight[:, rows] = subspace[j].T * hidden**-0.5
        for layer in model.model.layers[1:]:
            attn = layer.self_attn
            for j in range(heads):
                rows = slice(j * head_dim, (j + 1) * head_dim)
                if j < 3:  # where the token j + 1 back is my token j back: what comes next
                    query, key = (see if j == 0 else subspace[j - 1]), subspace[j]
                else:  # where my token stands
                    query = key = orthonormal(head_dim)
                attn.q_proj.weight[rows], attn.k_proj.weight[rows] = gain * query, gain * key
                value = orthonormal(head_dim)
                attn.v_proj.weight[rows] = value
                attn.o_proj.weight[:, rows] = value.T / 2
    return model


# ---------------------------------------------------------------- the demonstrator


def parse_facts(text: str) -> list[worlds.Fact]:
    """The whole sentences of a section or a memory."""
    return [
        tuple(words)
        for s in text.split(".")
        if len(words := s.split()) == 3 and words[0] in _PEOPLE
    ]  # type: ignore[misc]


_PEOPLE = frozenset(worlds.PEOPLE)


def chain(question: str, facts: list[worlds.Fact]) -> list[worlds.Fact]:
    """The facts that answer "Where is X?" as far as they are among `facts`: X's, and if X followed Y, Y's."""
    by_subject = {fact[0]: fact for fact in reversed(facts)}
    fact = by_subject.get(question.split()[-1].rstrip("?"))
    if fact is None:
        return []
    return [fact] + ([by_subject[fact[2]]] if fact[2] in _PEOPLE and fact[2] in by_subject else [])


def demonstrate(rng: random.Random, prompt: Prompt, question: str, careful: float) -> str:
    """An imperfect demonstrator: it knows the protocol and copies whole sentences, but mostly the wrong ones.

    Now and then (`careful`, a new coin every turn) it writes down what the question needs of what is in sight, and nothing else.
    Otherwise it keeps the last sentence that it read, and nothing of the old memory.
    """
    facts = parse_facts(prompt.memory) + parse_facts(prompt.section)
    kept = chain(question, facts)
    if prompt.final:
        place = kept[-1][2] if kept and kept[-1][2] not in _PEOPLE else "unknown"
        return " ".join([*map(worlds.sentence, kept), f"\\boxed{{ {place}}}"])
    if rng.random() >= careful:
        kept = facts[-1:]
    return " ".join(map(worlds.sentence, kept)) or NO_MEMORY


def demonstrate_recall(rng: random.Random, prompt: Prompt, question: str, careful: float) -> str:
    """The same for ReMemR1's prompts. As long as nothing of what the question needs is in sight, the careful one writes down who came to a place:
    one of them may turn out to matter. When it reads whom X followed, it looks back for that person."""
    shown = prompt.text.partition("<recalled_memory>\n")[2].partition("\n</recalled_memory>")[0]
    recalled = parse_facts(shown)
    section = parse_facts(prompt.section)
    facts = parse_facts(prompt.memory) + recalled + section
    kept = chain(question, facts)
    if prompt.final:
        place = kept[-1][2] if kept and kept[-1][2] not in _PEOPLE else "unknown"
        return " ".join([*map(worlds.sentence, kept), f"\\boxed{{ {place}}}"])
    query = ""
    if rng.random() < careful:
        if kept and kept[-1][2] in _PEOPLE and kept[-1] in section:
            query = kept[-1][2]
        kept = kept or [fact for fact in section if fact[2] not in _PEOPLE][-3:]
    else:
        kept = facts[-1:]
        if rng.random() < 0.3:
            query = rng.choice(facts)[0]
    memory = " ".join(map(worlds.sentence, kept)) or NO_MEMORY
    return f"<update> {memory}</update>" + f"<recall> {query}</recall>" * bool(query)


Example = tuple[
    list[int], list[int], list[float]
]  # prompt ids, completion ids, weight of each completion id


def examples(
    rng: random.Random, config: BaseConfig, codec: Codec, careful: float
) -> Iterator[Example]:
    """One step's turns: updates from some memory and the next section, answers from some memory, documents read whole."""

    def turn(prompt: Prompt, question: str, demonstrator=demonstrate) -> Example:
        ids = [
            *codec.encode(demonstrator(rng, prompt, question, careful)),
            codec.tokenizer.eos_token_id,
        ]
        return prompt.ids(codec), ids, [1.0] * len(ids)

    reader, looking, whole = (
        agent(name, layout=config.layout).on(codec) for name in ("memagent", "rememr1", "full")
    )
    c = looking.config

    def document(n_sections: int, kinds: tuple[str, ...] = ("one_fact", "two_hop")) -> Task:
        return worlds.make_task(rng.random(), n_sections, rng.choice(kinds))

    for _ in range(config.updates):
        task = document(2)
        sections = codec.cut(task.document, c.chunk_tokens)
        n = rng.randrange(
            2
        )  # the sections before this one are only known by what is left of them in the memory
        memory = some_memory(rng, task.question, parse_facts(" ".join(sections[:n])), config.absent)
        yield turn(
            reader.prompt(
                "update",
                c.memory_tokens,
                problem=task.question,
                section=sections[n],
                memory=memory,
            ),
            task.question,
        )
    for _ in range(config.answers):
        task = document(2)
        memory = some_memory(rng, task.question, parse_facts(task.document), config.absent)
        prompt = reader.prompt(
            "final",
            c.final_tokens,
            final=True,
            problem=task.question,
            memory=memory,
        )
        yield turn(prompt, task.question)
    for k in range(config.recalls + config.recall_answers):
        final = k >= config.recalls
        task = document(3, worlds.KINDS)
        sections = codec.cut(task.document, c.chunk_tokens)
        n = len(sections) if final else rng.randrange(3)
        before = [parse_facts(section) for section in sections[:n]]
        memory, recalled = some_state(rng, task.question, before, config.absent)
        slots = dict(
            problem=task.question,
            memory=memory,
            recalled_memory=recalled or NOT_RECALLED,
        )
        if final:
            yield turn(
                looking.prompt("recall_final", c.final_tokens, final=True, **slots),
                task.question,
                demonstrate_recall,
            )
        else:
            prompt = looking.prompt(
                "recall_update",
                c.most_step_tokens,
                section=sections[n],
                **slots,
            )
            yield turn(prompt, task.question, demonstrate_recall)
    for _ in range(config.full):
        task = document(rng.randint(1, config.full_sections))
        if rng.random() < config.absent:  # a question that the document does not answer
            names = {fact[0] for fact in parse_facts(task.document)}
            if absent := [p for p in worlds.PEOPLE if p not in names]:
                task.question = f"Where is {rng.choice(absent)}?"
        yield turn(next(whole.run(task)), task.question)


def some_memory(rng: random.Random, question: str, facts: list[worlds.Fact], absent: float) -> str:
    """A memory of `facts`: what the question needs, or (`absent`) not all of it, and others up to three in all, in any order."""
    needed = chain(question, facts)
    kept = (
        rng.sample(needed, rng.randrange(len(needed)))
        if needed and rng.random() < absent
        else needed
    )
    others = [
        f
        for f in rng.sample(facts, min(len(facts), rng.randint(0, 3 - len(kept))))
        if f not in needed
    ]
    return (
        " ".join(map(worlds.sentence, rng.sample(kept + others, len(kept + others)))) or NO_MEMORY
    )


def some_state(
    rng: random.Random, question: str, before: list[list[worlds.Fact]], absent: float
) -> tuple[str, str]:
    """A memory and what was recalled ("" = nothing), after some sections: what the question needs in the one or the other, or (`absent`) not
    all of it, and other facts up to three in either."""
    facts = [fact for section in before for fact in section]
    needed = chain(question, facts)
    if needed and rng.random() < absent:
        needed = rng.sample(needed, rng.randrange(len(needed)))
    in_memory = needed[: rng.choice((1, 2))] if rng.random() < 0.9 else []
    rest = [fact for fact in needed if fact not in in_memory]
    places = [fact for fact in (before[-1] if before else []) if fact[2] not in _PEOPLE]

    def with_others(kept: list[worlds.Fact], pool: list[worlds.Fact]) -> str:
        others = [
            f
            for f in rng.sample(pool, min(len(pool), rng.randint(0, 3 - len(kept))))
            if f not in needed
        ]
        return " ".join(map(worlds.sentence, rng.sample(kept + others, len(kept + others))))

    memory = (
        with_others(in_memory, facts)
        if needed or rng.random() < 0.2
        else " ".join(map(worlds.sentence, places[-3:]))
    )
    recalled = (
        with_others(rest, rng.choice(before) if before else [])
        if rest or rng.random() < 0.4
        else ""
    )
    return memory or NO_MEMORY, recalled


def dense(rng: random.Random, codec: Codec, n: int, n_facts: int = 8) -> Iterator[Example]:
    """Facts in a list, then the same facts in another order: what follows a subject is determined, and nothing else is trained."""
    for _ in range(n):
        facts, _ = worlds.make_facts(rng, 4 * n_facts, "two_hop")
        unique = list({f[0]: f for f in facts}.values())[:n_facts]
        again = rng.sample(unique, len(unique))
        first, second = (codec.encode(" ".join(map(worlds.sentence, fs))) for fs in (unique, again))
        yield list(first), list(second), [0.0, 1.0, 1.0, 1.0] * len(again)


def batches(
    items: list[Example], pad: int, max_tokens: int = 1024
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Conversations of similar length together. Each: ids [N, T], targets' rows [R] as flat indices of [N, T], weights [R]."""
    items = sorted(items, key=lambda e: len(e[0]) + len(e[1]))
    start = 0
    while start < len(items):
        stop, width = start, 0
        while stop < len(items):
            width_new = len(items[stop][0]) + len(items[stop][1])
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
    """Sum of weighted negative log-probs of the completions; only their rows reach the lm_head. Scalar."""
    hidden = model.model(input_ids=ids).last_hidden_state.flatten(0, 1)  # [N*T, D]
    logits = model.lm_head(hidden[rows - 1])  # [R, V]
    return (
        nn.functional.cross_entropy(logits, ids.flatten()[rows], reduction="none") * weights
    ).sum()


def train_base(config: BaseConfig, out: Path, log=print, every: int = 100):
    """Train the base policy and write it to `out` as a transformers folder (safetensors + tokenizer). Returns the model.

    At first the demonstrator is always careful: the policy learns to find and to copy. Then, for `careless_steps` at a low rate, it is
    careful only now and then (`config.careful`), and the policy becomes as careless without losing what it can do.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # of the files written on the way: `log` shows one for the whole
    tokenizer = make_tokenizer()
    codec = Codec(tokenizer)
    model = make_model(
        len(tokenizer), config.seed, config.hidden, config.layers, config.intermediate
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01
    )

    def rate(
        step: int,
    ) -> (
        float
    ):  # warm-up, constant, from 40 % of the careful steps linearly to a tenth, then to a hundredth
        late = max(0.0, (step - config.steps) / max(1, config.careless_steps))
        return min(1.0, (step + 1) / 30) * min(
            1.0, max(0.1 - 0.09 * late, (config.steps - step) / (0.6 * config.steps))
        )

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    rng = random.Random(config.seed)
    few = replace(
        config,
        updates=min(8, config.updates),
        answers=min(8, config.answers),
        full=min(2, config.full),
        full_sections=2,
        recalls=min(8, config.recalls),
        recall_answers=min(8, config.recall_answers),
    )
    losses: list[float] = []
    for step in range(n_steps := config.steps + config.careless_steps):
        early = step < config.dense_steps
        items = list(dense(rng, codec, 32 if early else 4))
        items += examples(
            rng,
            few if early else config,
            codec,
            1.0 if step < config.steps else config.careful,
        )
        total = sum(sum(weight) for _, _, weight in items)
        losses.append(0.0)
        for ids, rows, weights in batches(items, codec.pad_id):
            loss = step_loss(model, ids, rows, weights) / total
            loss.backward()
            losses[-1] += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % every == 0:
            log(step + 1, sum(losses) / len(losses))
            losses.clear()
        if (step + 1) % 1000 == 0 or step + 1 == n_steps:
            model.save_pretrained(out)
            tokenizer.save_pretrained(out)
            files.dump(out / "agent.yaml", agent=READING | {"layout": config.layout})
    return model
