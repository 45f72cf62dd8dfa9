"""An engine that computes nothing: the remaining time is the host's.

The real scheduler and block manager plan; an executor samples token 1 in every row. Used by
`host_overhead.py`, which also prepares tensors, and by `batch.py`.
"""

from __future__ import annotations

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.engine_stats import EngineInfo
from nanoengine.core.layout import KVGroup, KVLayout
from nanoengine.core.plan import StepPlan, StepResult
from nanoengine.core.scheduler import Scheduler
from nanoengine.engine import LLMEngine

BLOCK_SIZE = 16
VOCAB_SIZE = 2**17


class Answered:
    """A step whose result is available at once."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        """Always the same result."""
        return self._result


class NoExecutor:
    """Token 1 for every row that samples."""

    def launch(self, plan: StepPlan) -> Answered:
        """Nothing to start."""
        return Answered(StepResult(token_ids=[[1] * count for count in plan.num_logits]))

    def shutdown(self) -> None:
        """Nothing to free."""


def make_engine(
    executor: NoExecutor,
    *,
    num_blocks: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
) -> LLMEngine:
    """An engine with this executor."""
    layout = KVLayout(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        block_bytes=1,
        groups=(KVGroup(layers=(0,)),),
    )
    scheduler = Scheduler(
        BlockManager(layout),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    info = EngineInfo(
        model_name="none",
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        max_model_len=max_model_len,
        dtype="float32",
        device="cpu",
        attention_backend="none",
        num_parameters=0,
        weight_bytes=0,
        num_kv_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        block_bytes=1,
        load_s=0.0,
        start_s=0.0,
        memory_plan="",
    )
    return LLMEngine(executor, scheduler, info)
