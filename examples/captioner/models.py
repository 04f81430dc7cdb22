"""Two small networks with random weights: what they say is nonsense, what they cost is not."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

SIDE: Final = 224
"""Width and height of a picture as the encoder takes it, in pixels."""

ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz "
_PATCH: Final = 16
_WIDTH: Final = 512
_BYTES: Final = 256


class VisionEncoder(nn.Module):
    """A vision transformer: one embedding a picture."""

    def __init__(self, width: int = 192, depth: int = 8, heads: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, _PATCH, stride=_PATCH)
        self.places = nn.Parameter(torch.randn(1, (SIDE // _PATCH) ** 2, width) / width**0.5)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.projection = nn.Linear(width, _WIDTH)

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode ``[items, 3, SIDE, SIDE]`` floats from 0 to 1 into ``[items, width of the writer]``."""
        patches = self.patches(pixels).flatten(2).transpose(1, 2) + self.places
        embeddings: Tensor = self.projection(self.layers(patches).mean(1))
        return embeddings


class Writer(nn.Module):
    """A recurrent language model: reads pictures and bytes, writes letters."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(_BYTES, _WIDTH)
        self.cell = nn.GRU(_WIDTH, _WIDTH, batch_first=True)
        self.head = nn.Linear(_WIDTH, len(ALPHABET))

    def read(self, pictures: Tensor, prompt: bytes) -> tuple[Tensor, str]:
        """Read ``[items, width]`` embeddings and a prompt into a state ``[width]`` and the first letter."""
        letters = self.letters(torch.tensor(list(prompt), device=pictures.device))
        states, _ = self.cell(torch.cat([pictures, letters]).unsqueeze(0))
        return states[0, -1], self._letters(states[0, -1:])

    def step(self, states: Tensor, last: str) -> tuple[Tensor, str]:
        """Write the next letter of each caption, from states ``[captions, width]`` and the letters before."""
        letters = self.letters(torch.tensor(list(last.encode()), device=states.device))
        _, after = self.cell(letters.unsqueeze(1), states.unsqueeze(0).contiguous())
        return after[0], self._letters(after[0])

    def no_pictures(self) -> Tensor:
        """Return the embeddings of no picture, ``[0, width]``."""
        return self.letters.weight[:0]

    def _letters(self, states: Tensor) -> str:
        return "".join(ALPHABET[best] for best in self.head(states).argmax(1).tolist())
