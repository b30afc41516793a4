"""Learning from images: folders as others wrote them, torch's own layers and batch norm, known sizes of networks."""

import copy
import io
import pickle
import struct
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from PIL import Image
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils.flop_counter import FlopCounterMode

from cdpsim import RequestError
from validation.learn import networks
from validation.learn.data import Data, Tensors, fake, label_loss, load_data
from validation.learn.images import ImageFiles, SmallImages, cifar10, imagenet, random_box, read_binary, read_pickled
from validation.learn.lags import read_learner
from validation.learn.layers import (
    BatchNorm,
    Convolution,
    GroupNorm,
    collecting,
    has_statistics,
    residual_network,
    using,
)
from validation.learn.networks import Sizes, make_stages, usual_network
from validation.learn.stacked import Stack, step_together
from validation.learn.training import Course, Trained, train_all
from validation.learn.updates import Update
from validation.replay.equation import evaluate
from validation.training.forms import Form, flatten
from validation.training.models import even_cuts
from validation.training.optimizer import Optimizer
from validation.training.stages import Architecture, Draw, cut

MEAN, DEVIATION = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2023, 0.1994, 0.2010])
BATCHES = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
SIZES = Sizes(layers=8, width=8)


# CIFAR-10

Rows = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]  # pixels and labels


def drawn_rows(seed: int) -> Rows:
    draw = np.random.default_rng(seed)
    return draw.integers(0, 256, (10_000, 3072), dtype=np.uint8), draw.integers(0, 10, 10_000)


ROWS = [drawn_rows(0), drawn_rows(1)]  # of odd files and of even ones


def binary(rows: Rows) -> bytes:
    return np.concatenate([rows[1][:, None].astype(np.uint8), rows[0]], axis=1).tobytes()


def python_2(rows: Rows) -> bytes:
    """A batch as cPickle of Python 2 writes it at protocol 2, operation by operation."""
    pixels, labels = rows
    thousands = [bytes(pair for label in part for pair in (ord("K"), label)) for part in labels.reshape(-1, 1000)]
    return b"".join(
        [
            b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03U\x06labelsq\x04]q\x05",
            *(b"(" + part + b"e" for part in thousands),
            b"U\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09",
            b"(K\x01M\x10'M\x00\x0c\x86cnumpy\ndtype\nq\nU\x02u1K\x00K\x01\x87Rq\x0b",
            b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T",
            struct.pack("<i", pixels.size) + pixels.tobytes() + b"tb",
            b"U\tfilenamesq\x0c]q\r(U\x05a.pngq\x0eU\x05b.pngq\x0feu.",
        ]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both versions of six files, of which every second one is the same."""
    root = tmp_path_factory.mktemp("cifar")
    for version, suffix, write in (("bin", ".bin", binary), ("py", "", python_2)):
        place = root / version / f"cifar-10-batches-{version}"
        place.mkdir(parents=True)
        for k, name in enumerate(BATCHES):
            path = place / f"{name}{suffix}"
            if k < 2:
                path.write_bytes(write(ROWS[k]))
            else:
                path.hardlink_to(place / f"{BATCHES[k % 2]}{suffix}")
    return root


@pytest.mark.parametrize("version", ["bin", "py"])
def test_cifar10_is_read_in_the_order_of_its_files(folder: Path, version: str) -> None:
    """Of the folder itself, or of one that has it."""
    train, test, classes = cifar10(folder / version)
    assert (len(train), len(test), classes) == (50_000, 10_000, 10)
    for k in range(5):
        part = slice(10_000 * k, 10_000 * (k + 1))
        assert np.array_equal(train.pixels[part].flatten(1).numpy(), ROWS[k % 2][0])
        assert np.array_equal(train.labels[part].numpy(), ROWS[k % 2][1])
    inner, again, _ = cifar10(folder / version / f"cifar-10-batches-{version}")
    assert torch.equal(again.pixels, test.pixels) and torch.equal(inner.labels, train.labels)
    numbers = torch.tensor([3, 9_999])
    x, y = test.take(numbers)
    colours = ROWS[1][0][numbers.numpy()].reshape(-1, 3, 32, 32) / 255
    assert np.allclose(x, (colours - MEAN[:, None, None]) / DEVIATION[:, None, None], atol=1e-5)
    assert y.tolist() == ROWS[1][1][numbers.numpy()].tolist()


def test_the_python_version_is_one_that_pickle_reads() -> None:
    """Python's own pickle reads the files that this test writes, as they are meant."""
    content = pickle.loads(python_2(ROWS[0]), encoding="latin1")
    assert np.array_equal(content["data"], ROWS[0][0]) and content["labels"] == ROWS[0][1].tolist()


