"""What quantization changes: perplexity, exact answers, and next-token distributions.

    python benchmarks/quantization_error.py --json benchmarks/results/quantization-error.json
    python benchmarks/quantization_error.py --gguf demo-Q8_0.gguf demo-Q4_0.gguf

Two models, each in bfloat16 and with every `quantization` against plain float32: the trained demo
model on held-out questions and stories of `tools/demo_text.py`, and a Qwen3 shape with random
weights on random tokens. Random weights give flat distributions, whose divergence says little about
a trained model of that size; they show how errors add up over depth and width.

With `--gguf` the text is the same, for files of the demo model: each with the activations in int8
that it runs with, against the same file with float ones.

KL is sum(p log(p / q)) over the vocabulary at each position [nats], p the plain model's. `moved`
is how far the log-probability of the text's own next token is from the plain model's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nanoengine.assets import demo_model_path
from nanoengine.attention.batch import Batch
from nanoengine.bench.throughput import hardware
from nanoengine.build import build_engine
from nanoengine.engine import LLMEngine
from nanoengine.settings.config import EngineConfig
from nanoengine.text.tokenizer import Tokenizer
from nanoengine.version import versions

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from demo_text import EOS, make_story, plain_prompt, recall_questions

from benchmarks.suite.shapes import SHAPES, write_shape

PLAIN = {"dtype": "float32", "attention_backend": "naive", "quantization": None}
METHODS: dict[str, dict[str, object]] = {
    "none": {},
    "KV cache in bfloat16": {"kv_cache_dtype": "bfloat16", "attention_backend": "cpu"},
    "KV cache in int8": {"kv_cache_dtype": "int8", "attention_backend": "cpu"},
    "bfloat16": {"dtype": "bfloat16", "attention_backend": "cpu"},
    "int8": {"quantization": "int8"},
    "int8_weight_only": {"quantization": "int8_weight_only"},
    "int4": {"quantization": "int4"},
    "int4_weight_only": {"quantization": "int4_weight_only"},
}
"""What is measured against the first of them, and the settings that make it."""
OF_GGUF: dict[str, dict[str, object]] = {
    "gguf_weight_only": {"quantization": "gguf_weight_only"},
    "gguf": {"attention_backend": "cpu"},
}
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt as token ids; tokens from `answer_start` on are an answer, None: there is none."""

    token_ids: list[int]
    answer_start: int | None = None


def demo_texts(questions: int, stories: int) -> list[Text]:
    """Questions whose facts never occur in training, with their answers; and stories."""
    tokenizer = Tokenizer.load(str(demo_model_path()))
    texts = []
    for case in recall_questions(seed=2, count=questions):
        prompt = tokenizer.encode(plain_prompt(case["passage"], case["question"]))
        answer = tokenizer.encode(f" {case['answer']}{EOS}")
        texts.append(Text(token_ids=[*prompt, *answer], answer_start=len(prompt)))
    rng = random.Random(2)
    for _ in range(stories):
        texts.append(Text(token_ids=tokenizer.encode(f"{make_story(rng)[0]}{EOS}")))
    return texts


def random_texts(vocab_size: int, count: int, length: int) -> list[Text]:
    """Random tokens."""
    rng = random.Random(2)
    return [
        Text(token_ids=[rng.randrange(vocab_size) for _ in range(length)]) for _ in range(count)
    ]


