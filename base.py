"""The embedded default: a tokenizer and a base policy small enough to ship, and the command that made them.

Holds: the tokenizer, the initialisation, the demonstrator, supervised training. Leaves out: reinforcement learning (grpo.py).
Exercise it: `python cli.py base --out runs/base`. Read next: worlds.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import settings
import worlds
from data import Task
from memagent import NO_MEMORY, AgentConfig, Finish, Prompt, Turn, default_template, fill, full_context, memagent, split_template
from settings import BaseConfig
from text import Codec

# How the embedded policy reads: sections of six sentences, a memory of at most three. Whole documents it has only seen up to sixteen
# sections; with longer ones it does better when their middle is cut to that than when all is there (dev/LOG.md).
AGENT = AgentConfig(
    chunk_tokens=4 * worlds.FACTS_PER_SECTION, memory_tokens=13, final_tokens=24, window=16 * 4 * worlds.FACTS_PER_SECTION + 40
)

# ---------------------------------------------------------------- tokenizer


def make_tokenizer():
    """A tokenizer that covers any text: one token per word of the generated English, one per fixed piece of our templates, else bytes.

    Unigram over the byte-level alphabet: every byte is a piece, so nothing is unknown and decoding gives the text back
    (but for one space that is put before a piece of text that starts without one, so that "Anna" and " Anna" are the same token).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*worlds.PEOPLE, *worlds.PLACES, *worlds.TO_PLACE, *worlds.TO_PERSON, "Where", "is", "unknown"]
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    # a long match always wins: its score is higher than that of the bytes it is made of
    vocab = [("<pad>", 0.0), ("<eos>", 0.0)] + [(b, -10.0) for b in bytes_] + [("Ġ" + w, -1.0) for w in words]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=None, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    fixed = {NO_MEMORY, " \\boxed{", "\\boxed{"}
    for layout in ("shared", "paper"):
        for form in ("boxed", "sentence"):
            for turn in ("update", "final", "full"):
                fixed |= {piece for piece, constant in split_template(default_template(turn, layout, form)) if constant}
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in sorted(fixed)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
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
        vocab_size=vocab_size, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        intermediate_size=intermediate, tie_word_embeddings=True, max_position_embeddings=window,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, attention_bias=True, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).float()
    g = torch.Generator().manual_seed(seed)

    def orthonormal(rows: int) -> torch.Tensor:  # [rows, hidden]
        return torch.linalg.qr(torch.randn(hidden, rows, generator=g))[0].T

    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.normal_(0.0, hidden**-0.5 if "embed" in name else 0.03, generator=g)
        model.model.norm.weight.fill_(3.0)  # tied logits are too soft to sample from at temperature 1 otherwise
        basis = orthonormal(hidden)
        subspace = [basis[j * head_dim : (j + 1) * head_dim] for j in range(heads)]  # where head j of layer 0 writes
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
    return [tuple(words) for s in text.split(".") if len(words := s.split()) == 3 and words[0] in _PEOPLE]  # type: ignore[misc]


_PEOPLE = frozenset(worlds.PEOPLE)


def chain(question: str, facts: list[worlds.Fact]) -> list[worlds.Fact]:
    """The facts that answer "Where is X?" as far as they are among `facts`: X's, and if X followed Y, Y's."""
    by_subject = {fact[0]: fact for fact in reversed(facts)}
    fact = by_subject.get(question.split()[-1].rstrip("?"))
    if fact is None:
        return []
    return [fact] + ([by_subject[fact[2]]] if fact[2] in _PEOPLE and fact[2] in by_subject else [])


def demonstrate(rng: random.Random, task: Task, prompt: Prompt, careful: float) -> str:
    """An imperfect demonstrator: knows the protocol and copies whole sentences, but mostly those that it has just read.

    Now and then (`careful`, a new coin every turn) it writes down what the question needs of what is in sight, and nothing else.
    """
    facts = parse_facts(prompt.memory) + parse_facts(prompt.section)
    known = chain(task.question, facts)
    if prompt.final:
        place = known[-1][2] if known and known[-1][2] not in _PEOPLE else "unknown"
        return " ".join([*map(worlds.sentence, known), f"\\boxed{{ {place}}}"])
    if rng.random() >= careful:
        known = facts[-rng.randint(1, 3) :]
    return " ".join(map(worlds.sentence, known)) or NO_MEMORY


