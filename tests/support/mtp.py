"""Tiny checkpoints with an MTP layer, random or trained, and a reference of what it drafts.

The model has one more decoder layer in transformers, which is the MTP layer. transformers itself
has no MTP. A trained model knows one text, so its head drafts the right tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from tests.support.checkpoints import make_model

LAYERS = {
    "glm4_moe": {"num_hidden_layers": 3},
    "deepseek_v3": {"num_hidden_layers": 3, "rope_parameters": None},
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
}
"""Family -> keys of a config with two layers and the MTP layer."""


class MTPModel(nn.Module):
    """A model of transformers whose last layer is the MTP layer."""

    def __init__(self, family: str, seed: int = 0) -> None:
        super().__init__()
        self.family, self.full = family, make_model(family, seed=seed, **LAYERS[family])
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

    def train_on(self, token_ids: list[int], steps: int, rate: float = 3e-3) -> None:
        """Trains all weights until the model knows the text."""
        ids = torch.tensor([token_ids])
        self.requires_grad_(True)
        optimizer = torch.optim.Adam(self.parameters(), lr=rate)
        head = self.full.lm_head
        for _ in range(steps):
            hidden = self(ids[:, :-2])
            drafted = head(self.mtp(ids[:, 1:-1], hidden))
            loss = F.cross_entropy(head(hidden)[0], ids[0, 1:-1])
            loss = loss + F.cross_entropy(drafted[0], ids[0, 2:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.requires_grad_(False)

    def save(self, directory: Path) -> None:
        """Writes a checkpoint with the names of the family's published files."""
        self.full.save_pretrained(directory)
        file, number = directory / "model.safetensors", len(self.model.layers) - 1
        from safetensors.torch import load_file

        save_file(dict(self.renamed(load_file(file), number)), file, metadata={"format": "pt"})
        config = json.loads((directory / "config.json").read_text())
        config["num_hidden_layers"] = number
        if config.get("layer_types"):
            config["layer_types"] = config["layer_types"][:number]
        if not self.is_qwen:
            config["num_nextn_predict_layers"] = 1
        (directory / "config.json").write_text(json.dumps(config))

    def renamed(
        self, tensors: dict[str, torch.Tensor], number: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint's tensors with the MTP layer's."""
        layer = f"model.layers.{number}."
        for name, tensor in tensors.items():
            yield name.replace(layer, "mtp.layers.0.") if self.is_qwen else name, tensor
        own = {"enorm": self.enorm, "hnorm": self.hnorm, "eh_proj": self.eh_proj}
        names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}
        for name, module in own.items():
            ours = f"mtp.{names[name]}" if self.is_qwen else f"{layer}{name}"
            yield f"{ours}.weight", module.weight.detach().clone()
        norm = "mtp.norm" if self.is_qwen else f"{layer}shared_head.norm"
        yield f"{norm}.weight", self.norm.weight.detach().clone()
        if not self.is_qwen:  # copies, as in published files
            yield f"{layer}embed_tokens.weight", tensors["model.embed_tokens.weight"].clone()
            yield f"{layer}shared_head.head.weight", tensors["lm_head.weight"].clone()