def log_probs(engine: LLMEngine, texts: Sequence[Text]) -> Iterator[torch.Tensor]:
    """The next-token distribution after each token of each text but the last, [T - 1, V]."""
    runner = engine.executor
    for text in texts:
        count = len(text.token_ids)
        blocks = -(-count // BLOCK_SIZE)
        batch = Batch(
            token_ids=torch.tensor(text.token_ids), positions=torch.arange(count),
            slot_mapping=(BLOCK_SIZE + torch.arange(count))[None],
            query_start_loc=torch.tensor([0, count]).int(), seq_lens=torch.tensor([count]).int(),
            block_tables=torch.arange(1, blocks + 1).int()[None, None],
            logits_indices=torch.arange(count - 1), num_decodes=0,
            max_query_len=count, max_seq_len=count,
        )  # fmt: skip
        batch.attention = runner.backend.prepare(batch)
        with torch.inference_mode():
            yield runner.model.logits(runner.model.forward(batch)).log_softmax(-1)


def measure(
    model: str,
    texts: Sequence[Text],
    name: str,
    options: dict[str, object],
    plain: list[torch.Tensor] | None,
) -> tuple[dict[str, object], list[torch.Tensor]]:
    """One engine's figures against the distributions of the plain one."""
    longest = max(len(text.token_ids) for text in texts)
    engine = build_engine(
        EngineConfig(
            model=model, device="cpu", block_size=BLOCK_SIZE,
            num_kv_blocks=longest // BLOCK_SIZE + 3, max_model_len=longest + 1,
            skip_tokenizer_init=True, **PLAIN | options,
        )
    )  # fmt: skip
    found = list(log_probs(engine, texts))
    loss, tokens, exact, divergence, same, moved = 0.0, 0, [], [], [], []
    for i, (text, probs) in enumerate(zip(texts, found, strict=True)):
        targets = torch.tensor(text.token_ids[1:])
        loss -= probs.gather(1, targets[:, None]).sum().item()
        tokens += len(targets)
        if text.answer_start is not None:
            first = text.answer_start - 1
            exact.append(bool((probs[first:].argmax(1) == targets[first:]).all()))
        if plain is not None:
            p, q = plain[i].double(), probs.double()
            divergence.append((p.exp() * (p - q)).sum(1))
            same.append(p.argmax(1) == q.argmax(1))
            moved.append((p - q).gather(1, targets[:, None]).abs())
    figures: dict[str, object] = {
        "method": name,
        "parameters": engine.info.num_parameters,
        "weight_bytes": engine.info.weight_bytes,
        "perplexity": math.exp(loss / tokens),
    }
    if exact:
        figures["answers_exact"] = f"{sum(exact)} of {len(exact)}"
    if divergence:
        kl = torch.cat(divergence)
        figures |= {
            "kl_mean": kl.mean().item(),
            "kl_95": kl.quantile(0.95).item(),
            "kl_max": kl.max().item(),
            "same_best_token": torch.cat(same).double().mean().item(),
            "moved_mean": torch.cat(moved).mean().item(),
            "moved_max": torch.cat(moved).max().item(),
        }
    return figures, found


def compare(
    name: str,
    model: str,
    texts: Sequence[Text],
    options: dict[str, object],
    methods: dict[str, dict[str, object]] = METHODS,
) -> dict[str, object]:
    """All methods on one model."""
    rows, plain = [], None
    for method, settings in methods.items():
        row, found = measure(model, texts, method, options | settings, plain)
        plain = plain or found
        rows.append(row)
        print(json.dumps({"model": name, **row}), flush=True)
    return {"model": name, "tokens": sum(len(t.token_ids) for t in texts), "methods": rows}


def main() -> None:
    """Parses the command line and runs both models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--stories", type=int, default=20)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--texts", type=int, default=2, help="of random tokens, for the shape")
    parser.add_argument("--length", type=int, default=128, help="of each of them [tokens]")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="the first is always run")
    parser.add_argument("--gguf", type=Path, nargs="+", default=[], help="of the demo model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    texts = demo_texts(args.questions, args.stories)
    found = [compare(file.name, str(file), texts, {}, OF_GGUF) for file in args.gguf]
    if not found:
        chosen = {name: METHODS[name] for name in ("none", *(args.methods or METHODS))}
        found.append(compare("demo", str(demo_model_path()), texts, {}, chosen))
        with tempfile.TemporaryDirectory() as scratch:
            write_shape(args.shape, Path(scratch))
            texts = random_texts(SHAPES[args.shape]["vocab_size"], args.texts, args.length)
            found.append(compare(args.shape, scratch, texts, {"load_format": "dummy"}, chosen))
    if args.json:
        report = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": " ".join(["benchmarks/quantization_error.py", *sys.argv[1:]]),
            "hardware": hardware(torch.device("cpu")),
            "versions": versions(),
            "models": found,
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
