"""Speed of families relative to Qwen3 of one shape: `python benchmarks/models.py --scale 0.1`.

Random weights of one shape, each family with its own norms, biases, factors and RoPE; and a mixture
of experts with the same computation per token as the dense model. The models alternate and decode
`--streams` prompts of `--context` tokens; `--only` selects some of them.

    python benchmarks/models.py --limits qwen3-30b-a3b gpt-oss-20b --ways bfloat16 int8 --layers 4

`--limits` compares shapes with the limits of the machine instead: steps of 1, 8 and 32 streams and
a prompt of 512 tokens, compared with the bytes of weights to read and the products to compute, at
rates that are measured before and after each. `--layers` reduces the layers of a shape, and its
vocabulary in proportion.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from side_by_side import Clock, Run, compare, parser, record, report
from torch import get_num_threads, nn

from benchmarks.suite.peak import measure_cpu_peaks
from benchmarks.suite.shapes import SHAPES, write_shape
from nanoengine import LLM, SamplingParams
from nanoengine.layers.kernels import LinearMethod
from nanoengine.layers.moe import Experts

MOE = {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True}
LATENT = {
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "first_k_dense_replace": 10_000, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 1680,
}  # fmt: skip
"""Heads with DeepSeek-V2-Lite's sizes and dense MLPs: as many weights as Qwen3 in shape `small`."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "hidden_act": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 64,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma4_text": (
        "Gemma4ForCausalLM",
        {
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 64,
            "vocab_size_per_layer_input": 32_000,
            "num_kv_shared_layers": 8,
            "global_head_dim": 128,
            "sliding_window": 512,
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 4,
        },
    ),
    "glm4": ("Glm4ForCausalLM", {"partial_rotary_factor": 0.5, "attention_bias": True}),
    "granite": (
        "GraniteForCausalLM",
        {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            "num_local_experts": 0,
            "mamba_n_groups": 1,
            "mamba_d_state": 128,
            "mamba_d_head": 64,
            "attention_multiplier": 0.1,
        },
    ),
    "deepseek_v2": ("DeepseekV2ForCausalLM", LATENT),
    "qwen3_moe": ("Qwen3MoeForCausalLM", MOE),
    "qwen3_5_text": (
        "Qwen3_5ForCausalLM",
        {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "partial_rotary_factor": 0.25},
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        {"block_auto_adjust_ff_dim": False, "block_ff_dim": 1920, "conv_L_cache": 3}
        | {"full_attn_idxs": [2, 5, 8, 11, 14], "norm_eps": 1e-5},
    ),
    "lfm3": ("Lfm3ForCausalLM", {"conv_L_cache": 7, "sliding_window": 256, "norm_eps": 1e-5}),
}
"""Name -> architecture and its specific keys; the sizes are the shape's."""


def write_family(name: str, shape: str, directory: Path) -> None:
    """Writes the config.json of a family in the size of a shape."""
    write_shape(shape, directory)
    file = directory / "config.json"
    raw = json.loads(file.read_text("utf-8"))
    architecture, keys = FAMILIES[name]
    raw |= {"architectures": [architecture], "model_type": name, **keys}
    if name == "qwen3_moe":
        raw["moe_intermediate_size"] = raw["intermediate_size"] // MOE["num_experts_per_tok"]
    if name == "granitemoehybrid":
        raw["shared_intermediate_size"] = raw["intermediate_size"]
        raw["mamba_n_heads"] = 2 * raw["hidden_size"] // raw["mamba_d_head"]
        layers = range(raw["num_hidden_layers"])
        raw["layer_types"] = ["attention" if n % 4 == 3 else "mamba" for n in layers]
    file.write_text(json.dumps(raw), "utf-8")


