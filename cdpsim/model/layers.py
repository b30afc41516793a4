"""Models by their shape: a transformer's embedding, layers and head as operations on named dimensions.

Dimensions: b samples, s positions of the sequence, t those of tokens and losses, k those of keys, h width, n heads,
d width of a head, q queries with keys and values, m queries, c keys, a outputs of the heads, f width of the MLP, g gate
and up together, p rows of positions, v vocabulary. Of latent attention: y queries, z keys and values, w these with the
rotary part of keys, l keys without it and values of all heads. Of experts: e experts, x choices of a router, r rows of
tokens for experts, i width of an expert, j its gate and up, u width of shared experts, o their gate and up. A value has
the numbers of all its dimensions. `cdpsim.model.splitting` splits them among ranks.

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


PRODUCT, PASS, CORE, GROUPED = "product", "pass", "core", "grouped"
OPERATORS = ("products", "products/2", "core", "norms", "activations", "scatters")  # whose outputs may be kept
TENSOR, CONTEXT, EXPERT = "tensor", "context", "expert"  # axes of ranks, which share products, positions, experts
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
ALL_TO_ALL, RING = "all-to-all", "ring"  # a ring passes on what each rank has until all have had it


class Kernel(NamedTuple):
    """One operation of a rank: a product, experts' products, a pass over memory, or a fused core of attention."""

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
    activation: Literal["gelu_new"] | None = None  # of the MLP, where several operations compute it; None: one does
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
    query_rank: Size | None = None  # of latent attention; None: queries are made of the stream
    key_value_rank: Size | None = None  # None: no latent attention
    rope_width: Size | None = None  # the numbers of a head's query and key that turn, beside head_width
    value_width: Size | None = None  # of a head; None: head_width
    experts: Size | None = None  # of which a router chooses for each token; None: one MLP for all
    top_k: Size = 1  # experts that a token gets
    expert_ffn: Size | None = None  # the width of an expert; None: ffn
    shared_ffn: PositionRows = 0  # the width of an MLP for all tokens beside the experts
    dense_layers: PositionRows = 0  # the first ones, with an MLP in place of experts
    frequency: Size = 1  # every how many-th layer has experts
    capacity: Annotated[float, msgspec.Meta(gt=0)] | None = (
        None  # rows of an expert, of even ones; None: as many as come
    )

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
        self._check_latent_and_experts()

    def _check_latent_and_experts(self) -> None:
        words = [name for name in ("query_rank", "rope_width", "value_width") if getattr(self, name) is not None]
        if words and self.key_value_rank is None:
            raise RequestError(words[0], "is of latent attention; give key_value_rank, too")
        if self.key_value_rank and (self.kv < self.heads or self.biases or self.head_norms):
            problem = "is of heads with keys of their own, without biases and norms of heads"
            raise RequestError("key_value_rank", f"{problem}; leave key_value_heads and head_norms out, biases false")
        defaults = {field.name: field.default for field in msgspec.structs.fields(Layers)}
        words = [name for name in _OF_EXPERTS if getattr(self, name) != defaults[name]]
        if words and self.experts is None:
            raise RequestError(words[0], "is of a mixture of experts; give experts, too")
        if self.experts and self.top_k > self.experts:
            raise RequestError("top_k", f"{self.top_k} are more than the {self.experts} experts; give fewer")
        if self.experts and self.parallel:
            raise RequestError("experts", "are behind the attention, and parallel has the MLP beside it; leave it out")
        if self.experts and not any(self.has_experts):
            problem = f"{self.layers} layers have no experts behind {self.dense_layers} dense ones"
            raise RequestError("dense_layers", f"{problem} with frequency {self.frequency}; lower either")

    @property
    def has_experts(self) -> list[bool]:
        """Whether each layer has experts."""
        least, every = self.dense_layers, self.frequency
        return [bool(self.experts) and k >= least and (k + 1) % every == 0 for k in range(self.layers)]

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
        if self.sizes["f"] % ranks and not all(self.has_experts):
            return f"the {self.sizes['f']} numbers of the MLP"
        return f"the {self.shared_ffn} numbers of the shared experts" if self.shared_ffn % ranks else ""

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dimension but samples."""
        d = self.width // self.heads if self.head_width is None else self.head_width
        f = 4 * self.width if self.ffn is None else self.ffn
        rows, turns, n = (
            self.length if self.positions is True else int(self.positions),
            self.rope_width or 0,
            self.heads,
        )
        value, expert, latent = self.value_width or d, self.expert_ffn or f, self.key_value_rank or 0
        parts = {"c": self.kv * d, "m": n * (d + turns), "a": n * value}
        parts["q"] = 2 * parts["m"] + parts["a"] if latent else parts["m"] + 2 * parts["c"]
        of_experts = {"e": self.experts or 1, "x": self.experts or 1, "i": expert, "j": 2 * expert}
        of_experts |= {"u": self.shared_ffn, "o": 2 * self.shared_ffn}
        of_latents = {"y": self.query_rank or 0, "z": latent, "w": latent + turns, "l": n * (d + value)}
        positions = dict.fromkeys("stk", self.length)
        others = {"h": self.width, "n": n, "d": d, "f": f, "g": 2 * f, "p": rows, "v": self.vocabulary}
        return positions | others | parts | of_experts | of_latents

    @property
    def numbers(self) -> int:
        """The number of parameters, tied ones counted once."""
        return self._count_numbers(self.sizes)

    @property
    def active_numbers(self) -> int:
        """The number of parameters that a token goes through: of the experts, top_k."""
        return self._count_numbers(self.sizes | {"e": self.top_k})

    def _count_numbers(self, sizes: Mapping[str, int]) -> int:
        mixed = sum(self.has_experts)
        parts = [(1, embedding(self)), (self.layers - mixed, layer(self)), (1, head(self))]
        parts += [(mixed, layer(self, experts=True))] * bool(mixed)
        weights = ((times, weight) for times, part in parts for each in part for weight in each.weights)
        return sum(times * count(weight, sizes) for times, weight in weights) - (count("vh", sizes) if self.tied else 0)


_OF_EXPERTS = ("top_k", "expert_ffn", "shared_ffn", "dense_layers", "frequency", "capacity")


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
    queries: tuple[Tensor, ...] = ()  # of the core of attention, which heads have
    keys: tuple[Tensor, ...] = ()  # and values, of which the core needs all positions
    fused: str = ""  # the behaviour of runtimes that have it as one kernel
    unfused: tuple[Tensor, ...] = ()  # kept by those that have not
    parts: str = ""  # where torchtitan has a product for each weight: the last dimensions of their outputs

    @property
    def operator(self) -> str:
        """The one of OPERATORS that it is, if any."""
        if self.in_core:
            return "" if "k" in self.output.dims else "core"
        kinds = {"fused_norms": "norms", "fused_mlp": "activations"}
        return "products" if self.kind == PRODUCT else kinds.get(self.fused, "")

    @property
    def apart(self) -> "Iterator[Operation]":
        """Its parts."""
        ((whole, times),), weight = self.flop, self.weights[0]
        for part in self.parts:
            output = self.output._replace(dims=self.output.dims[:-1] + part)
            weights = (part + weight[1:], *[part] * (len(self.weights) - 1))
            yield self._replace(output=output, weights=weights, flop=((whole.replace(weight[0], part), times),))


def count(dims: str, sizes: Mapping[str, int]) -> int:
    """Return the numbers of a tensor of these dimensions."""
    return prod(sizes[dim] for dim in dims)


def embedding(shape: Layers, width: int = 2) -> Iterator[Operation]:
    """Yield the operations of the embedding; `width` are the bytes of a number."""
    tokens, found, x = Tensor("tokens", "bt", TOKEN_BYTES, given=True), *_values(width, "e bsh", "x bsh")
    yield Operation(PASS, (tokens,), found, ("vh",), (tokens,), moved=(("bsh", 2 * width),))
    if shape.sizes["p"] or shape.dropout:
        weights = ("ph",) if shape.sizes["p"] else ()
        moved = (("bsh", 2 * width + shape.dropout),)
        yield Operation(PASS, (found,), x, weights, _mask(shape, "embedding"), moved=moved)


def head(shape: Layers, width: int = 2) -> Iterator[Operation]:
    """Yield the operations of the last norm, the logits and the loss; the loss takes three sums over the vocabulary."""
    x, y, logits = _values(width, "x bsh", "y bsh", "logits bsv")
    targets, probabilities, loss = Tensor("targets", "bt", TOKEN_BYTES, given=True), *_values(LOGIT, "p bsv", "loss bt")
    yield _norm(shape, x, y)
    yield _product(y, logits, "vh")
    moved = (("bsv", 8.0),)
    yield Operation(PASS, (logits, targets), loss, (), (probabilities, targets), moved=moved, again=0.5, sums=3)


def layer(shape: Layers, width: int = 2, *, experts: bool = False) -> Iterator[Operation]:
    """Yield the operations of a layer: attention and MLP or experts in turn, or beside each other."""
    x, y, o, added, x2, y2, u, w, grown, out = _values(
        width, "x bsh", "y1 bsh", "o bsa", "attention bsh", "x2 bsh", "y2 bsh", "u bsf", "w bsf", "mlp bsh", "out bsh"
    )
    if shape.gated:
        u = u._replace(dims="bsg")
    yield _norm(shape, x, y)
    yield from (_latent_attention if shape.key_value_rank else _attention)(shape, width, y, o)
    if shape.parallel:
        y2 = y if shape.norms == 1 or shape.norms is None else y2
    else:
        yield _product(o, added, "ha")
        if shape.norms == 4:
            yield _norm(shape, added, added := Tensor("attention2", "bsh", width))
        yield _add_up(shape, (added, x), x2)
    if y2 is not y:
        yield _norm(shape, x if shape.parallel else x2, y2)
    if experts:
        yield from _experts(shape, width, y2, grown)
    else:
        yield from _first_product(shape, y2, u, w)
    if shape.parallel:  # the sum of both is one product of both
        yield Operation(PRODUCT, (o, w), grown, ("ha", "hf"), (o, w), flop=(("bsha", 2), ("bshf", 2)))
    elif not experts:
        yield _product(w, grown, "hf")
    if shape.norms == 4:
        yield _norm(shape, grown, grown := Tensor("mlp2", "bsh", width))
    yield _add_up(shape, (grown, x if shape.parallel else x2), out)


def _first_product(shape: Layers, given: Tensor, u: Tensor, w: Tensor) -> Iterator[Operation]:
    """Yield an MLP's first product and its activation."""
    product = _product(given, u, u.dims[-1] + "h", biased=shape.biases is True)
    yield product._replace(parts=w.dims[-1] * 2 * shape.gated)
    yield _activate(shape, u, w)


