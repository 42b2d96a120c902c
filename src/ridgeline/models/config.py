"""What a decoder and the tasks around it are. Frozen, keyword-only, checked on construction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ridgeline.errors import ConfigError

Norm = Literal["layernorm", "rmsnorm"]
Gelu = Literal["exact", "tanh"]
Positions = Literal["learned", "relative", "none"]
Conditioning = Literal["logits", "classes"]
LARGEST = 1 << 24  # of any size; what no memory holds is told before it is asked for


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The trunk: a stack of pre-norm Transformer blocks over T positions.

    Attributes:
        layers: number of blocks.
        width: numbers a position carries between blocks (C).
        heads: query heads (H).
        kv_heads: key/value heads (G), a divisor of `heads`; None for as many as `heads`.
        head_width: numbers a head carries (D); None for width / heads.
        mlp_width: hidden numbers of the MLP (F); None for 4 · width.
        norm: "layernorm" or "rmsnorm".
        norm_eps: added to the variance, in squared units of the residual stream.
        bias: whether linear layers and layer norms have biases.
        gelu: "exact" (erf) or its "tanh" approximation.
        positions: "learned" vectors added to the input, "relative" term in attention, or "none".
        position_table: rows of the position table, in positions; None for `context`.
        dropout: probability of dropping the embedding output, attention probabilities, attention and MLP output.
        context: positions the model sees at most (T).
    """

    layers: int
    width: int
    heads: int
    kv_heads: int | None = None
    head_width: int | None = None
    mlp_width: int | None = None
    norm: Norm = "layernorm"
    norm_eps: float = 1e-5
    bias: bool = True
    gelu: Gelu = "exact"
    positions: Positions = "learned"
    position_table: int | None = None
    dropout: float = 0.0
    context: int = 256

    def __post_init__(self) -> None:
        for field in ("layers", "width", "heads", "context", "kv_heads", "head_width", "mlp_width", "position_table"):
            value = getattr(self, field)
            if value is not None and not 1 <= value <= LARGEST:
                raise ConfigError(f"{field} must be at least 1 and at most {LARGEST:,}, got {value}")
        for field, known in (
            ("norm", ("layernorm", "rmsnorm")),
            ("gelu", ("exact", "tanh")),
            ("positions", ("learned", "relative", "none")),
        ):
            if getattr(self, field) not in known:
                raise ConfigError(f"{field} must be one of {', '.join(known)}, got {getattr(self, field)!r}")
        if self.head_width is None and self.width % self.heads:
            raise ConfigError(
                f"heads={self.heads} does not divide width={self.width}; set head_width (--model.decoder.head-width), "
                "or heads to a divisor of width"
            )
        if self.heads % self.groups:
            raise ConfigError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}; set kv_heads "
                "(--model.decoder.kv-heads) to a divisor of heads"
            )
        if self.width % 4:
            raise ConfigError(f"width must be a multiple of 4, got {self.width}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must be in [0, 1), got {self.dropout}")
        if not 0 < self.norm_eps < math.inf:
            raise ConfigError(f"norm_eps must be positive and finite, got {self.norm_eps}")
        if self.positions != "none" and self.context > self.table_rows:
            raise ConfigError(
                f"context={self.context} is longer than position_table={self.table_rows}; raise position_table "
                "(--model.decoder.position-table)"
            )

    @property
    def groups(self) -> int:
        """Key/value heads (G)."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_dim(self) -> int:
        """Numbers a head carries (D)."""
        return self.width // self.heads if self.head_width is None else self.head_width

    @property
    def hidden(self) -> int:
        """Hidden numbers of the MLP (F)."""
        return 4 * self.width if self.mlp_width is None else self.mlp_width

    @property
    def qkv_width(self) -> int:
        """Outputs of the joint query/key/value projection."""
        return (self.heads + 2 * self.groups) * self.head_dim

    @property
    def table_rows(self) -> int:
        """Rows of the position table (R)."""
        return self.context if self.position_table is None else self.position_table


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """A language model: token embedding, decoder, head over the vocabulary.

    Attributes:
        decoder: the trunk.
        vocabulary: number of tokens (V).
        tied: whether the head shares the embedding's weights.
    """

    decoder: DecoderConfig
    vocabulary: int
    tied: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.vocabulary <= LARGEST:
            raise ConfigError(f"vocabulary must be at least 2 and at most {LARGEST:,}, got {self.vocabulary}")


@dataclass(frozen=True, kw_only=True)
class Category:
    """A categorical input: `columns` integer columns that share one embedding table of `rows` × `width`."""

    name: str
    rows: int
    width: int
    columns: int = 1


@dataclass(frozen=True, kw_only=True)
class Head:
    """One part of the controller: a name and its number of classes."""

    name: str
    classes: int


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """A controller policy: game state and the previous controller in, autoregressive heads out.

    Attributes:
        decoder: the trunk.
        categories: categorical inputs, in the order of the batch's columns.
        numbers: real-valued inputs a position.
        previous: heads whose previous class enters as a one-hot, in the order of the input vector.
        heads: the outputs, in the order in which they condition one another.
        conditioning: later heads see earlier heads' detached raw "logits" or the chosen "classes" as one-hots
            (the target's in training, the sampled one at play).
    """

    decoder: DecoderConfig
    heads: tuple[Head, ...]
    categories: tuple[Category, ...] = ()
    numbers: int = 0
    previous: tuple[str, ...] = ()
    conditioning: Conditioning = "logits"

    def __post_init__(self) -> None:
        names = [head.name for head in self.heads]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"heads need distinct names and at least one entry, got {names}")
        unknown = [name for name in self.previous if name not in names]
        if unknown:
            raise ConfigError(f"previous names heads that do not exist: {', '.join(unknown)}")
        if self.conditioning not in ("logits", "classes"):
            raise ConfigError(f"conditioning must be logits or classes, got {self.conditioning!r}")
        if self.input_width < 1:
            raise ConfigError("a policy needs at least one input: categories, numbers or previous")

    def classes(self, name: str) -> int:
        """Number of classes of the head called `name`."""
        return next(head.classes for head in self.heads if head.name == name)

    @property
    def input_width(self) -> int:
        """Numbers in the concatenated input vector of a position."""
        embedded = sum(category.width * category.columns for category in self.categories)
        return embedded + self.numbers + sum(self.classes(name) for name in self.previous)


ModelConfig = LanguageConfig | PolicyConfig
