"""The small engine against the large one: tokens, plans, interchangeable parts, and size."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.assets import demo_model_path
from nanoengine.core import waiting
from nanoengine.core.block_manager import BlockManager as LargeBlockManager
from nanoengine.core.plan import StepPlan
from nanoengine.core.scheduler import Scheduler as LargeScheduler
from nanoengine.engine import LLMEngine as LargeEngine
from nanoengine.errors import (
    CapacityError,
    ConfigError,
    PromptTooLongError,
    RequestError,
    UnsupportedModelError,
)
from nanoengine.small import block_pool, sampler
from nanoengine.small.__main__ import main
from nanoengine.small.block_manager import BlockManager
from nanoengine.small.engine import LLMEngine
from nanoengine.small.llm import LLM as SmallLLM
from nanoengine.small.model import read_config
from nanoengine.small.runner import ModelRunner
from nanoengine.small.scheduler import Scheduler
from tests.support.checkpoints import make_checkpoint
from tests.support.fake_executor import EOS, FakeExecutor, expected_output, make_engine, make_layout
from tests.support.logits import uniforms_of
from tools.loc import measure

MAX_LINES = 585
NUM_WORKLOADS = 300
BLOCK_SIZE = 4


class Workload:
    """Random prompts, many with a common prefix, and limits that cause prefix sharing, waiting,
    chunked prefill and preemption."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        starts = [
            [draw.randrange(1, 50) for _ in range(draw.randrange(40))]
            for _ in range(draw.randrange(1, 4))
        ]
        self.requests = []
        for number in range(draw.randrange(1, 14)):
            own = [draw.randrange(1, 50) for _ in range(draw.randrange(1, 20))]
            prompt = draw.choice([[], *starts]) + own
            if self.requests and draw.random() < 0.2:
                prompt = self.requests[-1][0]  # the cache may then hold the whole prompt
            params = SamplingParams(
                max_tokens=draw.randrange(1, 25),
                seed=number,
                ignore_eos=draw.random() < 0.5,
                stop_token_ids=[draw.randrange(50)] if draw.random() < 0.3 else None,
            )
            self.requests.append((prompt, params))
        longest = max(len(prompt) + params.max_tokens for prompt, params in self.requests)
        self.num_blocks = -(-longest // BLOCK_SIZE) + 1 + draw.randrange(20)
        self.max_num_seqs = draw.randrange(1, 8)
        self.budget = self.max_num_seqs + draw.randrange(60)

    def run_small(self) -> tuple[list[list[int]], list[StepPlan], Scheduler]:
        """Returns the outputs and plans of the small engine."""
        layout = make_layout(self.num_blocks, BLOCK_SIZE)
        executor = FakeExecutor(
            layout, max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.budget
        )
        scheduler = Scheduler(
            BlockManager(self.num_blocks, BLOCK_SIZE),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
        )
        engine = LLMEngine(executor, scheduler, max_model_len=1000, eos_token_ids=[EOS])
        sequences = [engine.add_requests([prompt], params)[0] for prompt, params in self.requests]
        engine.run()
        return [seq.output_token_ids for seq in sequences], executor.plans, scheduler

    def run_large(self) -> list[StepPlan]:
        """Returns the plans of the large engine."""
        engine = make_engine(
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
        )
        for number, (prompt, params) in enumerate(self.requests):
            engine.add_request(str(number), prompt, params)
        while engine.has_unfinished():
            engine.step()
        assert isinstance(engine.executor, FakeExecutor)
        return engine.executor.plans


def decisions(plan: StepPlan) -> StepPlan:
    """Returns the plan without reasons and waits, which are only for display."""
    admitted = [new._replace(token_ids=tuple(new.token_ids)) for new in plan.admitted]
    return replace(plan, admitted=admitted, reasons=[], waits=[])


def test_random_workloads_give_the_tokens_of_each_prompt_run_alone():
    for seed in range(NUM_WORKLOADS):
        workload = Workload(seed)
        outputs, _, _ = workload.run_small()
        for (prompt, params), output in zip(workload.requests, outputs, strict=True):
            stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else (EOS,))}
            assert output == expected_output(prompt, params.seed, params.max_tokens, stops), seed


