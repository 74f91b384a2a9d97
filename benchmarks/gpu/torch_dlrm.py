"""The demo's model for the backend torch: a factory, and the weights of the ONNX model."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from loadtests.demo import BOTTOM_HIDDEN, NUM_TABLES, TOP_HIDDEN, Weights
from loadtests.workloads import NUM_DENSE

DIM = 16
FACTORY = f"{__name__}:build"
MODEL_YAML = f"""\
backend: torch
factory: {FACTORY}
inputs:
  - {{name: dense, datatype: FP32, shape: [-1, {NUM_DENSE}]}}
  - {{name: embeddings, datatype: FP32, shape: [-1, {NUM_TABLES}, {DIM}]}}
outputs:
  - {{name: score, datatype: FP32, shape: [-1, 1]}}
"""
_NUM_VECTORS = NUM_TABLES + 1


class Dlrm(nn.Module):
    """Dense features [n, 13] and embeddings [n, 26, dim] to scores [n, 1]."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        interacted = dim + _NUM_VECTORS * (_NUM_VECTORS - 1) // 2
        self.bottom = _mlp(NUM_DENSE, BOTTOM_HIDDEN, dim)
        self.top = _mlp(interacted, *TOP_HIDDEN, 1)
        pairs = torch.tril_indices(_NUM_VECTORS, _NUM_VECTORS, offset=-1)
        self.register_buffer("pairs", pairs[0] * _NUM_VECTORS + pairs[1], persistent=False)

    def forward(self, dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """The formula of the ONNX model."""
        bottom = torch.relu(self.bottom(dense))
        vectors = torch.cat([bottom.unsqueeze(1), embeddings], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        pairs = products.index_select(1, self.get_buffer("pairs"))
        scores: torch.Tensor = torch.sigmoid(self.top(torch.cat([bottom, pairs], dim=1)))
        return scores


def build() -> Dlrm:
    """What `factory` of `model.yaml` names."""
    return Dlrm()


def save_weights(weights: Weights, path: Path) -> None:
    """Write the demo's weights as this module's."""
    tensors = {}
    for name, array in weights.items():
        part, layer, kind = name.split("_")
        tensor = torch.from_numpy(array)
        # Linear layers hold [outputs, inputs]; between two of them is a ReLU.
        tensors[f"{part}.{2 * int(layer)}.{kind}"] = tensor.T if kind == "weight" else tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
