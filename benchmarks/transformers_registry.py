"""How many architectures of transformers run here in its own modules: one line per model type.

    python benchmarks/transformers_registry.py [--types llama,opt] [--json FILE]

For every causal language model in transformers' registry it makes a tiny random checkpoint, lets
transformers generate greedy tokens, and compares them with `LLM(model_impl="transformers")`, which
runs the prompts in chunks and in one batch. Each type is equal, refused with a reason, or
different; some types can't be made small, or transformers itself can't generate with them.
Takes ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nanoengine import LLM, SamplingParams
from nanoengine.errors import UnsupportedModelError

LAYERS, WINDOW, NUM_TOKENS, SECONDS = 2, 16, 12, 90
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": LAYERS, "num_layers": LAYERS, "intermediate_size": 96, "ffn_dim": 96,
    "vocab_size": 128, "max_position_embeddings": 256, "sliding_window": WINDOW, "rotary_dim": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "word_embed_proj_dim": 64, "q_lora_rank": 24,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ALWAYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "head_dim")
LARGEST = 30e6
"""A model with more parameters is not built."""


class OutOfTimeError(Exception):
    """A model type took longer than SECONDS."""


@contextmanager
def time_limit() -> Iterator[None]:
    """Raises OutOfTimeError in the block after SECONDS."""

    def stop(*_: object) -> None:
        raise OutOfTimeError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A config of the type with the sizes that it has of SIZES."""
    kind = CONFIG_MAPPING[model_type]
    config = kind()
    text = config.get_text_config(decoder=True)
    given = {
        key: size
        for key, size in SIZES.items()
        if key in ALWAYS or getattr(text, key, None) is not None
    }
    if "kv_lora_rank" in given:
        given["head_dim"] = SIZES["qk_rope_head_dim"]
    if getattr(text, "layer_types", None):
        given["layer_types"] = [text.layer_types[0], text.layer_types[-1]]
    while True:
        try:
            if text is config:
                return kind(**given)
            return kind(text_config={**given, "model_type": text.model_type})
        except AttributeError as error:
            derived = re.search(r"property '(\w+)'", str(error))
            if derived is None or given.pop(derived[1], None) is None:
                raise


def write_checkpoint(config: PreTrainedConfig, directory: str) -> PreTrainedModel:
    """Writes a random model and returns it as transformers reads it again."""
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def one_line(error: BaseException) -> str:
    """The error's message without line breaks, or its type."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def result_of(model_type: str) -> str:
    """ "equal", "different", or "refused", "not made", "no reference", "error" with a reason."""
    with tempfile.TemporaryDirectory() as directory, time_limit():
        try:
            model = write_checkpoint(tiny_config(model_type), directory)
        except Exception as error:
            return f"not made: {one_line(error)}"
        rng, vocab_size = random.Random(0), model.config.get_text_config().vocab_size
        prompts = [[rng.randrange(3, vocab_size) for _ in range(n)] for n in (5, 23, 40)]
        length = {"min_new_tokens": NUM_TOKENS, "max_new_tokens": NUM_TOKENS}
        try:
            expected = [
                model.generate(torch.tensor([ids]), do_sample=False, pad_token_id=0, **length)
                for ids in prompts
            ]
        except Exception as error:
            return f"no reference: {one_line(error)}"
        try:
            llm = LLM(
                directory, model_impl="transformers", skip_tokenizer_init=True, dtype="float32",
                attention_backend="naive", max_model_len=64, max_num_seqs=4, kv_cache_gib=0.05,
                max_num_batched_tokens=24,
            )  # fmt: skip
        except UnsupportedModelError as error:
            return f"refused: {one_line(error)}"
        except Exception as error:
            return f"error: {one_line(error)}"
        params = SamplingParams(temperature=0, min_tokens=NUM_TOKENS, max_tokens=NUM_TOKENS)
        with llm:
            rows = [{"prompt_token_ids": ids} for ids in prompts]
            outputs = llm.generate(rows, params, use_tqdm=False)
        equal = all(
            list(output.outputs[0].token_ids) == ids[0, -NUM_TOKENS:].tolist()
            for output, ids in zip(outputs, expected, strict=True)
        )
        return "equal" if equal else "different"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--types", help="model types, separated by commas; default: all")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("nanoengine").setLevel(logging.ERROR)
    results: dict[str, str] = {}
    for model_type in (
        (args.types or "").split(",") if args.types else sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    ):
        try:
            results[model_type] = result_of(model_type)
        except OutOfTimeError:
            results[model_type] = f"not made: more than {SECONDS} s"
        print(f"{model_type:28} {results[model_type]}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    counts = Counter(result.partition(":")[0] for result in results.values())
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))


if __name__ == "__main__":
    main()
