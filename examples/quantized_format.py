"""Adds a format of quantized weights, bitsandbytes' 8-bit, and compares it with float weights.

    python examples/quantized_format.py

`weight` has int8 values, and `SCB` the largest magnitude of each output: weight * SCB / 127.
The demo model is written in both forms. With the naive backend in float64, both must give the same
greedy tokens.
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from nanoengine import LLM, SamplingParams
from nanoengine.assets import demo_model_path
from nanoengine.checkpoint.quantization import StoredQuantization
from nanoengine.checkpoint.quantization_parsers import PARSERS
from nanoengine.layers.quantized_formats import FORMATS, StoredFormat, StoredTensor
from nanoengine.layers.quantized_weight import QuantizedWeight


def bitsandbytes(raw, skipped):
    """Parses the `quantization_config` of config.json."""
    if not raw.get("load_in_8bit"):
        raise ValueError("only load_in_8bit is implemented")
    names = (f".*{name}" for name in raw.get("llm_int8_skip_modules") or ["lm_head"])
    skipped = (*skipped, *names)
    return StoredQuantization(format="int8-rows", bits=8, group_size=None, skipped=skipped)


class Int8Rows(StoredFormat):
    """The tensors of a matrix with N outputs and K inputs, and how they are read."""

    def tensors(self):
        return {
            "weight": StoredTensor("N K", (torch.int8,)),
            "SCB": StoredTensor("N"),
            "weight_format": StoredTensor("", (torch.uint8,), optional=True),
        }

    def read(self, tensors, num_rows, num_columns):
        scales = tensors["SCB"].float()[:, None] / 127
        values = tensors["weight"].clone()  # the tensor may be a view of the mapped file
        return QuantizedWeight(values=values, scales=scales, bits=8, group_size=num_columns)


PARSERS["bitsandbytes"] = bitsandbytes
FORMATS["int8-rows"] = Int8Rows

floats, stored = {}, {}
for file in demo_model_path().glob("*.safetensors"):
    for name, tensor in load_file(file).items():
        floats[name] = stored[name] = tensor.float()
        if name.endswith("_proj.weight"):
            largest = floats[name].abs().amax(1)
            values = (floats[name] * 127 / largest[:, None]).round().to(torch.int8)
            floats[name] = values * (largest[:, None] / 127)
            stored[name], stored[name.replace("weight", "SCB")] = values, largest

config = json.loads((demo_model_path() / "config.json").read_text("utf-8"))
quantization = {"quant_method": "bitsandbytes", "load_in_8bit": True}
greedy = SamplingParams(temperature=0, max_tokens=16)
texts = []
with tempfile.TemporaryDirectory() as directory:
    for form, tensors in (("floats", floats), ("8-bit", stored)):
        path = Path(directory) / form
        shutil.copytree(demo_model_path(), path, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file(tensors, path / "model.safetensors")
        keys = config | ({} if form == "floats" else {"quantization_config": quantization})
        (path / "config.json").write_text(json.dumps(keys), "utf-8")
        with LLM(path, dtype="float64", attention_backend="naive") as llm:
            print(form, "-", llm.info.quantization or "not quantized")
            (output,) = llm.generate("Once upon a time", greedy, use_tqdm=False)
            texts.append(output.outputs[0].text)
assert texts[0] == texts[1], texts
print("equal:", repr(texts[0]))
