"""Presets: several settings at once, the published ones among them. Plain data: section of the settings -> fields.

Holds: `PRESETS`, `COMPAT`, `OF_AGENT` and their look-up. Leaves out: what the settings are and how they are resolved (config/options.py). No torch.
Exercise it: `python cli.py train --preset rememr1 --dry-run`. Read next: data.py.
"""

from __future__ import annotations

from config.errors import UserError

# name -> fields of GRPOConfig, AgentConfig, RunConfig; spec memagent.md 2 and 6, rememr1.md 3 and 9.
# In none of the published ones do we copy how rows are dealt out: theirs are cut into mini-batches wherever
# they stand (verl takes the token mean rank by rank; vime leaves out the rows over a multiple of 64), ours
# are whole trajectories, normalised over all ranks, none left out. Validation is ours: greedy.
PRESETS: dict[str, tuple[dict, dict, dict]] = {
    "default": ({}, {}, {}),
    # for the embedded policy, chosen on the dev split (dev/LOG.md). Sampled hotter than evaluated: a failure of
    # probability p at temperature T has about p^T at 1; hotter as documents grow, because failures, the signal, get rare
    "demo": (
        dict(
            tasks_per_step=(8,),
            group_size=16,
            normalisation="mean",
            temperature=(1.3, 1.6, 1.9, 2.2),
            lr=4e-4,
            decay_from=0.6,
            turns_per_trajectory=5,
            micro_tokens=4096,
        ),
        {},
        {},
    ),
    # MemAgent 7B as its code trains it. Second-hand, from notes on the paper's v2 (report/published.py): a
    # batch of 256 for 7B and 14B (the code has 256 for 14B alone), about 400 steps on 32,768
    # documents of 32K tokens, then a second stage, on 2,560 documents of up to 60K tokens
    # (DocQA-RL-1.6K among them), of which the released code knows nothing and which is not here
    "paper": (
        dict(
            tasks_per_step=(128,),
            group_size=16,
            updates_per_rollout=16,
            credit="share",
            normalisation="mean",
            aggregation="token_mean",
            clip_low=0.2,
            clip_high=0.2,
            dual_clip=3.0,
            kl=1e-3,
            importance="none",
            lr=1e-6,
            warmup=20,
            betas=(0.9, 0.999),
            weight_decay=0.01,
            warmup_from="zero",
            without_signal="keep",
        ),
        dict(
            chunk_tokens=5000,
            memory_tokens=1024,
            final_tokens=1024,
            max_sections=8,
            over="center",
            layout="paper",
            empty="placeholder",
        ),
        dict(shuffle=False, save_every=10),
    ),
    # An optimizer step for every 64 turns, each the mean of its turns' token means; Qwen3 thinks, as nothing in
    # vime switches that off. Not copied: in vime thoughts get into the memory and are graded. Not known: upstream's
    # own custom_convert.py (this is a public fork's), what a newer vime, which asks for rollout_ids that this file
    # does not give, trains on, and any result.
    "vime": (
        dict(
            tasks_per_step=(8,),
            group_size=8,
            rows_per_update=64,
            credit="split",
            normalisation="std",
            aggregation="turn_mean",
            without_signal="keep",
            clip_low=0.2,
            clip_high=0.3,
            kl=1e-3,
            importance="none",
            lr=1e-6,
            warmup=0,
            betas=(0.9, 0.98),
            weight_decay=0.1,
        ),
        dict(
            chunk_tokens=2048,
            memory_tokens=1024,
            final_tokens=256,
            max_sections=64,
            over="head",
            layout="paper",
            empty="keep",
            thinking=True,
        ),
        dict(save_every=50),
    ),
    "rememr1": (
        dict(
            tasks_per_step=(128,),
            group_size=16,
            updates_per_rollout=16,
            normalisation="mean",
            clip_low=0.2,
            clip_high=0.2,
            dual_clip=3.0,
            kl=1e-3,
            importance="none",
            lr=1e-6,
            warmup=20,
            warmup_from="zero",
            betas=(0.9, 0.999),
            weight_decay=0.01,
            top_p=0.999,
            alpha=0.8,
            without_signal="keep",
        ),
        dict(
            chunk_tokens=5000,
            memory_tokens=2048,
            query_tokens=128,
            step_tokens=2048,
            final_tokens=2048,
            max_sections=8,
            over="center",
            layout="paper",
        ),
        dict(agent="rememr1", shuffle=False, save_every=20),
    ),
}

# where this agent is trained, whatever the preset; a flag goes before it. ReMemR1 divides by no deviation (spec rememr1.md 8)
OF_AGENT: dict[str, dict] = {"rememr1": dict(normalisation="mean")}

# every point where ReMemR1's paper and its code are not what we do by default (spec rememr1.md 2): fields of GRPOConfig, of AgentConfig, and
# of AgentConfig where nothing is trained: upstream evaluates in another way than it trains (D-4)
COMPAT: dict[str, tuple[dict, dict, dict]] = {
    "paper": (
        dict(
            memory_reward="gain",
            callback_reward="seen",
            format_reward="all",
            recall_match="words",
            recall_words="all",
            state_reward_scale=1.0,
            alpha=0.8,
            normalisation="mean",
            aggregation="state_mean",
        ),
        dict(
            memory_text="update",
            on_missing_update="keep_previous",
            query_text="first",
            history_scope="include_current",
            retriever="word_recall",
            recall_k=1,
            recall_at_zero=False,
            callback="learned",
            boxed_literal="single",
        ),
        {},
    ),
    "upstream": (
        dict(
            memory_reward="level",
            callback_reward="prompt",
            format_reward="one_line",
            recall_match="substring",
            recall_words="all",
            state_reward_scale=2.0,
            alpha=0.8,
            normalisation="mean",
            aggregation="token_mean",
        ),
        dict(
            memory_text="response_minus_recall",
            on_missing_update="whole_response",
            query_text="greedy",
            history_scope="exclude_new",
            retriever="tfidf_tokens",
            recall_k=1,
            recall_at_zero=True,
            callback="learned",
            boxed_literal="double",
        ),
        dict(history_scope="include_current", boxed_literal="single"),
    ),
}

# what `--compat` cannot bring: printed beside the axes
NOT_IMITATED = {
    "upstream": (
        "among equally good memories the most recent is recalled, not the one that a hash picks; a look back that fails leaves its "
        "placeholder, never the word None, and that placeholder is no recalled text to the rewards; a blank memory and the first-memory "
        "literal are never recalled; <think> thoughts enter no memory and no reward; sections keep their token ids in evaluation too"
    ),
}


def preset_fields(name: str) -> tuple[dict, dict, dict]:
    """A preset's fields of GRPOConfig, of AgentConfig and of RunConfig."""
    if name not in PRESETS:
        raise UserError(f"Unknown preset {name!r}: choose one of {', '.join(PRESETS)}.")
    return PRESETS[name]


def compat_fields(name: str, training: bool) -> dict[str, dict]:
    """The fields that `--compat` sets: section -> fields; {} for an empty name."""
    if not name:
        return {}
    if name not in COMPAT:
        raise UserError(f"Unknown compat {name!r}: choose one of {', '.join(COMPAT)}.")
    grpo, agent, reading = COMPAT[name]
    return {"grpo": grpo, "agent": agent if training else agent | reading}