def test_plans_equal_those_of_the_large_scheduler(monkeypatch):
    # Why: the large scheduler can skip a waiting request that does not fit, and lets chunks of
    # equal prompts reuse blocks that another has just filled. The small one does neither.
    monkeypatch.setattr(waiting, "MAX_LOOK_AHEAD", 0)
    monkeypatch.setattr(LargeBlockManager, "reuse_filled_blocks", lambda self, seq: None)
    seen = dict.fromkeys(("shared", "chunks", "preempted", "evicted"), 0)
    for seed in range(NUM_WORKLOADS):
        _, small, scheduler = Workload(seed).run_small()
        large = Workload(seed).run_large()
        assert list(map(decisions, small)) == list(map(decisions, large)), seed
        admitted = [new for plan in small for new in plan.admitted]
        seen["shared"] += any(new.num_cached_tokens for new in admitted)
        seen["chunks"] += any(0 in plan.num_logits for plan in small)
        seen["preempted"] += any(plan.preempted for plan in small)
        blocks = [b for plan in small for update in plan.table_updates for b in update.block_ids]
        seen["evicted"] += len(blocks) > scheduler.block_manager.pool.num_free
        pool = scheduler.block_manager.pool
        assert pool.num_free == len(pool.ref_counts) - 1, "every block came back"
    assert min(seen.values()) > NUM_WORKLOADS // 10, seen


# --- the demo model -------------------------------------------------------------------------------

PROMPTS = [
    "Once upon a time",
    "Once upon a time there was a brave rabbit. The rabbit",
    "Tell a story",
    "One day Mia found a crimson basket in the garden and",
]


@pytest.fixture(scope="module")
def large():
    with LLM(demo_model_path(), dtype="float32", num_kv_blocks=129, block_size=16) as llm:
        yield llm


def greedy(max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def ids_of(llm: LLM) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, greedy(), use_tqdm=False)]


@pytest.mark.parametrize(
    "params", [greedy(), SamplingParams(n=3, temperature=0.8, top_p=0.9, seed=5, max_tokens=12)]
)
def test_answers_equal_those_of_the_large_engine(params, large):
    small = SmallLLM(demo_model_path(), num_blocks=14, block_size=8, max_num_batched_tokens=64)
    answers = small.generate(PROMPTS, params)
    outputs = large.generate(PROMPTS, params, use_tqdm=False)
    assert [a.strip() for a in answers] == [a.text.strip() for o in outputs for a in o.outputs]


def test_generate_without_params_uses_the_defaults_of_sampling_params():
    prompts = PROMPTS[:2]
    with_defaults = SmallLLM(demo_model_path()).generate(prompts, SamplingParams())
    assert SmallLLM(demo_model_path()).generate(prompts) == with_defaults


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_families_equal_the_large_engine(family, tmp_path):
    make_checkpoint(tmp_path, family)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 3], [20, 21]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(tmp_path, dtype="float64", skip_tokenizer_init=True) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    runner = ModelRunner(tmp_path, 33, 4, torch.device("cpu"), torch.float64)
    runner.start()
    scheduler = Scheduler(BlockManager(33, 4), max_num_seqs=2, max_num_batched_tokens=5)
    engine = LLMEngine(runner, scheduler, max_model_len=100)
    sequences = engine.add_requests(prompts, params)
    engine.run()
    assert [seq.output_token_ids for seq in sequences] == [list(ids) for ids in expected]


def test_the_small_scheduler_drives_the_large_runner(large):
    expected = ids_of(large)
    layout = large.engine.scheduler.block_manager.layout
    scheduler = Scheduler(
        BlockManager(layout.num_blocks, layout.block_size), max_num_seqs=3,
        max_num_batched_tokens=16,
    )  # fmt: skip
    engine = LLMEngine(
        large.engine.executor, scheduler, max_model_len=2048, eos_token_ids=large.info.eos_token_ids
    )
    prompts = [large.tokenizer.encode(prompt) for prompt in PROMPTS]
    sequences = engine.add_requests(prompts, greedy())
    engine.run()
    engine.executor.launch(scheduler.schedule()).result()  # it frees the slots in the runner
    assert [seq.output_token_ids for seq in sequences] == [list(ids) for ids in expected]


