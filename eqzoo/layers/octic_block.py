"""The transformer block of octic vision transformers: attention and perceptron on fields of irreps."""

import torch.nn.functional as F

from ..ops import split_heads, stack_heads
from .irreps import Irreps, OcticLayer
from .octic import OcticGELU, OcticLayerNorm, OcticLinear, OcticResidual


class OcticAttention(OcticLayer):
    """Multi-head attention over all tokens, with queries, keys and values that are fields of irreps.

    A head owns an equal share of the channels of every part. The group acts on its vectors by an orthogonal matrix, so
    that scores ``q·k / sqrt(C/heads)`` are invariant.

    Args:
        width: The width C, a multiple of 8 times the number of heads.
        num_heads: The number of heads.

    Shape:
        `Irreps` of tokens to the same.

    References:
        Octic Vision Transformers: Quicker ViTs Through Equivariance (Nordström, Edstedt, Kahl and Bökman, 2025),
        section 3. https://arxiv.org/abs/2505.15441
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        if width % (8 * num_heads):
            raise ValueError(f"a width of {width} has no equal share of its eight parts for {num_heads} heads")
        self.num_heads = num_heads
        self.qkv = OcticLinear(width, 3 * width)
        self.proj = OcticLinear(width, width)

    def forward(self, x: Irreps) -> Irreps:
        ab, e = self.qkv(x)
        query, key, value = stack_heads(ab, e, 3, self.num_heads).unbind(0)
        y = F.scaled_dot_product_attention(query, key, value)
        return self.proj(Irreps(*split_heads(y[None])))


class OcticMlp(OcticLayer):
    """Two octic linear layers with GELU between them.

    Args:
        width: The width C.
        hidden: The width between them.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = OcticLinear(width, hidden)
        self.act = OcticGELU()
        self.fc2 = OcticLinear(hidden, width)

    def forward(self, x: Irreps) -> Irreps:
        return self.fc2(self.act(self.fc1(x)))


class OcticBlock(OcticLayer):
    """A pre-norm block: ``x + γ₁ attn(norm(x))``, then ``x + γ₂ mlp(norm(x))``.

    Args:
        width: The width C, a multiple of 8 times the number of heads.
        num_heads: The number of heads.
        mlp_ratio: The width of the perceptron over C.
        init_values: The first values of layer scale γ, or None for none.
        drop_path: The probability that an image goes without a branch in training.

    Example:
        >>> import torch
        >>> x = Irreps(torch.zeros(4, 1, 5, 8), torch.zeros(2, 1, 5, 16))
        >>> OcticBlock(64, num_heads=2)(x).ab.shape
        torch.Size([4, 1, 5, 8])
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        init_values: float | None = None,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = OcticLayerNorm(width)
        self.attn = OcticAttention(width, num_heads)
        self.ls1 = OcticResidual(width, init_values, drop_path)
        self.norm2 = OcticLayerNorm(width)
        self.mlp = OcticMlp(width, int(width * mlp_ratio))
        self.ls2 = OcticResidual(width, init_values, drop_path)

    def forward(self, x: Irreps) -> Irreps:
        x = self.ls1(x, self.attn(self.norm1(x)))
        y: Irreps = self.ls2(x, self.mlp(self.norm2(x)))
        return y