@pytest.mark.parametrize(
    ("protocol", "as_bytes", "order"),
    [(2, False, "C"), (2, True, "F"), (3, True, "F"), (4, False, "C"), (5, True, "F")],
)
def test_python_3_may_have_written_it(tmp_path: Path, protocol: int, as_bytes: bool, order: Any) -> None:
    pixels, labels = ROWS[0]
    content = {"labels": labels.tolist(), "data": pixels.copy(order), "filenames": ["a", "b"], "batch_label": "F1"}
    path = tmp_path / "data_batch_1"
    path.write_bytes(
        pickle.dumps({name.encode() if as_bytes else name: own for name, own in content.items()}, protocol)
    )
    found = read_pickled(path)
    path.unlink()
    assert np.array_equal(found[0], pixels) and np.array_equal(found[1], labels)


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_nothing_in_a_pickle_is_run(tmp_path: Path) -> None:
    content, path = pickle.dumps({"labels": Hostile(tmp_path / "harm")}), tmp_path / "data_batch_1"
    path.write_bytes(content)
    with pytest.raises(RequestError, match="has 0 arrays of 30,720,000 bytes and 0 labels, and not 1 and 10,000"):
        read_pickled(path)
    assert not (tmp_path / "harm").exists()
    pickle.loads(content)
    assert (tmp_path / "harm").exists()


def with_label(write: Callable[[Rows], bytes], label: int) -> bytes:
    labels = ROWS[0][1].copy()
    labels[5] = label
    return write((ROWS[0][0], labels))


def with_great_label(label: int) -> bytes:
    return pickle.dumps({"labels": [*ROWS[0][1].tolist()[:-1], label], "data": ROWS[0][0]}, 4)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("read", "content", "problem"),
    [
        (read_binary, lambda: b"1" * 100, "has 100 bytes, and not 30,730,000; take the file of the archive"),
        (read_binary, lambda: with_label(binary, 12), "has a label 12; labels are 0 to 9"),
        (read_pickled, lambda: with_label(python_2, 12), "has a label 12; labels are 0 to 9"),
        (read_pickled, lambda: with_great_label(2**80), f"has a label {2**80}; labels are 0 to 9"),
        (read_pickled, lambda: b"no pickle", "is no pickle of CIFAR-10"),
        (read_pickled, lambda: python_2(ROWS[0])[:-1000], "is no pickle of CIFAR-10"),
        (
            read_pickled,
            lambda: pickle.dumps({"labels": [1] * 9_999}),
            "has 0 arrays of 30,720,000 bytes and 9,999 labels",
        ),
    ],
)
def test_a_file_that_is_no_batch_is_refused(
    tmp_path: Path, read: Callable[[Path], object], content: Callable[[], bytes], problem: str
) -> None:
    path = tmp_path / "batch"
    path.write_bytes(content())
    with pytest.raises(RequestError) as error:
        read(path)
    path.unlink()
    assert str(error.value).startswith(f"{path}: {problem}") and "\n" not in str(error.value)


def marked() -> SmallImages:
    """Images whose red is the column and whose green is the row, both from 1 on."""
    pixels = torch.zeros(2000, 3, 32, 32, dtype=torch.uint8)
    pixels[:, 0], pixels[:, 1] = torch.arange(1, 33), torch.arange(1, 33)[:, None]
    pixels[:, 2] = (torch.arange(2000) % 100)[:, None, None]
    return SmallImages(pixels, torch.arange(2000))


