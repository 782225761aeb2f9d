"""vLLM in the trainer's own process: it samples, sleeps while the trainer updates, and wakes again.

One engine of tensor parallelism 1 a rank. `awake(policy)` is a step of it, in an order that counts:

    wake the weights       memory is mapped again: what is written to it before is lost
    stream, or swap        the policy's present weights, see below
    wake the cache         of keys and values; a prompt before that waits for ever
    forget every prefix    it was computed with other weights
    sample
    sleep                  never: nothing moves; 1: weights go to host memory, the cache is dropped;
                           2: both are dropped, so that the next step has to stream all weights

Full weights are streamed, one tensor at a time in the policy's order and by its names:

    model.layers.0.self_attn.q_proj.weight   gathered from its shards, in vLLM's dtype
    -> model.layers.0.self_attn.qkv_proj     rows [0, n_q), written in place by vLLM's own loader,
                                             which joins q, k, v and gate, up, and casts nothing

Adapters are swapped: what is trained goes, by peft's names, to a temporary folder, and from there
over the one adapter that vLLM has a slot for. Frozen prompts go without that adapter.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from config.errors import UserError
from memagent import Finish, Prompt, Turn
from models.logprobs import without
from models.ranks import full_tensor, world
from rollout import Engine, Sampling, refusal
from tokens.codec import Codec

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM can allocate; any other rank takes the next larger one."""
FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH}

# ---------------------------------------------------------------- vLLM in this process


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore torch's random states on exit: vLLM draws from them, even for prompts with a seed."""
    state = torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if on_gpu:
            torch.cuda.set_rng_state_all(on_gpu)


@contextmanager
def preserve_process() -> Iterator[None]:
    """Restore what vLLM changes for the whole process: random states, threads, environment.

    Its own variables (VLLM_...) stay: it reads them again later.
    """
    environment = dict(os.environ)
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    states = random.getstate(), np.random.get_state()
    try:
        with preserve_rng():
            yield
    finally:
        for name in os.environ.keys() - environment.keys():
            if not name.startswith("VLLM_"):
                del os.environ[name]
        os.environ.update(environment)
        torch.set_num_threads = set_threads  # on a CPU vLLM replaces it by a no-op
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])


def import_vllm(packed: bool = False):
    """Import the package, in this process and quietly. UserError if it is not installed.

    It reads its settings from the environment when it is imported. packed: see `ColocatedEngine`.
    """
    on_cpu = not torch.cuda.is_available()
    for name, value, wanted in (
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0", True),
        ("VLLM_LOGGING_LEVEL", "ERROR", True),
        ("VLLM_NO_USAGE_STATS", "1", True),
        # vLLM 0.31 imports it unless told not to
        ("VLLM_USE_FLASHINFER_SAMPLER", "0", importlib.util.find_spec("flashinfer") is None),
        # else the first prompt spends half a minute on compiling
        ("TORCHDYNAMO_DISABLE", "1", on_cpu),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind", on_cpu),
    ):
        if wanted:
            os.environ.setdefault(name, value)
    try:
        with preserve_process():
            import vllm
    except ImportError as error:
        raise UserError(
            f"The engine vllm is not installed ({error}); docs/train.md says how."
        ) from error
    if on_cpu:
        import vllm._custom_ops

        # packed weights silently stay as they are when new ones are loaded
        kernels = hasattr(torch.ops._C, "create_onednn_mm_handler")
        vllm._custom_ops._supports_onednn = packed and kernels
    return vllm


def check_settings(sleep: str, lora_rank: int) -> None:
    """Raise a UserError for a sleep level or an adapter rank that the engine does not support."""
    if sleep == "2" and lora_rank:
        raise UserError(
            "Sleep level 2 drops the base weights, and adapters do not bring them back: "
            "use level 1, or never."
        )
    if lora_rank > RANKS[-1]:
        raise UserError(f"vLLM takes adapters up to rank {RANKS[-1]}, not {lora_rank}.")


def _mask_logits(model: torch.nn.Module, ids: list[int]) -> None:
    """Let vLLM's model say none of the tokens `ids`, as the trainer's.

    Its own way, `allowed_token_ids`, takes a list as long as the vocabulary with every prompt.
    """
    compute, masked = model.compute_logits, torch.tensor(ids, dtype=torch.int64)

    def compute_logits(*args, **kwargs) -> torch.Tensor | None:
        logits = compute(*args, **kwargs)
        nonlocal masked
        if logits is not None:
            masked = masked.to(logits.device)
        return logits if logits is None else without(masked, logits)

    model.compute_logits = compute_logits


