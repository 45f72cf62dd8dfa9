"""As much of `LLM` as the benchmark uses: the real engine without a model."""

from __future__ import annotations

from types import SimpleNamespace

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.engine_stats import EngineInfo
from nanoengine.core.layout import KVGroup, KVLayout
from nanoengine.core.plan import StepPlan, StepResult, StepTimes
from nanoengine.core.scheduler import Scheduler
from nanoengine.engine import LLMEngine
from nanoengine.settings.config import EngineConfig
from tests.support.fake_executor import Ready


class CountingExecutor:
    """Answers each sampled row with token 1, and says that a step took a second of forward."""

    def launch(self, plan: StepPlan) -> Ready:
        tokens = [[1] * min(n, 1) for n in plan.num_logits]
        return Ready(StepResult(token_ids=tokens, times=StepTimes(forward_s=1.0)))


class BenchLLM:
    """An LLM of a vocabulary of 4,096; `lose_tokens` takes a token from each output."""

    lose_tokens = False

    def __init__(self, model: str = "m", **options: object) -> None:
        self.config = EngineConfig.from_kwargs(model=model, **options)
        layout = KVLayout(
            num_blocks=100, block_size=16, block_bytes=1024, groups=(KVGroup(layers=(0,)),)
        )
        scheduler = Scheduler(
            BlockManager(layout), max_num_seqs=self.config.max_num_seqs, max_num_batched_tokens=8192
        )
        self.info = EngineInfo(
            model_name=model,
            vocab_size=4096,
            eos_token_ids=(2,),
            max_model_len=2048,
            dtype="float32",
            device="cpu",
            attention_backend="cpu",
            num_parameters=1_000_000,
            weight_bytes=4_000_000,
            num_kv_blocks=100,
            block_size=16,
            block_bytes=1024,
            load_s=1.5,
            start_s=2.5,
            memory_plan="",
        )
        self.engine = LLMEngine(CountingExecutor(), scheduler, self.info)

    def __enter__(self) -> BenchLLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Nothing to give back."""

    def generate(self, prompts: list, params: list, use_tqdm: bool) -> list:
        requests = [
            self.engine.add_request(str(i), prompt["prompt_token_ids"], p)
            for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
        ]
        while self.engine.has_unfinished():
            self.engine.step()
        lost = 1 if self.lose_tokens else 0
        return [
            SimpleNamespace(
                request_id=request.request_id,
                outputs=[SimpleNamespace(token_ids=s.output_token_ids[lost:])],
                metrics=SimpleNamespace(ttft_s=0.25, e2e_s=2.0),
            )
            for request in requests
            for s in request.sequences
        ]