def test_one_learns_from_crops_and_flips() -> None:
    """Each is found again in its image, with four zeros on each side."""
    images = marked()
    x = images.take(torch.arange(2000), (3, 5))[0].numpy()
    plain = np.pad(images.take(torch.arange(2000))[0].numpy(), ((0, 0), (0, 0), (4, 4), (4, 4)))
    column, right, row = (
        np.rint((x[:, c, 16, k] * DEVIATION[c] + MEAN[c]) * 255).astype(int) for c, k in ((0, 16), (0, 17), (1, 16))
    )
    flipped, tops = right < column, row - 16 + 3  # the place of the crop, with the border counted
    lefts = np.where(flipped, column - 15, column - 16) + 3
    for k in range(len(x)):
        expected = plain[k, :, tops[k] : tops[k] + 32, lefts[k] : lefts[k] + 32]
        assert np.array_equal(x[k], expected[..., ::-1] if flipped[k] else expected)
    assert abs(flipped.mean() - 0.5) < 4 * np.sqrt(0.25 / 2000)
    for offsets in (tops, lefts):
        counts = np.bincount(offsets, minlength=9)
        assert len(counts) == 9 and (abs(counts - 2000 / 9) < 4 * np.sqrt(2000 * 8 / 81)).all()
    assert abs(np.corrcoef([tops, lefts, flipped])[np.triu_indices(3, 1)]).max() < 4 / np.sqrt(2000)


def test_a_sample_is_altered_alike_in_any_batch() -> None:
    """And otherwise in another epoch, with another seed, and another sample."""
    images, numbers = marked(), torch.tensor([1999, 7, 300])
    found = images.take(torch.arange(2000), (1, 2))[0][numbers]
    assert torch.equal(images.take(numbers, (1, 2))[0], found)
    assert torch.equal(images.take(numbers.flip(0), (1, 2))[0].flip(0), found)
    for draws in ((1, 3), (2, 2), (2, 1)):
        assert not torch.equal(images.take(numbers, draws)[0], found)
    assert torch.equal(images.take(numbers, (1, 2))[1], numbers)


# ImageNet