def _logprobs_of(scores, ids: list[int]) -> list[float]:
    """Return the log-probs of the tokens that were drawn.

    scores: vLLM's, flat: at each position the token that stands there comes first.
    """
    starts = scores.start_indices
    if [scores.token_ids[i] for i in starts] != ids:
        raise RuntimeError("vLLM's log-probs are not those of the tokens that it has drawn.")
    return [scores.logprobs[i] for i in starts]


# ---------------------------------------------------------------- the engine


class ColocatedEngine(Engine):
    """A vLLM engine in this process.

    It has the weights of `model` until `awake(policy)` loads others.

    window: most tokens of a prompt and its response. rows: most turns in flight. kv_gib: size of
    the key/value cache; 0 = what vLLM's `gpu_memory_utilization` leaves of the card. lora_rank:
    rank of the adapters that a policy will bring; 0 = it brings all its weights. sleep: never, 1 or
    2, see above. options: further arguments of `vllm.LLM`, such as gpu_memory_utilization and
    trust_remote_code; and packed: no policy will bring weights, so that on a CPU vLLM may compute
    with copies of them in oneDNN's layout.
    vLLM keeps its state in globals: there is one engine a process, until `close`.
    """

    # referred to from here, or the garbage collector would end the process group with the engine
    _open: ColocatedEngine | None = None

    def __init__(
        self,
        model: str | Path,
        codec: Codec,
        window: int,
        rows: int = 256,
        kv_gib: float = 0.0,
        dtype: str = "float32",
        lora_rank: int = 0,
        sleep: str = "never",
        **options,
    ):
        if ColocatedEngine._open is not None:
            raise RuntimeError("There is one vLLM engine a process: close the other one first.")
        self.codec, self.window, self.lora_rank = codec, window, lora_rank
        self.level, self.dtype = sleep, getattr(torch, dtype)
        self._vllm = import_vllm(options.pop("packed", False))
        settings = {
            "dtype": dtype,
            "max_model_len": window,
            "max_num_seqs": rows,
            "gpu_memory_utilization": 0.5,
            "kv_cache_memory_bytes": int(kv_gib * 2**30) or None,
        }
        settings |= self._fixed_settings() | options
        with preserve_process():
            self._engine = self._vllm.LLM(str(model), **settings).llm_engine
        masked = codec.never_sampled(self._engine.model_config.get_vocab_size())
        self._engine.apply_model(partial(_mask_logits, ids=masked))
        ColocatedEngine._open = self
        self._adapter: object | None = None
        self._folder: Path | None = None  # of the adapter
        self._keys = 0
        self._waiting: dict[int, tuple[Prompt, Sampling, int]] = {}
        self._prompts: dict[str, tuple[Prompt, list[int]]] = {}  # in flight
        self.prefilled_tokens = self.reused_tokens = self.generated_tokens = 0
        self._sleep()

    def _fixed_settings(self) -> dict[str, object]:
        """Return the arguments of `vllm.LLM` that follow from what the engine is for.

        On a GPU `max_num_batched_tokens` is vLLM's own: of 0.31, 16,384 on cards of 70 GiB or more
        but an A100, else 8,192. A longer prompt is read in parts.
        """
        from vllm.config import KernelConfig

        settings: dict[str, object] = {
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "use_tqdm_on_load": False,
        }
        if world() > 1:  # each rank has an engine of its own, and torchrun has started them
            settings["distributed_executor_backend"] = "external_launcher"
        if "enable_jit_warmup" in KernelConfig.__dataclass_fields__:  # of vLLM 0.31
            # kernels are compiled when they are needed; all ahead take more than half a minute
            settings["kernel_config"] = {"enable_jit_warmup": False}
        if self.dtype != torch.float32:  # as the trainer (models/logprobs.py, logits_of)
            settings["hf_overrides"] = {"head_dtype": "float32"}
        if self.lora_rank:
            settings |= {"enable_lora": True, "max_loras": 1}
            settings["max_lora_rank"] = next(r for r in RANKS if r >= self.lora_rank)
        # A CPU build refuses sleep mode: the calls and their order are the same there, but no
        # memory is released.
        if torch.cuda.is_available():
            settings["enable_sleep_mode"] = self.level != "never"
        else:
            settings |= {"enforce_eager": True, "block_size": 32}
            # vLLM 0.31 turns a prompt's random generator back after a part of it, which that of a
            # CPU refuses: "CPU Generator does not use offset". A batch therefore holds whole ones.
            settings |= {
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(4096, self.window),
            }
        return settings

    # ------------------------------------------------------------ turns

    def add(self, prompt: Prompt, sampling: Sampling = Sampling(), seed: int = 0) -> int:
        self._keys += 1
        self._waiting[self._keys] = prompt, sampling, seed
        return self._keys

    def _admit(self) -> list[tuple[int, Turn]]:
        """Hand what waits to vLLM; return the turns of prompts that do not fit the window.

        On a CPU, vLLM 0.31 adds the adapter to base-model requests of the same batch (its pull
        request 48421), so frozen prompts and others wait for each other there.
        """
        apart = self.lora_rank and not torch.cuda.is_available()
        refused: list[tuple[int, Turn]] = []
        for key, (prompt, sampling, seed) in [*self._waiting.items()]:
            first, _ = next(iter(self._prompts.values()), (prompt, ()))
            if apart and first.frozen != prompt.frozen:
                continue
            del self._waiting[key]
            ids = prompt.ids(self.codec)
            if turn := refusal(prompt, ids, self.window, self.codec):
                refused.append((key, turn))
                continue
            self._prompts[str(key)] = prompt, ids
            self._engine.add_request(
                str(key),
                {"prompt_token_ids": ids},
                self._vllm.SamplingParams(
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    max_tokens=prompt.max_tokens,
                    seed=seed % 2**63,
                    stop_token_ids=sorted(self.codec.eos_ids),
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=False,
                    output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
                ),
                lora_request=None if prompt.frozen else self._adapter,
            )
        return refused

    def step(self) -> list[tuple[int, Turn]]:
        done = self._admit()
        if done or not self._prompts:
            return done
        with preserve_rng():
            outputs = self._engine.step()
        for output in outputs:
            if output.finished and output.request_id in self._prompts:  # else it was given up
                prompt, ids = self._prompts.pop(output.request_id)
                done.append((int(output.request_id), self._turn(prompt, ids, output)))
        return done

    def drop(self, key: int) -> None:
        self._waiting.pop(key, None)
        if self._prompts.pop(str(key), None):
            self._engine.abort_request([str(key)])

    def _turn(self, prompt: Prompt, ids: list[int], output) -> Turn:
        """Make and count a turn of what vLLM has drawn."""
        (sampled,) = output.outputs
        out = list(sampled.token_ids)
        logprobs = _logprobs_of(sampled.logprobs, out)
        finish = FINISHES.get(sampled.finish_reason, Finish.ERROR)
        turn = Turn(prompt, ids, out, logprobs, finish, self.codec.response(out))
        if finish is Finish.ERROR:
            turn.error = f"vLLM ended the turn for the reason {sampled.finish_reason!r}"
        turn.reused_tokens = output.num_cached_tokens or 0
        self.reused_tokens += turn.reused_tokens
        self.prefilled_tokens += len(ids) - turn.reused_tokens
        self.generated_tokens += len(out)
        return turn

    # ------------------------------------------------------------ phases

    @contextmanager
    def awake(self, policy=None) -> Iterator[None]:
        """Keep the engine ready to generate, with the policy's present weights (None: its own)."""
        self._wake("weights")
        if policy is not None:
            self.take_over(policy)
        self._wake("kv_cache")
        self.forget()
        try:
            yield
        finally:
            self._abandon()
            self._sleep()

    def take_over(self, policy) -> None:
        """Load the policy's weights: stream all of them, or swap the adapter.

        Cached prefixes are still those of the old weights until `forget`.
        """
        weights = (
            (name, full_tensor(p, self.dtype))
            for name, p in policy.named_parameters()
            if p.requires_grad or not self.lora_rank
        )
        if not self.lora_rank:
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            return
        from vllm.lora.request import LoRARequest

        adapters = dict(weights)
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="memagent-"))
        policy.save_pretrained(self._folder, save_embedding_layers=False, state_dict=adapters)
        self._engine.add_lora(LoRARequest("policy", 1, str(self._folder), load_inplace=True))
        self._adapter = LoRARequest("policy", 1, str(self._folder))

    def forget(self) -> None:
        """Drop every cached prefix: it was computed with other weights.

        vLLM would not notice: it tells adapters apart by a number, which stays the same.
        """
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: turns are still in flight.")

    def _abandon(self) -> None:
        """Abort the turns in flight, after an error in the middle of a rollout."""
        self._engine.abort_request([*self._prompts])
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._prompts.clear()
        self._waiting.clear()

    def _sleep(self) -> None:
        if self.level != "never":
            self._engine.sleep(level=int(self.level))

    def _wake(self, part: str) -> None:
        if self.level != "never":
            self._engine.wake_up(tags=[part])

    def close(self) -> None:
        """Shut down the engine, and with it the process group, which the trainer shares."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if ColocatedEngine._open is self:
            self._engine.engine_core.shutdown()
            ColocatedEngine._open = None