def test_the_large_scheduler_drives_the_small_runner(large):
    runner = ModelRunner(Path(demo_model_path()), 20, 8, torch.device("cpu"), torch.float32)
    layout = runner.start()
    scheduler = LargeScheduler(
        LargeBlockManager(layout, watermark_frac=0.0, max_chunk=16),
        max_num_seqs=3,
        max_num_batched_tokens=16,
    )
    engine = LargeEngine(runner, scheduler, large.info, debug_checks=True)
    prompts = [large.tokenizer.encode(prompt) for prompt in PROMPTS]
    requests = [engine.add_request(str(i), ids, greedy()) for i, ids in enumerate(prompts)]
    while engine.has_unfinished():
        engine.step()
    outputs = [request.sequences[0].output_token_ids for request in requests]
    assert outputs == [list(ids) for ids in ids_of(large)]


def test_sampled_tokens_do_not_depend_on_the_batch():
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=12)
    alone = SmallLLM(demo_model_path()).generate(PROMPTS[:1], params)
    tight = SmallLLM(demo_model_path(), num_blocks=12, block_size=4, max_num_batched_tokens=64)
    assert tight.generate(PROMPTS, params)[:1] == alone


# --- sampler --------------------------------------------------------------------------------------


def test_random_numbers_equal_those_of_the_large_sampler():
    draw = random.Random(0)
    for seed, position in [(draw.randrange(2**63), draw.randrange(10**6)) for _ in range(200)]:
        (large,) = uniforms_of(np.array([seed]), np.array([position]))
        assert sampler.uniform(seed, position) == large


def test_sampled_tokens_follow_the_filtered_probabilities():
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0, 2.5])
    params = SamplingParams(temperature=0.7, top_k=4, top_p=0.95, min_p=0.04)
    kept = {1: 3.0, 4: 2.5, 2: 2.0}  # top_k drops token 3; min_p and top_p drop token 0
    weights = {i: np.exp(logit / 0.7) for i, logit in kept.items()}
    drawn = [sampler.sample(logits, params, seed, 3) for seed in range(3000)]
    counts = {i: drawn.count(i) for i in sorted(set(drawn))}
    assert set(counts) == set(kept)
    expected = {i: 3000 * weights[i] / sum(weights.values()) for i in kept}
    chi_square = sum((counts[i] - expected[i]) ** 2 / expected[i] for i in kept)
    assert chi_square < 13.8, "two degrees of freedom, one in a thousand"


def test_the_command_prints_its_steps(capsys):
    main(("Once upon a time", "Once upon a time there was"), max_tokens=12, num_blocks=5)
    printed = capsys.readouterr().out
    for shown in ("admit seq 0", "preempt seq 1", "blocks 0", "-> ", "little frog"):
        assert shown in printed, shown


# --- errors and size ------------------------------------------------------------------------------


def test_unsupported_requests_and_checkpoints_raise(tmp_path):
    llm = SmallLLM(demo_model_path(), num_blocks=9, block_size=8)
    with pytest.raises(RequestError, match=r"only n, temp.*are supported here, got .*min_tokens=2"):
        llm.generate(["a"], SamplingParams(min_tokens=2))
    with pytest.raises(RequestError, match="empty"):
        llm.engine.add_requests([[]], greedy())
    with pytest.raises(CapacityError, match="need 13 KV blocks, but the pool has 8"):
        llm.engine.add_requests([[1] * 90], greedy(8))
    with pytest.raises(PromptTooLongError, match="max_model_len=2048"):
        llm.engine.add_requests([[1] * 2048], greedy())
    with pytest.raises(RequestError):
        llm.generate(["Once", ""], greedy())
    assert not llm.engine.scheduler.has_unfinished, "the valid prompt is not queued either"
    with pytest.raises(ConfigError, match=r"no config\.json"):
        SmallLLM(tmp_path)
    with pytest.raises(ConfigError, match="max_num_batched_tokens=3"):
        SmallLLM(demo_model_path(), max_num_batched_tokens=3)
    make_checkpoint(tmp_path, "gemma3")
    with pytest.raises(UnsupportedModelError, match="supports architecture"):
        read_config(tmp_path)


def test_other_tokens_with_an_equal_digest_are_not_a_hit():
    pool = block_pool.BlockPool(4)
    first = pool.allocate()
    pool.register(first, b"same", (1, 2))
    assert pool.lookup(b"same", (1, 3)) is None
    assert pool.lookup(b"same", (1, 2)) == first


def test_the_small_engine_stays_small():
    files = Path(block_pool.__file__).parent.glob("*.py")
    assert sum(measure(path.read_text(encoding="utf-8")).lines for path in files) <= MAX_LINES
