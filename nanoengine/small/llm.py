"""LLM: text in, text out.

    llm = LLM("path/to/qwen3")
    for answer in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
        print(answer)

It only connects the parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from os import PathLike
from pathlib import Path

import torch
from tokenizers import Tokenizer

from nanoengine.core.plan import StepPlan
from nanoengine.errors import ConfigError
from nanoengine.settings.params import SamplingParams
from nanoengine.small.block_manager import BlockManager
from nanoengine.small.engine import LLMEngine
from nanoengine.small.runner import ModelRunner
from nanoengine.small.scheduler import Scheduler


class LLM:
    """A model with its engine and tokenizer.

    Args:
        model: directory of a Llama, Qwen2 or Qwen3 checkpoint with a tokenizer.json.
        num_blocks: blocks of the KV cache, including the null block.
        block_size: tokens per block.
        max_num_seqs: maximum number of running sequences.
        max_num_batched_tokens: maximum number of tokens per step.
        device: the torch device.
        watch: called with each plan before it runs.

    Raises:
        ConfigError: the directory lacks a file, or limits contradict each other.
        UnsupportedModelError: the checkpoint is not a plain Llama, Qwen2 or Qwen3.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        num_blocks: int = 1025,
        block_size: int = 16,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 1024,
        device: str = "cpu",
        watch: Callable[[StepPlan], None] | None = None,
    ) -> None:
        directory = Path(model)
        for name in ("config.json", "tokenizer.json"):
            if not (directory / name).is_file():
                raise ConfigError(f"{directory} has no {name}: give a checkpoint directory")
        if not (num_blocks > 1 <= block_size and 1 <= max_num_seqs <= max_num_batched_tokens):
            raise ConfigError(
                f"2 <= {num_blocks=}, 1 <= {block_size=} and"
                f" 1 <= {max_num_seqs=} <= {max_num_batched_tokens=} must hold"
            )
        runner = ModelRunner(directory, num_blocks, block_size, torch.device(device), torch.float32)
        runner.start()
        config = runner.model.config
        eos = _eos_token_ids(directory, config["eos_token_id"])
        manager = BlockManager(num_blocks, block_size)
        scheduler = Scheduler(manager, max_num_seqs, max_num_batched_tokens)
        self.engine = LLMEngine(runner, scheduler, config["max_position_embeddings"], eos, watch)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def generate(self, prompts: SequenceOf[str], params: SamplingParams | None = None) -> list[str]:
        """The answers to the prompts, in the same order, n per prompt.

        Args:
            params: for all prompts; None: the defaults of SamplingParams.

        Raises:
            RequestError, CapacityError: a prompt can't run; then none has run.
        """
        token_ids = [self.tokenizer.encode(prompt).ids for prompt in prompts]
        sequences = self.engine.add_requests(token_ids, params or SamplingParams())
        self.engine.run()
        return [self.tokenizer.decode(seq.output_token_ids) for seq in sequences]


def _eos_token_ids(directory: Path, eos: int | list[int]) -> list[int]:
    """The EOS ids, from the generation config if it has any, else from the model's config."""
    path = directory / "generation_config.json"
    if path.is_file():
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id", eos)
    return eos if isinstance(eos, list) else [eos]
