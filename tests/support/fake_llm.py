"""An LLM whose model is a script: the real engine and scheduler over an executor that recites.

It tests everything above the executor, in milliseconds and without a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from nanoengine import LLM
from nanoengine.core.block_manager import BlockManager
from nanoengine.core.layout import KVGroup, KVLayout
from nanoengine.core.plan import StepPlan, StepResult, TokenLogprob
from nanoengine.core.scheduler import Scheduler
from nanoengine.engine import LLMEngine
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams
from nanoengine.text.tokenizer import Tokenizer
from tests.support.fake_executor import Ready, engine_info
from tests.support.text_fixtures import byte_level


class ScriptedExecutor:
    """Samples `answers[prompt]` token by token, then EOS; unknown prompts get EOS at once.

    `hook` is called with each plan before it runs. It may raise, or return errors by row index.
    """

    def __init__(self, answers: dict[tuple[int, ...], list[int]], eos: int, num_blocks: int):
        self.answers, self.eos, self.num_blocks = answers, eos, num_blocks
        self.rows: dict[int, tuple[list[int], int, Any]] = {}
        self.hook: Callable[[StepPlan], dict[int, str] | None] = lambda plan: None
        self.is_shut_down = False

    def start(self) -> KVLayout:
        group = KVGroup(layers=(0,))
        return KVLayout(num_blocks=self.num_blocks, block_size=8, block_bytes=1, groups=(group,))

    def shutdown(self) -> None:
        self.is_shut_down = True

    def launch(self, plan: StepPlan) -> Ready:
        return Ready(self._run(plan))

    def _run(self, plan: StepPlan) -> StepResult:
        errors = self.hook(plan) or {}
        for new in plan.admitted:
            self.rows[new.row] = (list(new.token_ids), new.num_prompt_tokens, new.params)
        for fork in plan.forks:
            tokens, num_prompt, params = self.rows[fork.parent_row]
            self.rows[fork.row] = (list(tokens), num_prompt, params)
        result = StepResult(token_ids=[[] for _ in plan.rows], errors=errors)
        for i, row in enumerate(plan.rows):
            tokens, num_prompt, params = self.rows[row]
            if params.prompt_logprobs is not None:
                start, end = plan.starts[i] + 1, plan.starts[i] + plan.num_scheduled_tokens[i] + 1
                known = [[TokenLogprob(t, -1.0, 1)] for t in tokens[start : min(end, num_prompt)]]
                result.prompt_logprobs[i] = known
            if plan.num_logits[i]:
                answer = self.answers.get(tuple(tokens[:num_prompt]), [])
                done = len(tokens) - num_prompt
                token_id = answer[done] if done < len(answer) else self.eos
                tokens.append(token_id)
                result.token_ids[i] = [token_id]
                if params.logprobs is not None:
                    top = [TokenLogprob(rank, -2.0, rank) for rank in range(params.logprobs)]
                    result.logprobs[i] = [[TokenLogprob(token_id, -0.5, 1), *top]]
        return result


@pytest.fixture(name="make_llm")
def make_llm_fixture(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """Makes LLMs from {prompt: answer}; `extra` token answers by ids; options as for LLM."""

    def make(
        answers: Mapping[str, str] | None = None,
        *,
        model: str = "scripted",
        tokenizer: Tokenizer | None = None,
        num_blocks: int = 64,
        max_model_len: int = 100,
        generation_defaults: dict[str, float] | None = None,
        **options: Any,
    ) -> LLM:
        tokens = tokenizer or byte_level()
        eos = tokens.backend.eos_token_id
        script = {
            tuple(tokens.encode(prompt)): tokens.encode(answer, add_special_tokens=False)
            for prompt, answer in (answers or {}).items()
        }

        def build(config: EngineConfig, tokenizer: object = None) -> LLMEngine:
            executor = ScriptedExecutor(script, eos, num_blocks)
            scheduler = Scheduler(
                BlockManager(executor.start()),
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.step_budget("cpu"),
            )
            info = engine_info(
                model_name=config.model,
                vocab_size=len(tokens.backend),
                eos_token_ids=(eos, tokens.backend.convert_tokens_to_ids("<s>")),
                max_model_len=max_model_len,
                dtype="float32",
                device="cpu",
                attention_backend="naive",
                num_kv_blocks=num_blocks,
                block_size=8,
                block_bytes=1,
                generation_defaults=generation_defaults or {},
            )
            return LLMEngine(executor, scheduler, info, debug_checks=True)

        monkeypatch.setattr("nanoengine.build.build_engine", build)
        monkeypatch.setattr(Tokenizer, "of", lambda config: tokens)
        return LLM(model, **options)

    return make


MakeLLM = Callable[..., LLM]
ANSWERS = {"one": " two three.", "dog": " and a little cat!", "€": " is 10 € — 你好 🙂"}
LONG = SamplingParams(temperature=0, max_tokens=64)


class Bar:
    """A progress bar that records its updates, and may call a function at each refresh."""

    def __init__(self, act: Callable[[], Any] = lambda: None) -> None:
        self.act, self.count, self.text, self.is_closed = act, 0, "", False

    def __call__(self, *, total: int | None, **kwargs: Any) -> Bar:
        self.total = total
        return self

    def update(self, count: int) -> None:
        self.count += count
        self.act()

    def set_postfix_str(self, text: str) -> None:
        self.text = text

    def close(self) -> None:
        self.is_closed = True


def texts(outputs: Any) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def ids(text: str) -> list[int]:
    return byte_level().encode(text)


def executor(llm: LLM) -> ScriptedExecutor:
    assert isinstance(llm.engine.executor, ScriptedExecutor)
    return llm.engine.executor


def assert_idle(llm: LLM) -> None:
    assert not llm.engine.has_unfinished()
    assert llm.stats().active_blocks == 0
    assert llm.engine.observers == []