def _activate(shape: Layers, u: Tensor, w: Tensor) -> Operation:
    """Return an MLP's activation; gelu_new(u) is u/2 (1 + tanh ...), and a gate's function is a factor."""
    steps = ("half", "tanh", "1 + tanh") if shape.activation else ()
    unfused = (u, *(w._replace(name=f"{step} of {u.name}") for step in (*steps, *["function"] * shape.gated)))
    moved = ((u.dims, w.width), (w.dims, w.width))
    return Operation(PASS, (u,), w, kept=(u,), moved=moved, fused="fused_mlp", unfused=unfused)


def _experts(shape: Layers, width: int, y: Tensor, out: Tensor) -> Iterator[Operation]:
    """Yield a router's choices, the rows that experts get, their products, and the weighted sums of these.

    Experts have no biases. Shared ones are an MLP for all tokens.
    """
    rows, u, w, got = _values(width, "rows rh", "expert u ri", "expert w ri", "got rh")
    chosen = Tensor("choices", "bsx", LOGIT)
    u = u._replace(dims="rj") if shape.gated else u
    inside = u.dims[-1]
    yield _product(y, chosen, "xh")
    yield Operation(PASS, (chosen,), chosen, kept=(chosen,), moved=(("bsx", 2 * LOGIT),))
    both = (("bsh", width), ("rh", width))
    yield Operation(PASS, (y,), rows, moved=both)
    yield Operation(GROUPED, (rows,), u, (f"e{inside}h",), (rows,), flop=((f"r{inside}h", 2),))
    yield _activate(shape, u, w)
    yield Operation(GROUPED, (w,), got, ("ehi",), (w,), flop=(("rih", 2),))
    mixed = out._replace(name="mixed") if shape.shared_ffn else out
    yield Operation(PASS, (got,), mixed, kept=(got,), moved=both)
    if shape.shared_ffn:
        u, w = _values(width, f"shared u bs{'o' if shape.gated else 'u'}", "shared w bsu")
        shared = out._replace(name="shared")
        yield from _first_product(shape, y, u, w)
        yield _product(w, shared, "hu")
        yield Operation(PASS, (mixed, shared), out, moved=(("bsh", 3 * width),))


