import json
import random
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM

from agents import find
from agents.rememr1 import NOT_RECALLED
from config.options import EMBEDDED, BaseConfig
from embedded import tiny
from memagent import NO_MEMORY
from tasks import worlds
from tokens.codec import Codec

SMALL = BaseConfig(
    steps=8,
    careless_steps=4,
    dense_steps=2,
    updates=6,
    answers=3,
    full=1,
    full_sections=2,
    hidden=64,
    intermediate=64,
    recalls=6,
    recall_answers=3,
)


def test_the_initial_attention_heads_look_at_the_tokens_they_are_made_for(codec):
    model = tiny.make_model(len(codec.tokenizer), seed=0)
    model.set_attn_implementation("eager")
    ids = torch.randint(
        2, len(codec.tokenizer), (1, 60), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        attention = model(ids, output_attentions=True).attentions
    for head in range(4):  # layer 0, head j: j + 1 tokens back
        assert attention[0][0, head].diagonal(-(head + 1)).mean() > 0.8
    twice = torch.cat([ids[:, :30], ids[:, :30]], 1)
    with torch.no_grad():
        attention = model(twice, output_attentions=True).attentions[1][0]
    induction = (
        attention[0].diagonal(-29).mean()
    )  # the place after my token's earlier occurrence, 29 back
    assert induction > 4 * attention[0, 30:].mean()
    later = attention[2].diagonal(-29).mean()  # head 2 finds the same place by the token two back
    assert later > 4 * attention[2, 30:].mean()


def test_the_demonstrator_of_the_embedded_policy(codec):
    rng = random.Random(0)
    task = worlds.make_task(0, 2, "two_hop")
    facts = tiny.parse_facts(task.document)
    evidence = [facts[i] for i in task.gold]
    reader = tiny.agent().on(codec)

    def shown(memory, section):
        return reader.prompt("update", 13, problem=task.question, section=section, memory=memory)

    def asked(memory):
        return reader.prompt("final", 24, final=True, problem=task.question, memory=memory)

    def text(some):
        return " ".join(map(worlds.sentence, some))

    def demonstrate(prompt, careful):
        return tiny.demonstrate(rng, prompt, task.question, careful)

    other = [f for f in facts if f not in evidence][:3]
    assert demonstrate(shown(NO_MEMORY, text(other + evidence[:1])), 1.0) == text(evidence[:1])
    assert demonstrate(
        shown(text(evidence[:1] + other[:1]), text(other + evidence[1:])), 1.0
    ) == text(evidence)
    assert demonstrate(shown(NO_MEMORY, text(other)), 1.0) == NO_MEMORY
    assert demonstrate(shown(text(evidence[:1]), text(other)), 0.0) == text(
        other[-1:]
    )  # careless: what was read last
    kept = [
        demonstrate(shown(NO_MEMORY, text(evidence + other)), 0.3) == text(evidence)
        for _ in range(400)
    ]
    assert 0.2 < sum(kept) / len(kept) < 0.4
    answer = demonstrate(asked(text(evidence)), 0.0)
    assert answer == text(evidence) + f" \\boxed{{ {task.answers[0]}}}"
    assert demonstrate(asked(text(other)), 0.0) == "\\boxed{ unknown}"


def test_memories_to_go_on_from_hold_what_is_needed_or_part_of_it():
    rng = random.Random(0)
    task = worlds.make_task(0, 2, "two_hop")
    facts = tiny.parse_facts(task.document)
    evidence = {facts[i] for i in task.gold}
    kept = [
        set(tiny.parse_facts(tiny.some_memory(rng, task.question, facts, absent=0.5)))
        for _ in range(300)
    ]
    assert all(len(memory) <= 3 and memory <= set(facts) for memory in kept)
    assert {len(memory & evidence) for memory in kept} == {0, 1, 2}
    assert all(
        evidence <= set(tiny.parse_facts(tiny.some_memory(rng, task.question, facts, absent=0.0)))
        for _ in range(50)
    )
    assert tiny.some_memory(rng, task.question, [], absent=0.5) == NO_MEMORY


def test_the_demonstrator_that_looks_back_stores_candidates_and_asks_for_the_one_that_matters(
    codec,
):
    reader = tiny.agent("rememr1").on(codec)

    def demonstrate(section="", memory=NO_MEMORY, recalled="", careful=1.0):
        slots = dict(
            problem="Where is Anna?",
            memory=memory,
            recalled_memory=recalled or NOT_RECALLED,
        )
        prompt = (
            reader.prompt("recall_update", 20, section=section, **slots)
            if section
            else reader.prompt("recall_final", 24, final=True, **slots)
        )
        return tiny.demonstrate_recall(random.Random(1), prompt, "Where is Anna?", careful)

    other = (
        "Otto reached Lima. Ida met Emil. Olga toured Oslo. "
        "Nils joined Max. Rosa entered Rome. Karin toured Graz."
    )
    stored = "Olga toured Oslo. Rosa entered Rome. Karin toured Graz."
    assert (
        demonstrate(other) == f"<update> {stored}</update>"
    )  # nothing of Anna yet: who came to a place may matter
    assert demonstrate("Ida met Emil.") == f"<update> {NO_MEMORY}</update>"
    assert (
        demonstrate("Anna met Otto. Ida met Emil.", stored)
        == "<update> Anna met Otto.</update><recall> Otto</recall>"
    )
    assert (
        demonstrate(other, "Anna met Vera.") == "<update> Anna met Vera.</update>"
    )  # asked for once, when it was read
    whole = "Anna met Otto. Otto reached Lima."
    assert (
        demonstrate(other, "Anna met Otto.")
        == demonstrate("Ida met Emil.", "Anna met Otto.", other)
        == f"<update> {whole}</update>"
    )
    assert demonstrate(memory="Anna met Otto.", recalled=other) == f"{whole} \\boxed{{ Lima}}"
    assert (
        demonstrate(memory="Anna met Otto.", recalled=stored) == "Anna met Otto. \\boxed{ unknown}"
    )
    assert demonstrate(other, stored, careful=0.0).startswith(
        "<update> Karin toured Graz.</update>"
    )  # the last that it has read


def test_states_to_go_on_from_have_what_is_needed_in_memory_or_recalled():
    rng = random.Random(0)
    task = worlds.make_task(0, 3, "two_hop_reverse")
    facts = tiny.parse_facts(task.document)
    before = [facts[k : k + 6] for k in range(0, 18, 6)]
    evidence = {facts[i] for i in task.gold}
    where = set()
    for _ in range(300):
        memory, recalled = (
            tiny.parse_facts(text)
            for text in tiny.some_state(rng, task.question, before, absent=0.3)
        )
        assert len(memory) <= 3 and len(recalled) <= 3 and {*memory, *recalled} <= {*facts}
        where.add((len(evidence & {*memory}), len(evidence & {*recalled})))
    assert where == {(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 2)}
    assert tiny.some_state(rng, task.question, [], absent=0.3) == (NO_MEMORY, "")


def test_training_sees_short_documents_of_training_facts_only(codec):
    config = replace(BaseConfig(), updates=40, answers=10, full=8)
    longest = 0
    for prompt, completion, weights in tiny.examples(random.Random(0), config, codec, careful=0.5):
        assert len(completion) == len(weights) and completion[-1] == codec.tokenizer.eos_token_id
        text = codec.tokenizer.decode(prompt + completion)
        section = text.partition("<section>\n")[2].partition("\n</section>")[0]
        longest = max(longest, len(tiny.parse_facts(section)))
        pairs = {(f[0], f[2]) for f in tiny.parse_facts(section)}
        assert {worlds.split_of(*pair) for pair in pairs} <= {"train"}
    assert longest <= config.full_sections * worlds.FACTS_PER_SECTION


def test_training_is_reproducible_and_writes_a_model_that_loads(tmp_path):
    losses = []
    for name in ("a", "b"):
        tiny.train_base(SMALL, tmp_path / name, log=lambda step, loss: losses.append(loss), every=4)
    assert losses[:3] == losses[3:] and losses[2] < losses[0]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert weights[0] == weights[1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    codec = Codec.load(tmp_path / "a")
    assert type(model).__name__ == "LlamaForCausalLM" and model.config.vocab_size == len(
        codec.tokenizer
    )
    assert len(codec.encode("Anna joined Boris.")) == 4  # the tokenizer comes back as it was saved
    assert json.loads((tmp_path / "a" / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]


def test_the_embedded_policy_says_how_it_reads_and_in_which_form_it_answers():
    stored = find.of_model(EMBEDDED)
    assert stored == tiny.READING | {"layout": "shared"} and stored["form"] == "boxed"
    assert find.make("memagent", stored).config == tiny.agent().config
