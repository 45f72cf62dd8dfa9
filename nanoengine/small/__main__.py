"""`python -m nanoengine.small PROMPT...`: generates with the demo model and shows every step.

python -m nanoengine.small "Once upon a time"
python -m nanoengine.small "Tom has a red hat. Tom" "Tom has a red hat. Mia" --num-blocks 8
"""

from __future__ import annotations

import signal
from typing import Annotated

import tyro

from nanoengine.assets import demo_model_path
from nanoengine.core.plan import StepPlan
from nanoengine.errors import NanoEngineError
from nanoengine.settings.params import SamplingParams
from nanoengine.small.llm import LLM


def main(
    prompts: Annotated[tuple[str, ...], tyro.conf.Positional] = ("Once upon a time",),
    /,
    model: str = str(demo_model_path()),
    max_tokens: int = 16,
    temperature: float = 0.0,
    num_blocks: int = 33,
    block_size: int = 8,
    max_num_batched_tokens: int = 16,
) -> None:
    """Generates text and prints each plan in words and the pool as one line of characters.

    Args:
        prompts: texts to continue.
        model: checkpoint directory; the demo model is the default.
        max_tokens: maximum number of tokens per answer.
        temperature: 0 selects the most likely token.
        num_blocks: blocks of the KV cache; a small number causes preemptions.
        block_size: tokens per block.
        max_num_batched_tokens: maximum number of tokens per step; a small number causes chunks.
    """

    def show(plan: StepPlan) -> None:
        print(f"{plan}\n  blocks {llm.engine.scheduler.block_manager.pool}")

    sizes = {"num_blocks": num_blocks, "block_size": block_size, "max_num_seqs": 4}
    llm = LLM(model, **sizes, max_num_batched_tokens=max_num_batched_tokens, watch=show)
    print("blocks: 0 null, . empty, c cached, else the number of sequences that use it")
    answers = llm.generate(prompts, SamplingParams(temperature=temperature, max_tokens=max_tokens))
    for prompt, answer in zip(prompts, answers, strict=True):
        print(f"\n{prompt}\n  -> {answer.strip()}")


if __name__ == "__main__":
    # Why: the signal ends the process when `| head` has exited. Windows has no SIGPIPE.
    signal.signal(getattr(signal, "SIGPIPE", signal.SIGTERM), signal.SIG_DFL)
    try:
        tyro.cli(main)
    except NanoEngineError as error:
        raise SystemExit(f"error: {error}") from None