def saved(path: Path, red: Any, green: Any = 0, blue: Any = 0) -> None:
    """Write an image of three colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.stack(np.broadcast_arrays(red, green, blue), axis=-1).astype(np.uint8)).save(path)


def bytes_of(x: Tensor) -> Tensor:
    """The bytes of a normalized image."""
    mean, deviation = (torch.tensor(own)[:, None, None] for own in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return (x * deviation + mean) * 255


RAMP = np.arange(256)


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    saved(tmp_path / "train/b/1.JPEG", np.full((300, 400), 200), 100, 50)
    saved(tmp_path / "train/a/1.png", *np.meshgrid(RAMP, RAMP))
    saved(tmp_path / "val/b/wide.png", np.arange(512)[None].repeat(256, 0) // 2, RAMP[:, None])
    saved(tmp_path / "val/b/large.png", *(own // 2 for own in np.meshgrid(np.arange(512), np.arange(512))))
    (tmp_path / "val/b/notes.txt").write_text("no image")
    return tmp_path


def test_imagenet_is_decoded_when_it_is_taken(classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    usual = Image.open

    def noted(path: str) -> Image.Image:
        opened.append(Path(path).name)
        return usual(path)

    monkeypatch.setattr(Image, "open", noted)
    data = Data("imagenet", *imagenet(classes))
    assert (len(data.train), len(data.test), data.classes) == (2, 2, 2)
    assert not opened
    assert data.shape == (3, 224, 224) and opened == ["large.png"]
    assert data.train.take(torch.tensor([1, 0, 1]))[1].tolist() == [1, 0, 1]  # the classes are a and b
    assert data.test.take(torch.arange(2))[1].tolist() == [1, 1]


def test_the_test_takes_the_centre(classes: Path) -> None:
    """Of a shorter side of 256: exactly where it is of that size, to a grey value where it is of twice that."""
    train, test, _ = imagenet(classes)
    large, wide = bytes_of(test.take(torch.arange(2))[0])
    columns, rows = (torch.arange(first, first + 224.0) for first in (144, 16))
    assert torch.allclose(wide[0], (columns // 2).expand(224, 224), atol=1e-3)
    assert torch.allclose(wide[1], rows[:, None].expand(224, 224), atol=1e-3)
    assert torch.allclose(large[0], rows.expand(224, 224), atol=1.001)
    assert torch.allclose(large[1], rows[:, None].expand(224, 224), atol=1.001)
    plain = bytes_of(train.take(torch.tensor([1]))[0][0])
    assert torch.allclose(plain, torch.tensor([200.0, 100, 50])[:, None, None].expand_as(plain), atol=2)  # a JPEG


def test_one_learns_from_parts_of_all_sizes(classes: Path) -> None:
    """Their sides are the slopes of a ramp that they cut out."""
    train, _, _ = imagenet(classes)
    parts = torch.stack([bytes_of(train.take(torch.tensor([0]), (0, epoch))[0][0]) for epoch in range(150)])
    across, down = (
        224 * (parts[:, colour, *high] - parts[:, colour, *low]) / 180
        for colour, high, low in ((0, (112, 200), (112, 20)), (1, (200, 112), (20, 112)))
    )
    flipped, across = across < 0, across.abs()
    assert abs(flipped.float().mean() - 0.5) < 4 * (0.25 / 150) ** 0.5
    area, ratio = across * down / 256**2, across / down
    assert 0.075 < area.min() < 0.15 and 0.85 < area.max() < 1.02
    assert 0.73 < ratio.min() < 0.8 and 1.25 < ratio.max() < 1.37
    numbers = torch.tensor([1, 0])
    assert torch.equal(
        train.take(numbers, (0, 7))[0].flip(0), torch.cat([train.take(numbers[k : k + 1], (0, 7))[0] for k in (1, 0)])
    )
    twice = ImageFiles([train.paths[0]] * 2, train.labels)
    assert not torch.equal(*twice.take(torch.arange(2), (0, 7))[0])


def test_of_an_image_that_is_too_long_the_centre_is_taken() -> None:
    """A ratio of 100: ten tries fail, as the smallest part would be 24 pixels high."""
    assert random_box((1000, 10), iter([0.5] * 40)) == (493, 0, 506, 10)
    assert random_box((10, 1000), iter([0.5] * 40)) == (0, 493, 10, 506)
    assert random_box((100, 100), iter([1.0, 0.5, 0.0, 0.0])) == (0, 0, 100, 100)
    assert random_box((100, 100), iter([1.0, 0.9, 0.0, 0.0, 0.0, 0.5, 0.5, 0.0])) == (36, 0, 64, 28)


# Refusals


def test_folders_that_lack_files_are_refused(tmp_path: Path, classes: Path, folder: Path) -> None:
    def refusal(name: str) -> str:
        with pytest.raises(RequestError) as error:
            load_data(name)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert refusal(f"cifar10:{tmp_path}/none") == (
        f"{tmp_path}/none: is no folder; give cifar10:DIR, the folder where the files of cifar10 are"
    )
    assert refusal(f"imagenet:{tmp_path}/none").startswith(f"{tmp_path}/none: is no folder; give imagenet:DIR")
    half = tmp_path / "half" / "cifar-10-batches-py"
    half.mkdir(parents=True)
    for name in BATCHES[:4]:
        (half / name).touch()
    remedy = "give the folder of CIFAR-10's binary or python version"
    assert refusal(f"cifar10:{half.parent}") == f"{half}: has no data_batch_5, test_batch; {remedy}"
    assert f"{classes}: has no data_batch_1.bin, data_batch_2.bin, " in refusal(f"cifar10:{classes}")
    assert refusal(f"imagenet:{half}").startswith(f"{half}/train: is no folder with a folder for each class")
    saved(classes / "val/c/1.png", np.zeros((2, 2)))
    assert refusal(f"imagenet:{classes}") == f"{classes}/val/c: is of a class that train has not; remove it"
    (classes / "train/c").mkdir()
    assert refusal(f"imagenet:{classes}").startswith(f"{classes}/train/c: has no image that pillow reads")


def test_a_file_that_is_no_image_is_named(classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(whole, "JPEG")
    for content in (b"no image", whole.getvalue()[:500]):
        (classes / "train/a/0.jpg").write_bytes(content)
        train, _, _ = imagenet(classes)
        with pytest.raises(
            RequestError, match=rf"{classes}/train/a/0.jpg: cannot be decoded: .*; remove or replace it"
        ):
            train.take(torch.arange(3), (0, 0))
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(RequestError, match="data: images are decoded by pillow; run `pip install pillow`"):
        imagenet(classes)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("cifar10", "data: 'cifar10' lies in a folder of yours; give it: cifar10:DIR"),
        ("imagenet:", "data: 'imagenet:' lies in a folder of yours; give it: imagenet:DIR"),
        ("digits:x", "data: unknown data 'digits:x'; did you mean 'digits'?"),
        ("cifar", "data: unknown data 'cifar'; did you mean 'cifar10:DIR'?"),
        ("fake:10", "data: unknown data 'fake:10'; did you mean 'fake'?"),
    ],
)
def test_a_name_that_is_not_known_is_refused(name: str, problem: str) -> None:
    with pytest.raises(RequestError) as error:
        load_data(name)
    assert str(error.value) == problem


def test_what_is_fake_is_always_the_same() -> None:
    data, again = load_data("fake"), fake()
    assert load_data("fake") is data
    assert data.samples + len(data.test) == 2048 and data.shape == (3, 32, 32)
    numbers = torch.arange(data.samples)
    (x, y), (other, labels) = data.train.take(numbers), again.train.take(numbers)
    assert torch.equal(x, other) and torch.equal(y, labels)
    assert y.unique().tolist() == [*range(10)]
    assert abs(x.mean()) < 0.01 and abs(x.std() - 1) < 0.01


# Layers and networks


def images(side: int, channels: int = 3, classes: int = 5) -> Data:
    x, y = torch.zeros(8, channels, side, side), torch.zeros(8, dtype=torch.int64)
    return Data(f"images of {side}", Tensors(x, y), Tensors(x, y), classes)


GREYS = Tensors(torch.zeros(8, 64), torch.zeros(8, dtype=torch.int64))
DIGITS = Data("vectors", GREYS, GREYS, 10)
VECTORS = DIGITS._replace(
    train=Tensors(torch.zeros(1, 6), torch.zeros(1)), test=Tensors(torch.zeros(1, 6), torch.zeros(1))
)
TOKENS = DIGITS._replace(name="tokens", tokens=7)


@pytest.mark.parametrize(
    ("depth", "side", "classes", "parameters", "giga"),
    [
        (18, 224, 1000, 11_689_512, 1.814),  # torchvision's, with the multiplications that it documents
        (50, 224, 1000, 25_557_032, 4.089),
        (18, 32, 10, 11_173_962, 0.556),  # those of CIFAR-10
        (50, 32, 10, 23_520_842, 1.298),
    ],
)
def test_residual_networks_are_of_known_sizes(
    depth: int, side: int, classes: int, parameters: int, giga: float
) -> None:
    with torch.device("meta"):
        usual, other = (
            nn.Sequential(*residual_network(depth, 3, side, classes, normalize)) for normalize in (GroupNorm, BatchNorm)
        )
        with FlopCounterMode(display=False) as counter:
            assert usual(torch.zeros(2, 3, side, side)).shape == (2, classes)
    assert counter.get_total_flops() / 4e9 == pytest.approx(giga, abs=6e-4)
    assert [sum(own.numel() for own in model.parameters()) for model in (usual, other)] == [parameters] * 2
    assert len(usual) == {18: 8, 50: 16}[depth] + 2


def given_twice(layer: Any) -> tuple[Any, Tensor]:
    """A layer whose backwards read another weight, and that weight."""
    layer = layer.double()
    layer.twice()
    nn.init.normal_(layer.weight)
    return layer, layer.back.normal_()


@pytest.mark.parametrize(
    ("layer", "theirs"),
    [
        (partial(Convolution, 4, 6, 3, 2), lambda x, w, b: nn.functional.conv2d(x, w, b, 2, 1)),
        (partial(GroupNorm, 4), lambda x, w, b: nn.functional.group_norm(x, 2, w, b)),
        (partial(BatchNorm, 4), lambda x, w, b: nn.functional.batch_norm(x, None, None, w, b, training=True)),
    ],
)
def test_backwards_may_read_another_weight(layer: Callable[[], Any], theirs: Callable[..., Tensor]) -> None:
    """The values and the weight's gradient are of the one, the input's gradient is of the other, all by torch."""
    torch.manual_seed(0)
    own, back = given_twice(layer())
    x = torch.randn(3, 4, 8, 8, dtype=torch.float64, requires_grad=True)
    y = own(x)
    above = torch.randn_like(y)
    parameters = [*own.parameters()]
    found = torch.autograd.grad(y, [x, *parameters], above)
    forward = theirs(x, own.weight, getattr(own, "bias", None))
    (by_back,) = torch.autograd.grad(theirs(x, back, getattr(own, "bias", None)), x, above)
    expected = [by_back, *torch.autograd.grad(forward, parameters, above)]
    assert torch.allclose(y, forward, rtol=0, atol=1e-12)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("data", [DIGITS, images(8)], ids=["digits", "images"])
@pytest.mark.parametrize("name", ["multi-cdp", "pipemare"])
def test_steps_are_those_of_the_update_equation(name: str, data: Data, batch_norm: bool) -> None:
    """Of a convolutional network, too, whose backwards read another version with PipeMare."""
    learner, n, m = read_learner(name, 4, {}), 4, 4
    make = partial(make_stages, "conv", data, SIZES, n, 0, torch.float64, batch_norm=batch_norm)
    layers = [layer for stage in make() for layer in stage]
    form = Form((3, *data.shape), torch.float64)
    architecture = Architecture(layers, Draw(form), Draw(Form((3,), torch.int64), data.classes), label_loss)
    training = cut(architecture, even_cuts(len(layers), n))
    optimizer = Optimizer("sgd", {"lr": 0.1, "momentum": 0.9})
    expected = evaluate(training, optimizer, learner.lags.forward, 4, None, learner.lags.backward)
    stack = Stack([make(twice=name == "pipemare")], learner, Update(), 4)
    for step in range(4):
        pairs = [training.data(step, i) for i in range(m)]
        x, y = (torch.cat(each)[None] for each in zip(*pairs, strict=True))
        step_together([stack], x, y, torch.tensor([0.1], dtype=torch.float64))
    found = torch.cat([flatten(own[0] for own in stage.values()) for stage in stack.kept])
    assert torch.allclose(found, torch.cat(expected), rtol=0, atol=1e-12)


def test_runs_that_are_stacked_are_those_one_by_one() -> None:
    """Of a residual network with its large stem, in float64."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 2, 3, 64, 64, dtype=torch.float64), torch.randint(5, (2, 2))
    runs = [nn.Sequential(*make_stages("resnet18", images(64), SIZES, 2, seed, torch.float64)) for seed in range(2)]

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return label_loss(functional_call(runs[0], parameters, (x,)), y)

    own = [{name: value.detach() for name, value in run.named_parameters()} for run in runs]
    gradients, losses = vmap(grad_and_value(loss))(
        {name: torch.stack([each[name] for each in own]) for name in own[0]}, x, y
    )
    for r, run in enumerate(runs):
        value = label_loss(run(x[r]), y[r])
        value.backward()
        assert torch.allclose(losses[r], value, rtol=1e-10)
        for name, parameter in run.named_parameters():
            assert torch.allclose(gradients[name][r], parameter.grad, rtol=0, atol=1e-10), name


