"""Models of Hugging Face, trained by their own code on a GPU, beside the memory that `profile` finds for them.

    python -m validation.profile.hugging_face measure FILE.json    # on a GPU: writes what its allocator was asked for
    python -m validation.profile.hugging_face validation/results/hugging-face-cuda-2026-11-26.json

Forward, loss and backward are those of transformers, the update is torch's AdamW, and nothing of cdpsim runs. What is
compared is the peak of a step beyond what is there before it, activations, temporaries and gradients, and what the
allocator has reserved in the end. A profile is of fake tensors, needs no GPU, and knows nothing of the measurement.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch

from cdpsim import RequestError
from cdpsim.cli.console import exit_code_of, write_stdout
from cdpsim.files import writing as files
from cdpsim.files.tables import as_text

from ..report.environment import environment
from ..report.schema import read_as
from ..training.modules import require
from .allocations import allocator_count
from .caching import MIB
from .command import profile
from .whole import WholeStep

STEPS_TRAINED = 8  # of which the first two make the optimizer's state and warm up
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
MEDIUM = GPT2 | {"n_embd": 1024, "n_layer": 24, "n_head": 16}
LLAMA = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 16}
LLAMA |= {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000}
LLAMA |= {"max_position_embeddings": 2048, "tie_word_embeddings": False}
# A profile runs models without dropout, and none keeps keys and values for later.
AS_PROFILED = {"use_cache": False} | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


class HuggingFaceStep(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes that a GPU's allocator was asked for in a training step, and its time."""

    name: str
    config: dict[str, Any]
    batch: int
    length: int
    dtype: str
    autocast: bool
    parameters: int  # numbers
    before: int  # parameters, the optimizer's state and what libraries keep for good
    after_forward: int
    peak: int
    allocated_peak: int  # in blocks of the allocator
    reserved: int
    seconds: float  # the median

    @property
    def activations(self) -> int:
        """The peak beyond what is there before the step."""
        return self.peak - self.before


class HuggingFaceSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of one machine."""

    environment: dict[str, Any]
    steps: list[HuggingFaceStep]


def measure_step(
    name: str, config: dict[str, Any], *, batch: int, length: int, dtype: str = "float32", autocast: bool = False
) -> HuggingFaceStep:
    """Train a model for some steps on the first GPU, and return the last one's bytes."""
    transformers: Any = require("transformers")
    own = {key: value for key, value in config.items() if key != "model_type"}
    form = transformers.AutoConfig.for_model(config["model_type"], **own, **AS_PROFILED)
    device = torch.device("cuda", 0)
    model = transformers.AutoModelForCausalLM.from_config(form).to(device, getattr(torch, dtype)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    before = after_forward = 0
    seconds, peaks = [], {"requested_bytes": 0, "allocated_bytes": 0, "reserved_bytes": 0}
    for _ in range(STEPS_TRAINED):
        ids = torch.randint(0, config["vocab_size"], (batch, length), device=device)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before, begun = allocator_count(device, "requested_bytes", "current"), time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        after_forward = allocator_count(device, "requested_bytes", "current")
        loss.backward()
        peaks = {kind: allocator_count(device, kind, "peak") for kind in peaks}
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
        del loss
    return HuggingFaceStep(
        name=name,
        config=config,
        batch=batch,
        length=length,
        dtype=dtype,
        autocast=autocast,
        parameters=sum(each.numel() for each in model.parameters()),
        before=before,
        after_forward=after_forward,
        peak=peaks["requested_bytes"],
        allocated_peak=peaks["allocated_bytes"],
        reserved=peaks["reserved_bytes"],
        seconds=statistics.median(seconds[2:]),
    )


def measure_steps() -> HuggingFaceSteps:
    """Measure all steps on this machine."""
    if not torch.cuda.is_available():
        raise RequestError("measure", "needs a GPU that torch can use, and there is none")
    return HuggingFaceSteps(
        environment=environment("cuda"),
        steps=[
            measure_step("gpt2", GPT2, batch=8, length=1024),
            measure_step("gpt2", GPT2, batch=8, length=1024, autocast=True),
            measure_step("gpt2", GPT2, batch=8, length=1024, dtype="bfloat16"),
            measure_step("gpt2-medium", MEDIUM, batch=8, length=1024, dtype="bfloat16"),
            measure_step("llama, 0.9 B", LLAMA, batch=4, length=2048, dtype="bfloat16"),
        ],
    )


def predict_step(step: HuggingFaceStep) -> WholeStep:
    """Profile the model of a step."""
    given: dict[str, Any] = {name: getattr(step, name) for name in ("batch", "length", "dtype")}
    given |= {"autocast": "bf16" if step.autocast else None, "float32_loss": True, "optimizer": "adamw"}
    with TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(step.config), encoding="utf-8")
        return profile(str(path), 1, **given).run_whole()


def load_steps(path: str) -> HuggingFaceSteps:
    """Read a file of measured steps."""
    return read_as(HuggingFaceSteps, path, "file of measured steps", "give one")


def describe_steps(found: HuggingFaceSteps) -> str:
    """Return a table of all steps."""
    header = ["model", "samples", "type", "parameters", "peak, B", "predicted, B", "error"]
    header += ["reserved, MiB", "predicted", "error", "step, ms"]
    rows = []
    for step, own in ((step, predict_step(step)) for step in found.steps):
        row = [step.name, f"{step.batch} × {step.length}", f"{step.dtype}{', autocast' * step.autocast}"]
        row.append(f"{step.parameters:,}")
        pairs = [(step.activations, own.peak_activations), (step.reserved // MIB, own.reserved // MIB)]
        for measured, predicted in pairs:
            row += [f"{measured:,}", f"{predicted:,}", f"{100 * (predicted / measured - 1):+.2g} %"]
        rows.append([*row, f"{1e3 * step.seconds:.1f}"])
    return as_text(header, rows)


def measure_or_compare(arguments: list[str]) -> int:
    """Measure into a file, or print the comparison of one, and return the exit code."""
    if len(arguments) == 2 and arguments[0] == "measure":
        files.check_writable(arguments[1])
        files.write_file(arguments[1], [msgspec.json.format(msgspec.json.encode(measure_steps()), indent=1), "\n"])
        return 0
    if len(arguments) != 1:
        raise RequestError("FILE", "give `measure FILE.json`, or one file of measured steps")
    write_stdout(describe_steps(load_steps(arguments[0])))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(measure_or_compare))
