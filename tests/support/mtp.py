"""Tiny checkpoints with an MTP layer, random or trained, and a reference of what it drafts.

The model has one more decoder layer in transformers, which is the MTP layer. transformers itself
has no MTP. A trained model knows one text, so its head drafts the right tokens.
"""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from tests.support.checkpoints import make_model
from tests.support.gguf_files import make_gguf

# fmt: off
LAYERS = {
    "glm4_moe": {"num_hidden_layers": 3},
    "deepseek_v3": {
        "num_hidden_layers": 3, "rope_parameters": None, "q_lora_rank": 32, "kv_lora_rank": 32,
        "v_head_dim": 16,
    },
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "shared_expert_intermediate_size": 64,
    },
}
"""Family -> keys of a config with two layers and the MTP layer. Sizes are multiples of 32, which
int4 needs."""
# fmt: on
TEXT = random.Random(0).choices(range(3, 23), k=90)
"""The text that trained models know. It has few different tokens, so that context matters."""
_directory = tempfile.TemporaryDirectory(prefix="nanoengine-tests-mtp-")


class MTPModel(nn.Module):
    """A model of transformers whose last layer is the MTP layer."""

    def __init__(self, family: str, seed: int = 0, **overrides: Any) -> None:
        super().__init__()
        self.full = make_model(family, seed=seed, **LAYERS[family] | overrides)
        hidden, norm = self.full.config.hidden_size, type(self.full.model.norm)
        self.is_qwen = family.startswith("qwen")
        generator = torch.Generator().manual_seed(seed)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.enorm, self.hnorm, self.norm = (norm(hidden, eps=1e-6) for _ in range(3))
        with torch.no_grad():
            for p in (self.eh_proj.weight, self.enorm.weight, self.hnorm.weight, self.norm.weight):
                noise = torch.randn(p.shape, generator=generator)
                p.copy_(0.1 * noise if p.dim() > 1 else 0.3 * noise + (0 if self.is_qwen else 1))

    @property
    def model(self) -> PreTrainedModel:
        return self.full.model

    def layer(self, index: int, x: torch.Tensor, first: int = 0) -> torch.Tensor:
        """One decoder layer over [1, T, hidden_size]."""
        positions = torch.arange(first, first + x.shape[1]).unsqueeze(0)
        rotation = self.model.rotary_emb(x, positions)
        out = self.model.layers[index](
            x, position_embeddings=rotation, position_ids=positions, attention_mask=None
        )
        return out[0] if isinstance(out, tuple) else out

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Hidden states for the head, [1, T, hidden_size]."""
        x = self.model.embed_tokens(token_ids)
        for index in range(len(self.model.layers) - 1):
            x = self.layer(index, x)
        return self.model.norm(x)

    def mtp(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The MTP layer's hidden states. `token_ids` are one position later than `hidden`."""
        embedded = self.enorm(self.model.embed_tokens(token_ids))
        x = self.eh_proj(torch.cat((embedded, self.hnorm(hidden)), dim=-1))
        return self.norm(self.layer(len(self.model.layers) - 1, x))

    @torch.no_grad()
    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        """The drafts after a text whose last token has just been sampled."""
        ids = torch.tensor([token_ids])
        hidden = self(ids[:, :-1])
        for _ in range(count):
            out = self.mtp(ids[:, 1:], hidden)
            ids = torch.cat((ids, self.full.lm_head(out[:, -1:]).argmax(-1)), dim=1)
            hidden = torch.cat((hidden, out[:, -1:]), dim=1)
        return ids[0, len(token_ids) :].tolist()

    def train(self, batches: Iterable[torch.Tensor], rate: float = 1e-2) -> None:
        """Trains all weights on batches of token ids, [B, T] each."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # Why: so small products are slower on several threads
        self.requires_grad_(True)
        optimizer, head = torch.optim.Adam(self.parameters(), lr=rate), self.full.lm_head
        for ids in batches:
            hidden = self(ids[:, :-2])
            drafted = head(self.mtp(ids[:, 1:-1], hidden))
            loss = F.cross_entropy(head(hidden).flatten(0, 1), ids[:, 1:-1].flatten())
            loss = loss + F.cross_entropy(drafted.flatten(0, 1), ids[:, 2:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.requires_grad_(False)
        torch.set_num_threads(threads)

    def tensors(self, directory: Path) -> dict[str, torch.Tensor]:
        """Writes the model of transformers; returns all tensors by DeepSeek's names."""
        self.full.save_pretrained(directory)
        tensors = load_file(directory / "model.safetensors")
        layer = f"model.layers.{len(self.model.layers) - 1}"
        own = {"enorm": self.enorm, "hnorm": self.hnorm, "eh_proj": self.eh_proj}
        for name, module in (own | {"shared_head.norm": self.norm}).items():
            tensors[f"{layer}.{name}.weight"] = module.weight.detach().clone()
        return tensors

    def save(self, directory: Path) -> None:
        """Writes a checkpoint with the names of the family's published files."""
        tensors, number = self.tensors(directory), len(self.model.layers) - 1
        layer = f"model.layers.{number}."
        config = json.loads((directory / "config.json").read_text())
        config["num_hidden_layers"] = number
        if self.is_qwen:
            config["layer_types"] = config["layer_types"][:number]
            names = {
                "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
                "eh_proj": "mtp.fc", "shared_head.norm": "mtp.norm",
            }  # fmt: skip
            for old, new in names.items():
                tensors[f"{new}.weight"] = tensors.pop(f"{layer}{old}.weight")
            tensors = {name.replace(layer, "mtp.layers.0."): t for name, t in tensors.items()}
        else:  # with copies of the embedding and the head
            config["num_nextn_predict_layers"] = 1
            tensors[f"{layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[f"{layer}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        (directory / "config.json").write_text(json.dumps(config))
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@functools.cache
def mtp_model(family: str, steps: int) -> MTPModel:
    """A model that was trained on the text for this many steps."""
    model = MTPModel(family)
    model.train([torch.tensor([TEXT])] * steps)
    return model


@functools.cache
def mtp_checkpoint(family: str, steps: int) -> str:
    """Directory of its checkpoint, written once per test run."""
    directory = Path(_directory.name) / f"{family}-{steps}"
    mtp_model(family, steps).save(directory)
    return str(directory)


@functools.cache
def mtp_gguf(family: str, steps: int, kind: str) -> str:
    """The same as a GGUF file, whose matrices have this type."""
    path = Path(_directory.name) / f"{family}-{steps}-{kind}.gguf"
    tensors = mtp_model(family, steps).tensors(Path(_directory.name) / "transformers")
    keys = {"nextn_predict_layers": 1}
    if "layer_types" in LAYERS[family]:
        keys["attention.recurrent_layers"] = [True, False, False]
    make_gguf(path, family, types=lambda name: kind, keys=keys, weights=tensors, **LAYERS[family])
    return str(path)