Example = tuple[list[int], list[int], list[float]]  # prompt ids, completion ids, weight of each completion id


def examples(rng: random.Random, config: BaseConfig, agent: AgentConfig, codec: Codec) -> Iterator[Example]:
    """One step's conversations: documents of one or two sections read by the demonstrator, and documents read whole."""
    for i in range(config.documents + config.full):
        kind = rng.choice(("one_fact", "two_hop"))
        whole = i >= config.documents
        n_sections = rng.randint(1, config.full_sections) if whole else rng.choice((1, 2, 2))
        task = worlds.make_task(rng.random(), n_sections, kind)
        if whole and rng.random() < config.absent:  # a question that the document does not answer
            names = {fact[0] for fact in parse_facts(task.document)}
            if absent := [p for p in worlds.PEOPLE if p not in names]:
                task.question = f"Where is {rng.choice(absent)}?"
        steps = (full_context if whole else memagent)(task, agent, codec)
        prompt = next(steps)
        while prompt is not None:
            if prompt.final and not whole:
                prompt = fill(
                    agent.template("final"), agent.final_tokens, final=True, problem=codec.text(task.question),
                    memory=codec.text(some_memory(rng, task, config.absent)),
                )  # fmt: skip
            completion = codec.text(demonstrate(rng, task, prompt, config.careful))
            ids = [*completion.ids, codec.tokenizer.eos_token_id]
            yield codec.chat(prompt.pieces), ids, [1.0] * len(ids)
            try:
                prompt = steps.send(Turn(prompt, [], ids, [], Finish.STOP, completion))
            except StopIteration:
                prompt = None


def some_memory(rng: random.Random, task: Task, absent: float) -> str:
    """A memory to answer from: what the question needs, or (`absent`) not all of it, and other facts of the document in any order."""
    facts = parse_facts(task.document)
    needed = chain(task.question, facts)
    kept = rng.sample(needed, rng.randrange(len(needed))) if rng.random() < absent else needed
    others = [f for f in rng.sample(facts, min(len(facts), rng.randint(0, 3 - len(kept)))) if f not in needed]
    return " ".join(map(worlds.sentence, rng.sample(kept + others, len(kept + others)))) or NO_MEMORY


def dense(rng: random.Random, codec: Codec, n: int, n_facts: int = 8) -> Iterator[Example]:
    """Facts in a list, then the same facts in another order: what follows a subject is determined, and nothing else is trained."""
    for _ in range(n):
        facts, _ = worlds.make_facts(rng, 4 * n_facts, "two_hop")
        unique = list({f[0]: f for f in facts}.values())[:n_facts]
        again = rng.sample(unique, len(unique))
        first, second = (codec.encode(" ".join(map(worlds.sentence, fs))) for fs in (unique, again))
        yield list(first), list(second), [0.0, 1.0, 1.0, 1.0] * len(again)


def batches(items: list[Example], pad: int, max_tokens: int = 4096) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
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
    return (nn.functional.cross_entropy(logits, ids.flatten()[rows], reduction="none") * weights).sum()


def train_base(config: BaseConfig, out: Path, log=print, every: int = 100):
    """Train the base policy and write it to `out` as a transformers folder (safetensors + tokenizer). Returns the model."""
    tokenizer = make_tokenizer()
    codec = Codec(tokenizer)
    agent = replace(AGENT, layout=config.layout)
    model = make_model(len(tokenizer), config.seed, config.hidden, config.layers, config.intermediate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / 30) * min(1.0, max(0.03, (config.steps - step) / (config.steps * 0.5)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    rng = random.Random(config.seed)
    losses: list[float] = []
    for step in range(config.steps):
        early = step < config.dense * config.steps
        items = list(dense(rng, codec, 32 if early else 4))
        few = BaseConfig(documents=8, full=2, full_sections=2, careful=config.careful) if early else config
        items += examples(rng, few, agent, codec)
        total = sum(sum(weight) for _, _, weight in items)
        for ids, rows, weights in batches(items, codec.pad_id):
            loss = step_loss(model, ids, rows, weights) / total
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % every == 0:
            log(step + 1, sum(losses) / every)
            losses.clear()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    settings.dump(out / "agent.yaml", agent=agent)
    return model
