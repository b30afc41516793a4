"""What the package prints, before a change and after it: `python -m tests.records REVISION`.

A change to how the package is built must not change what it says. 80 requests, 20 plans and 3 sweeps run through the
command line of the given revision of git and of the files here, and the outputs are compared: byte by byte, then figure
by figure where only a format differs. Of plans only the rows count. The exit code is 1 if a figure differs.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cdpsim.schedules import SCHEDULES

ROOT = Path(__file__).parents[1]
Output = dict[str, str]  # the text of each stream and file that a command writes

GPT2 = "--model gpt2 --cluster h100-node"
TOY = "--model toy.toml --cluster box.toml"
LLAMA = "--model llama3-8b --cluster a100-nodes --ignore-memory"
SHAPES = {
    "dualpipe": "-n 4 -m 8",
    "interleaved-zero-bubble": "-n 8 -m 4",
    "zbv": "-n 8 -m 4",
    "chimera": "-n 4 -m 4",
    "gems": "-n 4 -m 4",
}
REQUESTS = [
    *(f"simulate {name} {SHAPES.get(name, '-n 4')} --steps 2 -o OUT" for name in SCHEDULES),
    "simulate dp -n 4 -m 2 --replicas 4 --buckets 2MB:4MB --model gpt2 --cluster h100-node -o OUT",
    *(f"simulate dp -m 2 --shard 4 --zero {zero} {GPT2} --steps 2 -o OUT" for zero in (1, 2, 3)),
    f"simulate dp -m 2 --shard 4 --zero 3 --reshard 2 --prefetch 2 {GPT2} --steps 2 -o OUT",
    f"simulate dp -m 2 --shard 2 --zero 2 --replicas 2 --clip --gather step {GPT2} --steps 2 -o OUT",
    f"simulate dp -m 2 --shard 2 --zero 1 --update-time memory --padding megatron {GPT2} -o OUT",
    f"simulate interleaved-1f1b -n 8 -m 8 --chunks 2 --replicas 2 --reduce last {GPT2} -o OUT",
    f"simulate 1f1b -n 4 -m 8 --shard 2 --zero 2 --reduce each {GPT2} -o OUT",
    f"simulate 1f1b -n 4 -m 8 --recompute layer --runtime torch {GPT2} -o OUT",
    f"simulate 1f1b -m 8 --rendezvous megatron {TOY} -o OUT",
    f"simulate 1f1b -m 8 --rendezvous torch {TOY} -o OUT",
    f"simulate interleaved-1f1b -n 8 -m 8 --chunks 2 --offload activations {GPT2} -o OUT",
    f"simulate zb-h1 -n 4 -m 8 --jitter lognormal:0.1 --seed 3 {LLAMA} -o OUT",
    f"simulate 1f1b -n 4 -m 8 --slow 1:2 --stop '2:0.1 s:0.2 s' {GPT2} -o OUT",
    f"simulate dp -m 2 --replicas 8 --expand-collectives --collective ring {GPT2} -o OUT",
    f"simulate dp -m 1 --replicas 8 --contention fair --collective tree --steps 1 {GPT2} -o OUT",
    f"simulate zero-dp -n 4 --prefetch 1 {GPT2} -o OUT",
    f"simulate multi-cdp -n 4 --rule cdp-v1 --gradients fp32 {GPT2} -o OUT",
    f"simulate pipedream -n 4 --rule vertical-sync {GPT2} -o OUT",
    f"simulate acco -n 1 -m 2 --replicas 4 --optimizer sgd {GPT2} -o OUT",
    f"simulate diloco -n 1 --replicas 4 --local-steps 3 --outer nesterov:0.7:0.9 {GPT2} -o OUT",
    "simulate 1f1b -n 4 -m 8 --engine simpy --check",
    "compare -n 4",
    "compare -n 4 --format json",
    f"compare --devices 8 --batch 64 {GPT2} --format json",
    "compare dp --zero 0,1,2,3 --shard 8 -m 4 --model llama3-8b --cluster h100-node --format csv",
    f"compare 1f1b gpipe --recompute none,full --devices 8 --batch 64 {GPT2} --columns all",
    f"compare 1f1b zb-h1 -n 4 -m 100000 {GPT2} --format json",
    "table1 -n 4",
    "table1 -n 6 --paper acco",
    "pyramid mp-cdp -n 5",
    f"breakeven multi-cdp -n 4 {GPT2}",
    "rounds acco -n 1 --replicas 2 --slow 1:2 --steps 3 --format csv",
    "timeline 1f1b -n 4 -m 8 -o OUT/t.svg",
    "timeline pp-cdp -n 4 -o OUT/t.html",
    f"timeline dp -m 2 --shard 4 --zero 3 {GPT2} -o OUT/t.json",
    "timeline zb-h1 -n 4 -m 4 -o OUT/t.csv",
    f"plot memory 1f1b zb-h1 -n 4 -m 8 {GPT2} -o OUT/p.svg",
    f"plot traffic zero-dp -n 4 {GPT2} -o OUT/p.svg",
    "plot versions pipedream -n 4 -o OUT/p.svg",
    "snapshot multi-cdp -n 4 --slot 9 -o OUT/s.svg",
    "figure 2 -n 3 -o OUT/f.svg",
    "superpose vit-b16 -n 4",
    "schedules --format json",
    "models llama3-8b",
    "clusters a100-nodes",
    "simulate 1f1b -n 4 --zero 1 --rule cdp-v1",
    "compare 1f1b multi-cdp -n 4 --chunks 2 --prefetch 1",
]
PLANS = [
    "--devices 8 --batch 16",
    "--devices 8 --batch 16 --memory 8",
    "--devices 4 --batch 8 --schedules 1f1b,zb-h1,zb-h2 --staleness 0",
    "--devices 8 --batch 16 --objective memory --top 3",
    *(f"--devices {d} --batch {b} {GPT2}" for d, b in ((2, 16), (4, 64), (8, 64))),
    f"--devices 8 --batch 64 {GPT2} --fewer",
    f"--devices 8 --batch 64 {GPT2} --objective memory",
    f"--devices 8 --batch 64 {GPT2} --staleness 0 --recompute none,layer,full",
    f"--devices 8 --batch 64 {GPT2} --schedules dp --zero 0,1,2,3 --buckets none,torch",
    f"--devices 8 --batch 64 {GPT2} --schedules 1f1b,interleaved-1f1b --offload none,optimizer",
    f"--devices 8 --batch 64 {GPT2} --schedules 1f1b,zb-h1 --reduce end,last",
    f"--devices 8 --batch 64 {GPT2} --schedules dp,1f1b --reduce end,last,each",
    f"--devices 8 --batch 64 {GPT2} --schedules 1f1b --rendezvous megatron,torch",
    f"--devices 8 --batch 64 {GPT2} --schedules dp --update-time memory --update-in lane,stream",
    "--devices 8 --batch 64 --model vit-b16 --cluster h100-node --staleness 0",
    "--devices 8 --batch 64 --model llama2-7b --cluster h100-node --staleness 0",
    "--devices 16 --batch 64 --model llama3-8b --cluster a100-nodes --schedules 1f1b,dp,zb-h1",
    "--devices 16 --batch 128 --model gpt2 --cluster a100-nodes --schedules multi-cdp,pp-cdp,zero-cdp,dp",
]
FILES = {
    "toy.toml": (
        '[[stages]]\nrepeat = 4\nforward = "1 ms"\nbackward = "2 ms"\nactivation = "9 MB"\nboundary = "4 MB"\n'
        'parameters = "20 MB"\n'
    ),
    "box.toml": '[devices]\ncount = 16\noverlap = "none"\n[link]\nlatency = "5 us"\nbandwidth = "10 GB/s"\n',
}
SWEEPS = {
    "slots": '[fixed]\nn = 4\n[axes]\nschedule = ["1f1b", "gpipe", "multi-cdp", "zb-h1"]\nm = [4, 8, 12]\n',
    "model": (
        '[fixed]\nmodel = "gpt2"\ncluster = "h100-node"\nn = 4\n[axes]\nschedule = ["1f1b", "dp"]\nm = [4, 8]\n'
        '"cluster.topology.link.bandwidth" = { from = "1 GB/s", to = "100 GB/s", count = 3, spacing = "log" }\n'
    ),
    "plan": (
        'what = "plan"\n[fixed]\nmodel = "gpt2"\ncluster = "h100-node"\n[axes]\ndevices = [2, 4]\nbatch = [16, 32]\n'
    ),
}


def commands() -> Iterator[tuple[str, str]]:
    """Yield the name and the arguments of each command."""
    yield from ((request, request) for request in REQUESTS)
    yield from ((f"plan {plan}", f"plan {plan} --format json") for plan in PLANS)
    yield from ((f"sweep {name}", name) for name in SWEEPS)


def outputs_of(arguments: str, package: Path) -> Output:
    """Run one command with the package of a folder; return what it prints and writes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        lines = [arguments.replace("OUT", "out")]
        for name, text in {**FILES, "sweep.toml": SWEEPS.get(arguments, "")}.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        if arguments in SWEEPS:
            lines = ["sweep sweep.toml -o study --workers 1", "sweep table study -o table.csv"]
        elif "OUT/" in arguments:
            out.mkdir()
        environment = os.environ | {"PYTHONPATH": str(package), "COLUMNS": "100"}
        said: Output = {}
        for line in lines:
            call = [sys.executable, "-m", "cdpsim", *shlex.split(line)]
            done = subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            said = {"exit code": str(done.returncode), "stdout": done.stdout, "stderr": done.stderr}
        files = sorted(path for path in (*out.rglob("*"), Path(folder, "table.csv")) if path.is_file())
        return said | {path.name: path.read_text(encoding="utf-8", errors="replace") for path in files}


