"""TRL's GRPOTrainer as the peer of update.py, step.py and real.py: its settings and its tensors."""

from __future__ import annotations

import torch
from datasets import Dataset
from trl import GRPOConfig as TRLConfig
from trl import GRPOTrainer

from config.options import EMBEDDED, GRPOConfig
from models.logprobs import Row
from tokens.codec import Codec


def settings(folder: str, config: GRPOConfig, **own: object) -> TRLConfig:
    """Make TRL's settings: ours where it has them, and off what only costs time."""
    return TRLConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,  # TRL's defaults are bf16 and checkpointing
        gradient_checkpointing=False,
        loss_type="dapo",
        beta=0.0,
        epsilon=config.clip_low,
        epsilon_high=config.clip_high,
        temperature=1.0,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        **own,
    )


def update_trainer(model, config: GRPOConfig, group: int, micro: int, longest: int, folder: str):
    """Make a real trainer for groups of `group` turns in micro-batches of `micro`."""
    args = settings(
        folder,
        config,
        num_generations=group,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=group // micro,
        max_completion_length=longest,
    )
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["x"]}),
        processing_class=Codec.load(EMBEDDED).tokenizer,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = group // micro  # what the training loop sets
    return trainer


def inputs(rows: list[Row], micro: int) -> list[dict[str, torch.Tensor]]:
    """Make what TRL's trainer hands to its loss: one dict for each micro-batch.

    Prompts are padded left, completions right, all to one width.
    """
    prompt_width = max(len(row.prompt_ids) for row in rows)
    completion_width = max(len(row.response_ids) for row in rows)
    prompts = torch.zeros(len(rows), prompt_width, dtype=torch.long)
    completions = torch.zeros(len(rows), completion_width, dtype=torch.long)
    prompt_mask, completion_mask = torch.zeros_like(prompts), torch.zeros_like(completions)
    for k, row in enumerate(rows):
        prompts[k, prompt_width - len(row.prompt_ids) :] = torch.tensor(row.prompt_ids)
        prompt_mask[k, prompt_width - len(row.prompt_ids) :] = 1
        completions[k, : len(row.response_ids)] = torch.tensor(row.response_ids)
        completion_mask[k, : len(row.response_ids)] = 1
    whole = {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask,
        "completion_ids": completions,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([row.advantage for row in rows]),
    }
    n = {"num_items_in_batch": completion_mask.sum()}
    return [
        {name: value[k : k + micro] for name, value in whole.items()} | n
        for k in range(0, len(rows), micro)
    ]


def update(trainer: GRPOTrainer, parts: list[dict[str, torch.Tensor]]) -> None:
    """Leave the gradient of TRL's loss in the trainer's model."""
    trainer.model.zero_grad()
    for part in parts:
        trainer.compute_loss(trainer.model, part).backward()