# Batch norm


def with_torchs_norms(model: nn.Module) -> nn.Module:
    """A copy that has torch's batch norms, which average their statistics over all batches."""
    model = copy.deepcopy(model)
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, BatchNorm):
                theirs = nn.BatchNorm2d(len(child.weight), momentum=None, dtype=torch.float64)
                theirs.load_state_dict({"weight": child.weight, "bias": child.bias}, strict=False)
                setattr(module, name, theirs)
    return model


def averages(batches: Iterator[list[tuple[Tensor, Tensor]]]) -> list[tuple[Tensor, Tensor]]:
    """The mean of each tensor over all batches."""
    return [
        (torch.stack([mean for mean, _ in one]).mean(0), torch.stack([variance for _, variance in one]).mean(0))
        for one in zip(*batches, strict=True)
    ]


@pytest.mark.parametrize(("network", "side"), [("conv", 8), ("resnet18", 8)])
def test_tests_take_the_statistics_of_the_training_set(network: str, side: int) -> None:
    """As torch's own layers do behind `torch.optim.swa_utils.update_bn` and `eval`, for two runs at once."""
    torch.manual_seed(0)
    runs = [
        nn.Sequential(*make_stages(network, images(side), SIZES, 2, seed, torch.float64, batch_norm=True))
        for seed in range(2)
    ]
    for parameter in (own for run in runs for own in run.parameters() if own.dim() == 1):
        nn.init.normal_(parameter, 1, 0.2)
    batches = [
        torch.randn(size, 3, side, side, dtype=torch.float64) + shift for size, shift in ((6, 0), (6, 1), (4, 2))
    ]
    tested = torch.randn(3, 3, side, side, dtype=torch.float64)
    own = {
        name: torch.stack([dict(run.named_parameters())[name].detach() for run in runs])
        for name, _ in runs[0].named_parameters()
    }

    def collect(parameters: dict[str, Tensor], x: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        with collecting() as found:
            scores = functional_call(runs[0], parameters, (x,))
        return scores, found

    def score(parameters: dict[str, Tensor], statistics: list[tuple[Tensor, Tensor]]) -> Tensor:
        with using(statistics):
            return functional_call(runs[0], parameters, (tested,))

    collected = [vmap(collect, in_dims=(0, None))(own, x) for x in batches]
    found = vmap(score)(own, averages(each for _, each in collected))
    for r, run in enumerate(runs):
        theirs = with_torchs_norms(run)
        for k, x in enumerate(batches):
            assert torch.allclose(collected[k][0][r], theirs(x), rtol=0, atol=1e-10)
        assert torch.allclose(found[r], theirs.eval()(tested), rtol=0, atol=1e-10)
        assert (run(tested) - theirs(tested)).abs().max() > 1e-3  # which are of the batch without `using`
    assert has_statistics(runs)
    assert not has_statistics(make_stages(network, images(side), SIZES, 2, 0, torch.float64))


# Stages


def test_trainings_take_them_before_each_test() -> None:
    """The loss in the test is that of torch's batch norms, which have seen micro-batches of all samples."""
    x, labels = torch.randn(48, 3, 8, 8, dtype=torch.float64), torch.randint(5, (48,))
    data = images(8)._replace(train=Tensors(x[:40], labels[:40]), test=Tensors(x[40:], labels[40:]))
    course = Course("conv", SIZES, 2, batch_norm=True, seeds=2, epochs=2, batch=8, dtype=torch.float64)
    trained = Trained([read_learner("multi-cdp", 2, {})], course, data, 2, [(0.05, 0), (0.05, 1)])
    (curves,) = trained.curves(int, None, "")
    for r, curve in enumerate(curves):
        model = nn.Sequential(*make_stages("conv", data, SIZES, 2, r, torch.float64, batch_norm=True))
        theta = {f"{j}.{name}": own[r] for j, stage in enumerate(trained.stacks[0].kept) for name, own in stage.items()}
        model.load_state_dict(theta)
        theirs = with_torchs_norms(model)
        with torch.no_grad():
            for part in x[:40].split(4):
                theirs(part)
            expected = label_loss(theirs.eval()(x[40:]), labels[40:])
        assert curve.test_loss[-1] == pytest.approx(float(expected), abs=1e-10)


def layer_flops(layers: list[nn.Module], x: Tensor) -> list[int]:
    """The FLOP of each layer in forward and backward, as torch counts them."""
    counts = []
    for k, layer in enumerate(layers):
        x = x.detach().requires_grad_(k > 0)
        with FlopCounterMode(display=False) as counter:
            x = layer(x)
            x.sum().backward()
        counts.append(counter.get_total_flops())
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(("network", "n"), [("conv", 3), ("resnet18", 4), ("conv", 1)])
def test_stages_may_be_of_like_work(network: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other cuts have a largest stage with less, of all there are; they are found once, and change no parameter."""
    monkeypatch.setattr(networks, "_found_cuts", {})
    data = images(8)
    stages, again = (make_stages(network, data, SIZES, n, seed, torch.float32, cut="flops") for seed in (0, 1))
    layers = [layer for stage in stages for layer in stage]
    assert [*map(len, again)] == [*map(len, stages)] and len(networks._found_cuts) == 1
    sums = np.cumsum([0, *layer_flops(layers, torch.randn(2, *data.shape))])
    every = [(0, *cuts, len(layers)) for cuts in combinations(range(1, len(layers)), n - 1)]
    least = min(max(sums[end] - sums[first] for first, end in pairwise(cuts)) for cuts in every)
    ends = np.cumsum([0, *map(len, stages)])
    assert np.diff(sums[ends]).max() == least
    even = [layer for stage in make_stages(network, data, SIZES, n, 0, torch.float32) for layer in stage]
    assert torch.equal(*(flatten(nn.Sequential(*each).parameters()) for each in (layers, even)))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("network", "data", "more", "problem"),
    [
        ("mlp", images(8), {}, "network: mlp takes vectors, which images of 8 has not; leave it out"),
        ("conv", VECTORS, {}, "network: conv takes images, which vectors has not; leave it out"),
        ("resnet18", DIGITS, {}, "network: resnet18 takes images, which vectors has not; leave it out"),
        ("conv", TOKENS, {}, "network: conv takes images, which tokens has not; leave it out"),
        ("conv", DIGITS, {"cut": "flop"}, "cut: unknown cut 'flop'; did you mean 'flops'?"),
        ("conv", DIGITS, {"n": 9}, "n=9: must be at least 1 and at most 8, the number of the model's layers"),
        ("mlp", DIGITS, {"batch_norm": True}, "batch-norm: mlp has layer norms or none; leave it out, or "),
    ],
)
def test_what_does_not_fit_is_refused(network: str, data: Data, more: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError) as error:
        make_stages(network, data, SIZES, more.pop("n", 2), 0, torch.float32, **more)
    assert str(error.value).startswith(problem)


def test_each_kind_of_data_has_a_usual_network() -> None:
    assert [usual_network(data) for data in (images(8), DIGITS, TOKENS)] == ["conv", "mlp", "transformer"]


def test_a_convolutional_network_learns_digits() -> None:
    """More than seven of ten in two epochs."""
    pytest.importorskip("sklearn")
    data, course = load_data("digits"), Course("conv", Sizes(5, 16), 2, seeds=1, epochs=2)
    (curve,) = train_all([read_learner("multi-cdp", 2, {})], course, data, 2)
    assert curve.accuracy[-1] > 0.7