def _latent_attention(shape: Layers, width: int, y: Tensor, o: Tensor) -> Iterator[Operation]:
    """Yield attention whose queries, and whose keys and values, are made of latent numbers (DeepSeek-V2, 2.1)."""
    queries, keys, values, qkv = _values(width, "q bsm", "k bsm", "v bsa", "qkv bsq")
    down, latent, key_values, normed, heads = _values(width, "yq bsy", "nq bsy", "ykv bsw", "nkv bsz", "kv bsl")
    if shape.query_rank:
        yield _product(y, down, "yh")
        yield _norm(shape, down, latent)
    source = latent if shape.query_rank else y
    yield _product(source, queries, "m" + source.dims[-1])
    yield _product(y, key_values, "wh")
    yield _norm(shape, key_values, normed)
    yield _product(normed, heads, "lz")
    moved = (("bsm", 3 * width), ("bsl", width))
    yield _rotate(shape, (queries, heads), qkv, moved)
    yield from _core(shape, width, qkv, (queries, keys, values), o)


def _attention(shape: Layers, width: int, y: Tensor, o: Tensor) -> Iterator[Operation]:
    qkv, queries, keys, values = _values(width, "qkv bsq", "q bsa", "k bsc", "v bsc")
    yield _product(y, qkv, "qh", biased=bool(shape.biases))._replace(parts="acc")
    if shape.head_norms:
        norms = ("d", "d") * (2 if shape.norm == "layer" else 1)
        both = (("bsa", 2 * width), ("bsc", 2 * width))
        kept, d = (queries, keys), shape.sizes["d"]
        unfused = (*_norm_steps(shape, queries, queries, d), *_norm_steps(shape, keys, keys, d))
        yield Operation(PASS, kept, qkv, norms, kept, moved=both, fused="fused_norms", unfused=unfused)
    yield _rotate(shape, (qkv,), qkv, (("bsq", 2 * width),))
    yield from _core(shape, width, qkv, (queries, keys, values), o)