def timed(llm: LLM, prompts: list[list[int]], output_len: int) -> Run:
    """All prompts in one batch, with prefix cache hits: almost all steps are decodes."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    clock = Clock()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return Run(seconds=clock.read(), tokens=[list(o.outputs[0].token_ids) for o in outputs])


WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "float32": ("float32", {"dtype": "float32"}, {"torch_dtype": "float32"}),
    "bfloat16": ("bfloat16", {"dtype": "bfloat16"}, {}),
    "int8": ("int8", {"quantization": "int8"}, {}),
    "int4": ("int8", {"quantization": "int4"}, {}),
    "mxfp4": ("float32", {"dtype": "float32"}, {"quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                   "model.embed_tokens", "lm_head"],
    }}),
}  # fmt: skip
"""Dtype of the weights -> compute dtype; options; keys of the config."""


class Weights:
    """Bytes of a model's weights that are read, and multiplications per row.

    Attributes:
        every, head, experts: [bytes, multiplications] of the part that each row uses, of the head,
            and of all experts. For a head with an int8 bound, only the bound's bytes count.
        taken: the share of its experts that a row uses.
        layers: number of layers with experts.
    """

    def __init__(self, model: nn.Module) -> None:
        self.every, self.head, self.experts = np.zeros((3, 2))
        self.taken, self.layers = 1.0, 0
        for name, module in model.named_modules():
            method = getattr(module, "method", None)
            if isinstance(module, Experts):
                self.taken = module.moe.num_experts_per_tok / len(module.experts)
                self.layers += 1
                for expert in module.experts:
                    self.experts += _size(expert.gate_up) + _size(expert.down)
            elif isinstance(method, LinearMethod) and name == "lm_head":
                self.head += _size(method)
            elif isinstance(method, LinearMethod) and "embed" not in name:
                self.every += _size(method)

    def least_ms(self, rows: int, is_prompt: bool, gbs: float, gflops: float) -> float:
        """The time that the machine needs to read the weights of a step once, or to multiply its
        rows by them, whichever is longer. Rows select random experts.

        In a prompt, only one row uses the head and the last layer's experts.
        """
        shares = np.array([1 - (1 - self.taken) ** rows, rows * self.taken])
        experts, last = self.experts * shares, 1 if is_prompt else rows
        if is_prompt and self.layers:
            experts += (self.experts * self.taken - experts) / self.layers
        nbytes, numbers = self.every * [1, rows] + self.head * [1, last] + experts
        return float(max(nbytes / gbs, 2 * numbers / gflops) / 1e6)


def _size(method: Any) -> np.ndarray:
    """Bytes that are read of one weight, and its multiplications per row."""
    screen = method.values.numpy() if getattr(method, "slack", None) is not None else None
    read = method.weight_operands() if screen is None else (screen,)
    rows, inputs = getattr(method, "shape", None) or (method.out_features, method.in_features)
    return np.array([sum(w.nbytes for w in read if isinstance(w, np.ndarray)), rows * inputs])


def steps_ms(llm: LLM, prompts: list[list[int]], tokens: int) -> list[float]:
    """The time from the start of each step to the start of the next one or the end, in order. With
    one thread, CPU time, which other programs disturb less."""
    begun, step = [], llm.engine.step
    clock = time.process_time if get_num_threads() == 1 else time.perf_counter

    def recorded(*given: Any, **named: Any) -> Any:
        begun.append(clock())
        return step(*given, **named)

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    llm.engine.step = recorded  # type: ignore[method-assign]
    llm.generate(prompts, params, use_tqdm=False)
    del llm.engine.step
    return [1e3 * taken for taken in np.diff([*begun, clock()])]


def compare_with_limits(args: argparse.Namespace, shape: str, way: str) -> dict[str, Any]:
    """The time of each step and the share of it that the machine needs: medians over `--rounds` of
    the 10th percentile of a round, because rates are maxima, too."""
    kind, options, keys = WAYS[way]
    draw, work = random.Random(0), {"1": 1, "8": 8, "32": 32, "prompt of 512": 512}
    with TemporaryDirectory() as scratch:
        write_shape(shape, Path(scratch))
        file = Path(scratch) / "config.json"
        raw = json.loads(file.read_text("utf-8")) | keys
        raw["vocab_size"] = raw["vocab_size"] * args.layers // raw["num_hidden_layers"] // 16 * 16
        raw["num_hidden_layers"] = args.layers
        file.write_text(json.dumps(raw), "utf-8")
        llm = LLM(
            scratch, load_format="dummy", skip_tokenizer_init=True, max_model_len=1024,
            max_num_seqs=32, kv_cache_gib=0.3, **options,
        )  # fmt: skip

    def prompts(count: int, size: int) -> list[list[int]]:
        return [[draw.randrange(10, raw["vocab_size"]) for _ in range(size)] for _ in range(count)]

    with llm:
        executor: Any = llm.engine.executor
        weights = Weights(executor.model)
        found: dict[str, list[tuple[float, ...]]] = {name: [] for name in work}
        for number in range(args.rounds + 1):
            for name, rows in work.items():
                is_prompt = rows == 512
                given = prompts(1, 512) if is_prompt else prompts(rows, args.context)
                if (
                    not is_prompt
                ):  # A prefix cache hit, so that only the first step is not a decode.
                    steps_ms(llm, given, 1)
                before = measure_cpu_peaks([kind], seconds=0.2)
                taken = steps_ms(llm, given, 1 if is_prompt else 1 + max(2, round(64 * args.scale)))
                after = measure_cpu_peaks([kind], seconds=0.2)
                ms = float(np.quantile(taken if is_prompt else taken[1:], 0.1))
                gbs = (before.read_gbs + after.read_gbs) / 2
                gflops = sum(next(iter(each.gflops.values())) for each in (before, after)) / 2
                if number:
                    least = weights.least_ms(rows, is_prompt, gbs, gflops)
                    found[name].append((ms, least / ms, gbs, gflops))
    active = weights.every + weights.head + weights.experts * weights.taken
    line = {
        "shape": shape, "way": way, "layers": args.layers, "MB a token": round(active[0] / 1e6, 1),
        "steps": {
            name: {
                what: [round(number, 3) for number in (statistics.median(each), *each)]
                for what, each in zip(("ms", "share", "GB/s", "GFLOP/s"), of.T, strict=True)
            }
            for name, of in ((name, np.array(each)) for name, each in found.items())
        },
    }  # fmt: skip
    print(json.dumps(line), flush=True)
    return line


def main() -> None:
    """Loads all models and alternates between them, or compares each one with the machine's
    limits."""
    options = parser(__doc__)
    options.set_defaults(model="small")
    options.add_argument("--scale", type=float, default=1.0, help="share of the 128 output tokens")
    options.add_argument("--streams", type=int, default=1)
    options.add_argument("--context", type=int, default=64)
    options.add_argument("--quantization")
    options.add_argument("--dtype", default="float32")
    options.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    options.add_argument(
        "--limits", nargs="+", choices=SHAPES, help="shapes to compare with the machine's limits"
    )
    options.add_argument("--ways", nargs="+", choices=WAYS, default=["bfloat16", "int8", "int4"])
    options.add_argument("--layers", type=int, default=4)
    args = options.parse_args()
    if args.limits:
        args.model = " ".join(args.limits)
        lines = [
            compare_with_limits(args, shape, way) for shape in args.limits for way in args.ways
        ]
        record(args, lines)
        return
    if args.model not in SHAPES:
        options.error(f"--model must be one of {', '.join(SHAPES)}, got {args.model}")
    draw, output_len = random.Random(0), max(2, round(128 * args.scale))
    prompts = [[draw.randrange(10, 4000) for _ in range(args.context)] for _ in range(args.streams)]
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        ways = {}
        for name in args.only:
            directory = Path(scratch) / name
            directory.mkdir()
            write_family(name, args.model, directory)
            llm = stack.enter_context(
                LLM(
                    str(directory), load_format="dummy", skip_tokenizer_init=True, dtype=args.dtype,
                    quantization=args.quantization, attention_backend=args.attention_backend,
                    max_model_len=args.context + 192, max_num_seqs=max(8, args.streams),
                    kv_cache_gib=0.1 + args.context * args.streams / 2**13,
                )
            )  # fmt: skip
            ways[name] = partial(timed, llm, prompts, output_len)
        what = f"{args.model}, {args.quantization or args.dtype}, {args.streams} streams"
        report(args, [compare(f"{what}, {output_len} tokens", ways, args.rounds)])


if __name__ == "__main__":
    main()