def metrics(text: str) -> Any:
    """Return the content of JSON, without what tells versions apart, the request and a plan's counts; else the text."""
    try:
        content = json.loads(text)
    except ValueError:
        return text
    for name in ("cdpsim", "request", "counts", "searched", "status", "version"):
        if isinstance(content, dict):
            content.pop(name, None)
    return content


def difference(name: str, before: Output, after: Output) -> str:
    """Return in which metrics, or where else, the outputs of a command differ; "" if they do not."""
    found = []
    for each in sorted(before.keys() | after.keys()):
        old, new = before.get(each, ""), after.get(each, "")
        if old != new and metrics(old) != metrics(new):
            pairs = zip([*old.splitlines(), ""], [*new.splitlines(), ""], strict=False)
            lines = next(((a, b) for a, b in pairs if a != b), ("its end", "more"))
            found.append(f"  {each}:\n    - {lines[0][:300]}\n    + {lines[1][:300]}")
    return "\n".join([name, *found]) if found else ""


def main() -> int:
    """Compare all outputs of a revision with those of the files here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="a commit, a branch or a tag")
    parser.add_argument("--only", default="", help="commands that contain this text")
    parser.add_argument("--jobs", type=int, default=2, help="commands at once")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", args.revision, "cdpsim"], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        chosen = [(name, each) for name, each in commands() if args.only in name]
        with ThreadPoolExecutor(args.jobs) as pool:
            before = pool.map(lambda each: outputs_of(each[1], Path(folder)), chosen)
            after = pool.map(lambda each: outputs_of(each[1], ROOT), chosen)
            pairs = zip(chosen, before, after, strict=True)
            found = [text for (name, _), old, new in pairs if (text := difference(name, old, new))]
    print(*found, f"{len(chosen)} commands, {len(found)} differ", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
