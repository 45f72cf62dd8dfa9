"""How often drafts of an MTP layer are accepted, for a tiny model that is trained here.

    python benchmarks/mtp.py --family glm4_moe --minutes 1

The model and its MTP layer are trained on the pages of docs/, except one, whose paragraphs are the
prompts. Only counts are printed: the time of so small a model says nothing about published ones.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nanoengine import LLM, SamplingParams  # noqa: E402
from nanoengine.assets import demo_model_path  # noqa: E402
from tests.support.drafts import draft_always  # noqa: E402
from tests.support.mtp import LAYERS, MTPModel  # noqa: E402

HELD_OUT = "scheduling.md"
BATCH, LENGTH = 8, 96
SIZES = {"hidden_size": 128, "initializer_range": 0.05, "max_position_embeddings": 512}


def batches(token_ids: list[int], minutes: float) -> Iterator[torch.Tensor]:
    """Random windows of the text, until the time is over."""
    ids, generator = torch.tensor(token_ids), torch.Generator().manual_seed(0)
    end = time.perf_counter() + 60 * minutes
    while time.perf_counter() < end:
        starts = torch.randint(len(ids) - LENGTH, (BATCH, 1), generator=generator)
        yield ids[starts + torch.arange(LENGTH)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=LAYERS, default="glm4_moe")
    parser.add_argument("--minutes", type=float, default=1.0)
    args = parser.parse_args()
    with LLM(str(demo_model_path()), max_model_len=64) as demo:
        pages = {page.name: page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))}
        held_out = demo.tokenizer.encode(pages.pop(HELD_OUT))
        training = [token for text in pages.values() for token in demo.tokenizer.encode(text)]
        vocab_size = demo.engine.info.vocab_size
    model = MTPModel(args.family, vocab_size=vocab_size, **SIZES)
    model.train(batches(training, args.minutes), rate=3e-3)
    prompts = [held_out[start : start + 40] for start in range(0, len(held_out) - 40, 160)][:16]
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder))
        options = {"max_model_len": 256, "tokenizer": str(demo_model_path()), "dtype": "float32"}
        for temperature in (0.0, 0.7):
            params = SamplingParams(
                temperature=temperature, seed=0, max_tokens=64, ignore_eos=True, logprobs=1
            )
            expected = None
            for k in (0, 1, 2, 3):
                llm = LLM(folder, speculative=f"mtp:k={k}" if k else None, **options)
                if k:
                    draft_always(llm.engine)
                outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
                found = [(o.token_ids, o.logprobs) for o in outputs]
                expected = expected or found
                stats = llm.stats()
                print(
                    f"{args.family} T={temperature} k={k}: {stats.output_tokens} tokens,"
                    f" {stats.output_tokens - stats.saved_steps} steps of sequences,"
                    f" {stats.accepted_tokens} of {stats.drafted_tokens} drafts accepted,"
                    f" same tokens and log-probabilities: {found == expected}"
                )
                llm.close()


if __name__ == "__main__":
    main()
