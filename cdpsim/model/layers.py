"""Models by their shape: a transformer's embedding, layers and head as operations on named dimensions.

Dimensions: b samples, s positions of the sequence, k positions of keys, h width, n heads, d width of a head, q queries
with keys and values, c keys, a outputs of the heads, f width of the MLP, g gate and up together, p rows of positions,
v vocabulary. A value has the numbers of all its dimensions. `cdpsim.model.splitting` splits them among ranks.

A rank's share is work as kernels, each of a kind that a device does at its own pace, and exchanges within a group of
ranks. FLOP are counted as the literature counts them, with the core of attention whole; a causal core computes half of
them. An exchange may run beside one product, and what that does not hide takes the time of its task.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias

import msgspec

from cdpsim.errors import RequestError
from cdpsim.files import config
from cdpsim.files.units import Work

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
PositionRows: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31)]

TOKEN_BYTES = 8  # of a token's number, as torch has it
LOGIT = 4  # bytes of a logit for the loss, and of what a fused core keeps for each head and token
PADDED = 128  # a vocabulary split among t ranks is a multiple of this times t (Megatron-LM)


PRODUCT, PASS, CORE = "product", "pass", "core"
TENSOR = "tensor"  # the axis of ranks that share products
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"


class Kernel(NamedTuple):
    """One operation of a rank: a product, a pass over memory, or a fused core of attention."""

    kind: str
    flop: float = 0.0
    moved: float = 0.0  # bytes that it reads and writes
    done: float = 1.0  # the share of its FLOP that is computed


class Exchange(NamedTuple):
    """A collective of the ranks of an axis; `size` are the bytes of the whole tensor over the axis."""

    axis: str
    op: str
    size: int
    beside: Kernel | None = None  # the product that may hide it


class Operations(Work):
    """Work that has rows: its value is their FLOP. Equal rows are one, with the number of times that each is done."""

    rows: tuple[tuple[Kernel, float], ...]
    exchanges: tuple[tuple[Exchange, float], ...]

    def __new__(cls, counted: Iterable[tuple[Kernel | Exchange, float]]) -> Self:
        """Add up equal rows, and equal exchanges."""
        counts: dict[Kernel | Exchange, float] = {}
        for each, times in counted:
            counts[each] = counts.get(each, 0) + times
        rows = [(row, times) for row, times in counts.items() if isinstance(row, Kernel)]
        made = super().__new__(cls, sum(row.flop * times for row, times in rows))
        made.rows = tuple(rows)
        made.exchanges = tuple((each, times) for each, times in counts.items() if isinstance(each, Exchange))
        return made

    def __getnewargs__(self) -> tuple[Any]:  # of a copy
        return (self.counted,)

    @property
    def counted(self) -> tuple[tuple[Kernel | Exchange, float], ...]:
        """All rows and exchanges, with the number of times that each is done."""
        return (*self.rows, *self.exchanges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Operations) and (self.rows, self.exchanges) == (other.rows, other.exchanges)

    def __hash__(self) -> int:
        return hash((self.rows, self.exchanges))


class Layers(config.ConfigTable, frozen=True, kw_only=True):
    """The shape of a decoder: what its weights and activations are as large as."""

    layers: Size
    width: Size
    heads: Size
    length: Size  # of a sequence, in tokens
    vocabulary: Size
    key_value_heads: Size | None = None  # None: as many as heads
    head_width: Size | None = None  # None: width / heads
    ffn: Size | None = None  # None: 4 times the width
    gated: bool = False  # whether the MLP has a gate beside its first product
    attention: Literal["flash", "eager"] = "flash"
    dropout: bool = False
    biases: bool | Literal["qkv"] = True
    norm: Literal["layer", "rms"] = "layer"
    norms: Literal[1, 2, 4] | None = None  # of a layer; None: 2, or 1 where parallel
    head_norms: bool = False  # of queries and of keys
    parallel: bool = False  # whether the MLP is beside the attention
    tied: bool = True  # whether the head has the embedding's weights
    positions: bool | PositionRows = True  # rows of learned positions; true: as many as the length
    causal: bool = True

    def _check(self) -> None:
        if self.gated and self.ffn is None:
            raise RequestError("ffn", "is missing; give the width of the gated MLP, which no rule says")
        if self.head_width is None and self.width % self.heads:
            problem = f"{self.heads} do not divide the width {self.width}"
            raise RequestError("heads", f"{problem}; give head_width, or other heads")
        if self.heads % self.kv:
            problem = f"{self.kv} do not divide the {self.heads} heads, of which several share one"
            raise RequestError("key_value_heads", f"{problem}; give a divisor of {self.heads}")
        if not isinstance(self.positions, bool) and 0 < self.positions < self.length:
            problem = f"{self.positions} rows are fewer than the {self.length} tokens of a sequence"
            raise RequestError("positions", f"{problem}; lower length, or raise positions")
        if self.norms == 1 and not self.parallel:
            raise RequestError("norms", "1 serves attention and MLP together; set parallel = true, or give 2 or 4")
        if self.norms == 4 and self.parallel:
            raise RequestError("norms", "4 are before and behind each of two parts in turn; leave out parallel")

    @property
    def kv(self) -> int:
        """The number of heads of keys and of values."""
        return self.heads if self.key_value_heads is None else self.key_value_heads

    def undivided(self, ranks: int) -> str:
        """Return which heads or width this number of ranks does not divide; few key/value heads are copied."""
        if self.heads % ranks:
            return f"the {self.heads} heads"
        if self.kv % ranks and ranks % self.kv:
            return f"the {self.kv} key/value heads"
        return f"the {self.sizes['f']} numbers of the MLP" if self.sizes["f"] % ranks else ""

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dimension but samples."""
        d = self.width // self.heads if self.head_width is None else self.head_width
        f = 4 * self.width if self.ffn is None else self.ffn
        rows = self.length if self.positions is True else int(self.positions)
        return {
            "s": self.length,
            "k": self.length,
            "h": self.width,
            "n": self.heads,
            "d": d,
            "q": (self.heads + 2 * self.kv) * d,
            "c": self.kv * d,
            "a": self.heads * d,
            "f": f,
            "g": 2 * f,
            "p": rows,
            "v": self.vocabulary,
        }

    @property
    def numbers(self) -> int:
        """The number of parameters, tied ones counted once."""
        sizes = self.sizes
        parts = [(1, embedding(self)), (self.layers, layer(self)), (1, head(self))]
        weights = ((times, weight) for times, part in parts for each in part for weight in each.weights)
        return sum(times * count(weight, sizes) for times, weight in weights) - (count("vh", sizes) if self.tied else 0)