def _rotate(shape: Layers, given: tuple[Tensor, ...], qkv: Tensor, moved: tuple[tuple[str, float], ...]) -> Operation:
    """Return the operation that brings queries, keys and values to the core, by default turned by their positions."""
    angles = Tensor("cosines and sines", "t", 2 * qkv.width * (shape.rope_width or shape.sizes["d"]))  # of all samples
    unfused = (qkv, *[angles] * (not shape.sizes["p"]))
    return Operation(PASS, given, qkv, kept=(qkv,), moved=moved, fused="fused_rotary", unfused=unfused)


def _core(
    shape: Layers, width: int, qkv: Tensor, parts: tuple[Tensor, Tensor, Tensor], o: Tensor
) -> Iterator[Operation]:
    """Yield the core of attention: products of queries and keys, and of their weights and values."""
    queries, keys, values = parts
    scores, weights = _values(width, "scores bskn", "weights bskn")
    products = (("bsk" + queries.dims[-1], 2), ("bska", 2))
    if shape.attention == "flash":
        done = 0.5 if shape.causal else 1.0
        core = Operation(CORE, (qkv,), o, kept=(Tensor("sums", "bsn", LOGIT),), flop=products, again=2.5, done=done)
        yield core._replace(in_core=True, queries=(queries,), keys=(keys, values))
        return
    more = (Tensor("mask", "bskn", 1), Tensor("dropped", "bskn", width)) if shape.dropout else ()
    kept = (weights, *more)
    moved, dropped = 4.0 * width + 1 if shape.dropout else 2.0 * width, kept[-1]
    first = Operation(PRODUCT, (queries, keys), scores, flop=products[:1], in_core=True)
    yield first._replace(queries=(queries,), keys=(keys,))
    yield Operation(PASS, (scores,), dropped, kept=kept, moved=(("bskn", moved),), again=1.6, in_core=True)
    yield Operation(PRODUCT, (dropped, values), o, flop=products[1:], in_core=True, keys=(values,))


def _values(width: float, *words: str) -> Iterator[Tensor]:
    return (Tensor(name, dims, width) for name, dims in (word.rsplit(maxsplit=1) for word in words))


def _norm(shape: Layers, given: Tensor, output: Tensor) -> Operation:
    weights = (output.dims[-1],) * (2 if shape.norm == "layer" else 1)
    unfused, moved = _norm_steps(shape, given, output, shape.sizes[output.dims[-1]]), 2 * given.width
    norm = Operation(PASS, (given,), output, weights, (given,), moved=((output.dims, moved),))
    return norm._replace(fused="fused_norms", unfused=unfused)


def _norm_steps(shape: Layers, given: Tensor, output: Tensor, over: int) -> tuple[Tensor, ...]:
    """Return what operations of torch keep for norms over so many numbers: layer norms are one, RMS norms several."""
    name, dims = output.name, output.dims
    scale = Tensor(f"scale of {name}", dims, LOGIT / over)
    if shape.norm == "layer":
        return given, scale._replace(width=2 * LOGIT / over)  # and the mean
    wide = given if given.width >= LOGIT else Tensor(f"input of {name} in fp32", dims, LOGIT)
    return wide, Tensor(f"{name} before weights", dims, given.width), scale


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