class Tensor(NamedTuple):
    """A tensor: its name, its dimensions, and the bytes of a number."""

    name: str
    dims: str
    width: float
    given: bool = False  # whether a micro-batch brings it: then it has no gradient


class Operation(NamedTuple):
    """One operation of a forward. Its backward does each product twice, and moves `again` times as many bytes."""

    kind: str
    inputs: tuple[Tensor, ...]
    output: Tensor
    weights: tuple[str, ...] = ()  # the dimensions of each
    kept: tuple[Tensor, ...] = ()  # for the backward
    flop: tuple[tuple[str, int], ...] = ()  # dimensions, and how many for each number of them
    moved: tuple[tuple[str, float], ...] = ()  # of a pass: dimensions, and the bytes that each number takes
    again: float = 2.0
    done: float = 1.0  # the share of its FLOP that is computed
    in_core: bool = False  # whether it belongs to the core of attention
    sums: int = 1  # the messages that a partial output takes


def count(dims: str, sizes: Mapping[str, int]) -> int:
    """Return the numbers of a tensor of these dimensions."""
    return prod(sizes[dim] for dim in dims)


def embedding(shape: Layers, width: int = 2) -> Iterator[Operation]:
    """Yield the operations of the embedding; `width` are the bytes of a number."""
    tokens, found, x = Tensor("tokens", "bk", TOKEN_BYTES, given=True), *_values(width, "e bsh", "x bsh")
    yield Operation(PASS, (tokens,), found, ("vh",), (tokens,), moved=(("bsh", 2 * width),))
    if shape.sizes["p"] or shape.dropout:
        weights = ("ph",) if shape.sizes["p"] else ()
        moved = (("bsh", 2 * width + shape.dropout),)
        yield Operation(PASS, (found,), x, weights, _mask(shape, "embedding"), moved=moved)


def head(shape: Layers, width: int = 2) -> Iterator[Operation]:
    """Yield the operations of the last norm, the logits and the loss; the loss takes three sums over the vocabulary."""
    x, y, logits = _values(width, "x bsh", "y bsh", "logits bsv")
    targets, probabilities, loss = Tensor("targets", "bk", TOKEN_BYTES, given=True), *_values(LOGIT, "p bsv", "loss bk")
    yield _norm(shape, x, y)
    yield _product(y, logits, "vh")
    moved = (("bsv", 8.0),)
    yield Operation(PASS, (logits, targets), loss, (), (probabilities, targets), moved=moved, again=0.5, sums=3)


def layer(shape: Layers, width: int = 2) -> Iterator[Operation]:
    """Yield the operations of a layer: attention and MLP in turn, or beside each other."""
    x, y, o, added, x2, y2, u, w, grown, out = _values(
        width, "x bsh", "y1 bsh", "o bsa", "attention bsh", "x2 bsh", "y2 bsh", "u bsf", "w bsf", "mlp bsh", "out bsh"
    )
    if shape.gated:
        u = u._replace(dims="bsg")
    yield _norm(shape, x, y)
    yield from _attention(shape, width, y, o)
    if shape.parallel:
        y2 = y if shape.norms == 1 or shape.norms is None else y2
    else:
        yield _product(o, added, "ha")
        if shape.norms == 4:
            yield _norm(shape, added, added := Tensor("attention2", "bsh", width))
        yield _add_up(shape, (added, x), x2)
    if y2 is not y:
        yield _norm(shape, x if shape.parallel else x2, y2)
    yield _product(y2, u, u.dims[-1] + "h", biased=shape.biases is True)
    yield Operation(PASS, (u,), w, kept=(u,), moved=((u.dims, width), (w.dims, width)))
    if shape.parallel:  # the sum of both is one product of both
        yield Operation(PRODUCT, (o, w), grown, ("ha", "hf"), (o, w), flop=(("bsha", 2), ("bshf", 2)))
    else:
        yield _product(w, grown, "hf")
    if shape.norms == 4:
        yield _norm(shape, grown, grown := Tensor("mlp2", "bsh", width))
    yield _add_up(shape, (grown, x if shape.parallel else x2), out)


def _attention(shape: Layers, width: int, y: Tensor, o: Tensor) -> Iterator[Operation]:
    qkv, queries, keys, scores, weights = _values(width, "qkv bsq", "q bsa", "k bsc", "scores bskn", "weights bskn")
    yield _product(y, qkv, "qh", biased=bool(shape.biases))
    if shape.head_norms:
        norms = ("d", "d") * (2 if shape.norm == "layer" else 1)
        both = (("bsa", 2 * width), ("bsc", 2 * width))
        yield Operation(PASS, (queries, keys), qkv, norms, (queries, keys), moved=both)
    yield Operation(PASS, (qkv,), qkv, kept=(qkv,), moved=(("bsq", 2 * width),))
    if shape.attention == "flash":
        done = 0.5 if shape.causal else 1.0
        sums = (Tensor("sums", "bsn", LOGIT),)
        yield Operation(CORE, (qkv,), o, kept=sums, flop=(("bska", 4),), again=2.5, done=done, in_core=True)
        return
    more = (Tensor("mask", "bskn", 1), Tensor("dropped", "bskn", width)) if shape.dropout else ()
    kept = (weights, *more)
    moved, dropped = 4.0 * width + 1 if shape.dropout else 2.0 * width, kept[-1]
    yield Operation(PRODUCT, (queries, keys), scores, flop=(("bska", 2),), in_core=True)
    yield Operation(PASS, (scores,), dropped, kept=kept, moved=(("bskn", moved),), again=1.6, in_core=True)
    yield Operation(PRODUCT, (dropped, keys), o, flop=(("bska", 2),), in_core=True)


def _values(width: float, *words: str) -> Iterator[Tensor]:
    return (Tensor(name, dims, width) for name, dims in map(str.split, words))


def _norm(shape: Layers, given: Tensor, output: Tensor) -> Operation:
    weights = ("h", "h") if shape.norm == "layer" else ("h",)
    return Operation(PASS, (given,), output, weights, (given,), moved=(("bsh", 2 * given.width),))


def _product(given: Tensor, output: Tensor, weight: str, *, biased: bool = False) -> Operation:
    weights = (weight, weight[0]) if biased else (weight,)
    return Operation(PRODUCT, (given,), output, weights, (given,), flop=((given.dims + weight.strip(given.dims), 2),))


def _add_up(shape: Layers, parts: tuple[Tensor, ...], output: Tensor) -> Operation:
    """Return a sum with the stream, which adds the biases of the products before it and drops some of them."""
    biases = ("h",) * (1 + shape.parallel) if shape.biases is True else ()
    moved = (("bsh", (len(parts) + 1) * output.width + shape.dropout),)
    return Operation(PASS, parts, output, biases, _mask(shape, output.name), moved=moved)


def _mask(shape: Layers, name: str) -> tuple[Tensor, ...]:
    return (Tensor(f"mask of {name}", "bsh", 1),) if shape.dropout else ()
