"""The examples that help shows, and of each what it prints, draws or writes; and the files that they read.

An expectation is said by a reckoning that stands beside it, a paper or a data sheet, or names what is drawn; "…" stands
for any text. Its words are sought in the output, then the notes, then the words of the files, by their names.
"""

import re
from collections.abc import Iterator
from pathlib import Path

# gpt2 of 8 samples on an A100: products of 6.07 TFLOP / (0.74 * 312 TFLOPS) = 26.3 ms, a causal core of 0.54 TFLOP at
# 312 TFLOPS = 1.7 ms, and passes over memory: 39.94 ms in all, so 200 samples/s and 1602 on eight.
# toy.toml: 8 stages of 10 ms + 20 ms, so 240 ms for a micro-batch. A program of three steps has 3 (2 n m) passes, and
# as many updates as stages have devices: pipelines of 8 stages 384 + 24 tasks, multi-dp 384 + 24 * 8.
EXAMPLES = {
    "schedules": "mp-cdp cyclic pyramid cdp-v2",
    "models": "gpt2 14 bf16 … 124.4 M 248.9 MB",  # its parameters, of two bytes
    "models gpt2": "layers = 12 width = 768",  # by Radford et al. 2019, table 2
    "clusters": "a100-nodes any 80 GB 19.5 19.5 156 312 312",  # by NVIDIA's data sheet
    "clusters a100-nodes": 'bf16 = "312 TFLOPS"',
    "clusters --format json": '"bf16": 312000000000000.0',
    "completion bash": "' 0') known='schedules models … complete -F _cdpsim cdpsim",
    "completion zsh": "' 0') known='schedules models … compdef _cdpsim cdpsim",
    # simulate
    "simulate 1f1b -n 4 -m 8": "bubble 27.3 %",  # (n - 1) / (m + n - 1) = 3 / 11
    "simulate mp-cdp -n 4 -o traces": '"devices": 10, "tasks": 108,',  # n (n + 1) / 2; 3 (32 + 4)
    "simulate multi-cdp -n 8 --model gpt2 --cluster a100-nodes --recompute layer": (
        "multi-cdp: 8 stages, 8 micro-batches, 8 devices; gpt2 … staleness 0.4375"  # (n - 1) / 2n
    ),
    "simulate acco --replicas 8 --model gpt2 --cluster a100-nodes": (
        "step time 79.88 ms, certified; 1602 samples per second"  # two rounds, which hide all messages
    ),
    "simulate dp --zero 3 --replicas 8 -m 4 --model gpt2 --cluster h100-node": (
        "dp --zero 3: 14 stages, 4 micro-batches, 8 devices; gpt2 … staleness 0,"
    ),
    "simulate experiment.toml -o traces": (
        '"schedule": "multi-cdp", "n": 8, … "model": "gpt2", "cluster": "a100-nodes" … "tasks": 408,'
    ),
    "simulate --from traces/summary.json --prefetch 1 -o earlier": (
        '"prefetch": 1, … "period": 0.03994 … "bubble": 0.0,'  # parameters that come earlier are not waited for
    ),
    "simulate pp-cdp -n 4 --rule cdp-v1 --steps 5 -o traces --force": (
        '"rule": "cdp-v1", … "tasks": 180, … "mean_staleness": 1.0,'  # 5 (32 + 4); v1 is one step old
    ),
    "simulate multi-cdp --model toy.toml --cluster box.toml -o traces": '"tasks": 408, … "mean_staleness": 0.4375,',
    "simulate multi-dp --model toy.toml --cluster box.toml -o dp --collective best": (
        '"collective": "best", … "tasks": 576, "messages": 24,'  # an all-reduce of each stage and step
    ),
    "simulate zero-dp --model toy.toml --cluster box.toml -o zero --expand-collectives": (
        '"messages": 504,'  # two gathers and a reduction of 24 stages, each by 7 messages between 8 devices
    ),
    "simulate multi-dp --model toy.toml --cluster box.toml -o shared --contention fair": (
        '"contention": "fair", … "messages": 576,'  # recursive doubling: 24 sums, of 3 rounds of 8 messages
    ),
    "simulate pp-cdp -n 4 --model toy.toml --recompute sqrt -o less": '"recomputed": "20 ms"',  # both layers
    "simulate 1f1b -n 4 --model toy.toml --recompute layers:1 -o first": '"recomputed": "10 ms"',
    "simulate 1f1b --model gpt2 --cluster a100-nodes --recompute layer+head -o short": '"recompute": "layer+head"',
    # Of 8,192 tokens 12 layers keep x, q, v, o and up, 2 * 6,144 + 48 B, and the embedding 776. At the peak the head
    # has x, y and probabilities, 204,108 B of a token, and the gradients of logits and y, 102,050.
    "simulate dp --model gpt2 --cluster selene --recompute selective:products/2+core": (
        "activations up to 3.727 GB"  # 8,192 * (12 * 12,336 + 776 + 204,108 + 102,050)
    ),
    # Of 4 layers and 8 micro-batches, 186,760 B of each of 8,192 tokens and an output; and the working memory.
    "simulate 1f1b -n 8 --model llama2-7b --cluster h100-node --runtime transformers": (
        "activations up to 49.99 GB"  # 32 * 1.5299 + 8 * 0.0671 + 0.4278 + 0.0682 of workspaces
    ),
    "simulate 1f1b --model gpt2 --cluster a100-nodes --gradients fp32 -o wide": (
        '"gradients": 157535232,'  # four bytes of each number of both embeddings: (50,257 + 1,024) * 768
    ),
    "simulate 1f1b --model gpt2 --cluster a100-nodes --update-time memory -o updates": (
        '"update_time": "memory" … "tasks": 1218,'  # 3 (2 * 14 * 14 + 14)
    ),
    "simulate ddp --replicas 4 --buckets 1MiB,25MiB --model gpt2 --cluster h100-node": (
        "dp: 14 stages, 1 micro-batch, 4 devices; gpt2 … staleness 0,"
    ),
    "simulate fsdp --shard 4 --replicas 2 --model gpt2 --cluster a100-nodes": (
        "dp --zero 3: 14 stages, 1 micro-batch, 8 devices; gpt2 … staleness 0,"
    ),
    "simulate diloco --replicas 8 --local-steps 50 --model gpt2 --cluster a100-nodes": (
        "step time 1.999 s, … messages 1 a step"  # 50 * 39.94 ms, and an all-reduce
    ),
    "simulate 1f1b -n 4 --zero 1 --replicas 2 --model gpt2 --cluster h100-node": (
        "1f1b --zero 1: 4 stages, 4 micro-batches, 8 devices; gpt2 … staleness 0,"
    ),
    "simulate 1f1b -n 4 --tensor 2 --sequence --model llama2-13b --cluster a100-nodes": (
        "exchanges 1636 a step in groups of 2 ranks"  # 4 (40 * 10 + 2 + 6): layers, embedding, head; 4 of norms
    ),
    "simulate dp -m 2 --context 8 --zero 1 --model llama3-8b --cluster h100-node": (
        "exchanges 384 a step in groups of 8 ranks"  # 2 * 32 * 6: keys and values, two times three
    ),
    "simulate dp -m 2 --shard 16 --expert 8 --model qwen3-30b-a3b --cluster h100-nodes": (
        "exchanges 6144 a step among ranks that share experts"  # 16 * 2 * 48 * 4: there and back, two times
    ),
    "simulate multi-dp -n 4 --slow 3:4 -o slow": '"slow": [ "3:4" ], … "period": 32,',  # 4 times 2n slots
    "simulate multi-dp --model toy.toml --jitter lognormal:0.1 --runs 1000 -o runs": (
        'run,makespan,period 0,0. … 999,0. … "jitter": "lognormal:0.1"'
    ),
    "simulate pp-cdp --model toy.toml --cluster h100-node --offload activations -o off": '"offloaded": "1.5 GB"',
    "simulate 1f1b --model toy.toml --cluster box.toml --runtime torch -o torch": (
        '"runtime": { "like": "torch" } … "tasks": 408,'
    ),
    # compare
    "compare -n 8": "mp-cdp 36 … left out because of m: dualpipe",  # n (n + 1) / 2
    "compare 1f1b zb-h1 -n 8 --model gpt2 --cluster a100-nodes": "zb-h1 8 … 1f1b 8 … gpt2, adam, mixed precision",
    "compare --devices 8 --batch 256 --model llama2-7b --cluster a100-nodes": (
        "8 devices, 256 samples in a training step … 74.7 % 0.0 %"  # of products 74 %; a core does half of what MFU has
    ),
    "compare dp --zero 0,1,2,3 --shard 8 -m 4 --model llama3-8b --cluster h100-node": (
        "dp 0 8 … no 0 … dp 3 8 … yes 0 … llama3-8b"  # 16 bytes of 8.03 G parameters are more than 80 GB
    ),
    "compare 1f1b interleaved-1f1b --devices 4 --batch 32 --chunks 1,2": (
        "interleaved-1f1b 2 4 … 4.5 % … 1f1b 1 4 … 8.6 %"  # 3 / (2 * 32 + 3) and 3 / (32 + 3)
    ),
    "compare pipedream pipedream-2bw pipemare pp-cdp -n 4": (
        "pipedream+ 4 … yes 1.5 … pipedream-2bw 4 … yes 1 … pp-cdp 4 … yes 0.375"  # (n - 1) / 2; 1; (n - 1) / 2n
    ),
    "compare multi-dp multi-cdp mp-cdp -n 8 --sort memory -o compared.svg": (
        "mp-cdp 36 0.5 0.0139 77.8 % … multi-cdp 8 … Schedules side by side; n = 8, m = 8"  # 1 - 8 / 36 waits
    ),
    "compare -n 8 -m 16 --chunks 2 --within 12 -o bubble.svg": (
        "zb-h1 8 … 12.7 % … Schedules side by side; n = 8, m = 16"  # 7 / (3 * 16 + 7)
    ),
    "compare 1f1b mine.csv -n 4 -m 8": "1f1b 4 0.3636 0.0909 27.3 % … mine.csv 4 0.3636 0.0909 27.3 %",  # 8 / 22
    "compare dp --replicas 8 --compress none,topk:0.01 --model gpt2 --cluster pcie-box": ("dp topk:0.01 8 … dp none 8"),
    "compare 1f1b --devices 8 -m 8 --tensor 1,4 --model llama2-13b --cluster selene": (
        "1f1b 4 8 … 1f1b 1 8 … of 2 stages … of 8 stages"
    ),
    "compare --model toy.toml --cluster box.toml --format latex": "single-dp & 1 & 4.167 /s &",  # 1 / 0.24 s
    "compare multi-dp pp-cdp --model toy.toml --jitter exponential:0.2 --runs 99": (
        "step 5% step 50% step 95% … multi-dp 8 … pp-cdp 8"
    ),
    # plan: which rows are the best is held against simulations of all candidates in tests/studies/test_plan.py
    "plan --devices 8 --batch 64 --model gpt2 --cluster a100-nodes": (
        "8 ranks, 64 samples … proved: no synchronous candidate is better than row 1; … row 1: cdpsim compare"
    ),
    "plan --model llama3-8b --cluster a100-nodes --devices 16 --batch 64 --seconds 5": (
        "16 ranks, 64 samples in a training step … candidates:"
    ),
    "plan --model llama2-13b --cluster selene --devices 8 --batch 8 -m 8 --tensor 4,8": (
        "8 ranks, 8 samples … proved: … row 1: cdpsim compare … --tensor 4"
    ),
    "plan --devices 8 --batch 16 --memory 8": "at most 8 on a device … proved: … 1 gems 8 16",
    "plan --model gpt2 --cluster a100-nodes --devices 8 --batch 256 -o plan.svg": (
        "proved: … row 1: cdpsim compare … gpt2 on a100-nodes, 8 devices, batch 256: proved"
    ),
    "plan --devices 4 --batch 8 --schedules 1f1b,zb-h1,zb-h2 --staleness 0": (
        "1 zb-h2 4 8 24 … 2 zb-h1 4 8 27 … 3 1f1b 4 8 33"  # slots: 3 m, 3 m + n - 1, 3 (m + n - 1)
    ),
    "plan --devices 8 --batch 16 --objective memory --top 3 --format json": (
        '"proved": true, "objective": "memory", … "command": "cdpsim compare gems -n 8 -m 16'
    ),
    "plan --model gpt2 --cluster a100-nodes --devices 8 --batch 64 --fewer": (
        "at most 8 ranks, 64 samples in a training step … proved: … row 1: cdpsim compare"
    ),
    # sweep: 2 * 3 * 2 * 2 points without 4, in eight parts of two or three
    "sweep sweep.toml --dry-run": "1f1b 2 12.5 GB/s 16 2 … 20 points, 0 of them done",
    "sweep sweep.toml -o sweep": "20 done, 0 refused, 0 failed, 0 to do",
    "sweep status sweep": "points 20 done 20 refused 0 failed 0 to do 0",
    "sweep table sweep -o results.csv": "1f1b,2,12.5 GB/s,16,2, … zb-h1,8,50 GB/s,32,1,",
    "sweep sweep.toml -o sweep --part 3/8": "20 points, 3 here, … 3 done, 0 refused, 0 failed, 0 to do in part 3/8",
    "sweep sweep.toml -o sweep --workers 1 --limit 100": "20 done, 0 refused, 0 failed, 0 to do",
    "sweep retry sweep": "0 failures forgotten",
    # breakeven, mesh, pyramid, rounds, import-schedule
    "breakeven -n 8 --model gpt2 --cluster a100-nodes": "multi-dp dp 8 8 8 39.94 ms … mp-dp dp 8 8 64 39.94 ms",
    "breakeven multi-dp multi-cdp -n 4 8 --model toy.toml --cluster box.toml -o b.svg": (
        "multi-dp dp 4 4 4 240 ms … multi-cdp cdp-v2 8 8 8 240 ms … bandwidth from which on messages are hidden"
    ),
    "breakeven multi-cdp --model toy.toml --cluster box.toml --over bandwidth": (
        "factor bandwidth step exposed … multi-cdp cdp-v2 8 8 8"
    ),
    "breakeven multi-dp -n 1 -m 32 --model llama2-7b --cluster a100-nodes --share 4": (
        "multi-dp dp 1 32 32 1.62 s 3.403 s"  # 13.48 GB * (1.5 / 12 + 1.75 / 240) more: four nodes, eight devices each
    ),
    # groups of 2 ranks, of which nodes of 8 have the 4 data ranks of a place; 80 % of 300 GB/s
    "mesh -n 4 --tensor 2 --replicas 4 --model llama2-13b --cluster a100-nodes": (
        "tensor 2 16 0 1, … in a node, 240 GB/s, … replicas 4 8 0 2 4 6, … in a node, … place 4 8 0 8 16 24, … across"
    ),
    "mesh --expert 8 --shard 16 --model mixtral-8x7b --cluster h100-nodes -o who.svg": (
        "expert 8 2 0-7, … expert copies 2 8 0 8, … across nodes, … tokens for experts: 2 shares, 8 ranks each"
    ),
    # the paper's figures are in the files; 41.25 GB of 7.5 billion parameters on 4 ranks, of which it prints 41.3
    "published --only korthikanti-table-5": "22B, all recomputed step 1.42 s … step: mean 2.4 % of at most 3 %",
    "published --only zero-table-1 sc21-table-2": "7.5B, 4 ranks … 41.3 GB 41.25 GB … 174.6B, 384 GPUs step 81.6 s",
    "published --only simumax-b200 --format json -o b200.json": '"published": 843.0, … "holds": true',
    "pyramid -n 4": "all 10 10 10 10",
    "pyramid -n 8": "all 36 36 36 36",
    "pyramid mp-dp -n 4": "all 16 10 16 16",
    "pyramid --model toy.toml --steps 8 --format json": '"n": 8, "devices": 36, "bound": 36,',
    "rounds acco --replicas 8 --model gpt2 --cluster a100-nodes": "0-5 8 1 1 39.94 ms",
    "rounds acco -n 1 --replicas 4 --slow 3:4 --steps 500 -o rounds.csv": (
        "2-999 13 1 4 8 … round,device,micro_batches,posted,begun,ended 0,0,1,"  # 3 * 4 and 1, in 8 slots
    ),
    "import-schedule mine.csv": "n 4 m 8 … bubble 27.3 %",
    "import-schedule mine.csv --model gpt2 --cluster a100-nodes --replicas 2": "devices 8 … batch 128",  # 2 * 8 * 8
    # timeline, plot, snapshot
    "timeline pp-cdp -n 4 -o pp.html": "pp-cdp, n = 4, cdp-v2",
    "timeline 1f1b -n 4 -m 8 -o mine.csv": "0F0,0F1,0F2,0F3,0B0 … 3F0,3B0,3F1,3B1,3F2,3B2",  # torch's and PipeDream's
    "timeline mine.csv -o mine.svg": "mine.csv, n = 4, m = 8, dp",
    "timeline 1f1b gpipe zb-h1 -n 4 -m 8 -o pipelines.svg": "n = 4, m = 8, dp … 1f1b … gpipe … zb-h1",
    "timeline multi-dp --model toy.toml --cluster box.toml -o dp.html": "multi-dp, n = 8, dp, a model",
    "timeline multi-cdp -n 3 --title 'Cyclic' --for page -o cdp.pdf": "Cyclic",
    "timeline interleaved-1f1b -n 8 -m 8 --chunks 2 --colour stage -o i.png": "interleaved-1f1b, n = 8, chunks = 2, dp",
    "timeline 1f1b -m 8 --model gpt2 --cluster a100-nodes --links -o gpt2.svg": "1f1b, n = 14, m = 8, dp, gpt2",
    "timeline pp-cdp -n 4 --style gantt --dependencies -o pp.pdf": "pp-cdp, n = 4, cdp-v2",
    "timeline pp-cdp -n 4 --style gantt --stop 2:10:5 -o stopped.svg": "pp-cdp, n = 4, cdp-v2, device 2 stops",
    "timeline 1f1b zb-h1 -n 4 -m 8 -o two.html": "1f1b, n = 4, m = 8, dp and zb-h1, n = 4, m = 8, dp",
    "timeline traces -o traces.json": '"world_size": 8 … "title": "multi-cdp, n = 8, cdp-v2, gpt2',
    "plot memory multi-dp multi-cdp -n 8 -o memory.svg": (
        "multi-dp, dp: activations peak 8 at slot 7"  # all stages of a micro-batch, after all forwards
    ),
    "plot traffic mp-cdp -n 4 -o traffic.png": "mp-cdp, n = 4, cdp-v2",
    "plot versions pp-cdp -n 4 --rule cdp-v1 -o versions.pdf": "pp-cdp, n = 4, cdp-v1",
    "plot steps pp-cdp --model toy.toml --jitter lognormal:0.2 --runs 99 -o s.svg": "without chance 240 ms",
    "snapshot multi-cdp -n 8 -o busiest.svg": "multi-cdp, n = 8, cdp-v2, time step",
    "snapshot mp-cdp -n 4 --slot 12 -o pyramid.svg": "mp-cdp, n = 4, cdp-v2, time step 12",
    "snapshot multi-dp --model toy.toml --cluster box.toml --slot '40 ms' -o dp.png": "multi-dp, n = 8, dp, … 40 ms",
    # the papers' tables and figures
    "table1 -n 8": "mp-cdp BΨA/N 1/8 1/8 ΨP/N 1/8 1/8 N(N+1)/2 36 36",
    "table1 -n 64 --format json": '"paper": "N(N+1)/2", "exact": "2080", "simulated": "2080"',
    "table1 --paper acco": "DDP ddp (2+2+K)Ψ 120 GB 120 GB 120 GB",
    "table1 -n 1000000 --exact": "N(N+1)/2 500000500000",
    "table1 -n 8 --collective ring --format latex": r"mp-cdp & $B\Psi_A/N$ & 1/8 & 1/8 &",
    "figure 1 -o fig1.svg": "(a) DP 1 2 3 stage … (c) CDP-v2 … 14 15 time step",  # 2 (2n) + 2 (n - 1), from 0 on
    "figure 1 -o fig1.pdf": "a picture of cdpsim",
    "figure 1 -n 6 --steps 2 -o fig1.svg": "(a) DP 1 2 3 4 5 6 stage … (c) CDP-v2 … 32 33 time step",
    "figure 2 -n 4 -o fig2.svg": "(a) Single-GPU … (e) ZeRO-DP",
    "figure 4 -n 4 8 32 --contents gradients -o fig4.svg": "gradients, by FLOP",
    "superpose vit-b16 -n 32": "vit-b16 32 flops … 3.83 GB … the paper: from 3.9 GB to 2.3 GB, 42 % less at N = 32",
    "superpose toy.toml -n 4 --axis measured": "toy.toml 4 measured activations layer 12.0 GB",  # 8 * 1.5 GB
    "superpose vit-b16 -n 32 --contents gradients --format json": '"n": 32, "axis": "flops", "contents": "gradients",',
    "superpose resnet50 -n 1000000 --axis roofline:a100-tf32": "resnet50 1000000 … the paper: 30 % less at N = 32",
    "superpose resnet50 -n 32 --by-layer": "resnet50 32 flops activations layer … the paper: 30 % less at N = 32",
}
# Examples that read what another one writes.
AFTER = {
    "simulate --from traces/summary.json --prefetch 1 -o earlier": "simulate experiment.toml -o traces",
    "timeline traces -o traces.json": "simulate experiment.toml -o traces",
    "sweep status sweep": "sweep sweep.toml -o sweep",
    "sweep table sweep -o results.csv": "sweep sweep.toml -o sweep",
    "sweep retry sweep": "sweep sweep.toml -o sweep",
}


def shown_in(text: str) -> list[str]:
    """Return the examples in a help, without what is said beside them and where their output goes."""
    return [re.split(r" {2,}| > ", line)[0] for line in re.findall(r"^  cdpsim (.*)$", text, re.MULTILINE)]


def shown_files(simulate: str, sweep: str) -> dict[str, str]:
    """Return the files that the helps of two commands show, two of them side by side."""
    columns = [re.split(r" {8,}", line.strip()) for line in simulate.partition("box.toml\n  [[")[2].splitlines()]
    return {
        "toy.toml": "\n".join(["[[" + columns[0][0], *(line[0] for line in columns[1:])]),
        "box.toml": "\n".join(line[1] for line in columns if len(line) == 2),
        "experiment.toml": simulate.partition("any option by its name:\n")[2].partition("Other commands")[0],
        "sweep.toml": sweep.partition("The file:\n")[2].partition("\n\n")[0],
    }


# Where a picture, or a page, says what it shows.
WORDS = {
    ".png": rb"tEXtTitle\0(.*?)\0\0\0",
    ".pdf": rb"/Title \((.*?)\)",
    ".svg": rb"<(?:title|text)[^>]*>([^<]*)",
    ".html": rb"<title>([^<]*)",
}


def words_of(path: Path) -> str:
    """Return what a file says; a picture or a page by its title and its labels."""
    content = path.read_bytes()
    pieces = re.findall(WORDS[path.suffix], content, re.DOTALL) if path.suffix in WORDS else [content]
    return " ".join(piece.decode(errors="replace") for piece in pieces)


def written_by(example: str) -> Iterator[Path]:
    """Yield the files that an example has written into the current folder."""
    for name in re.findall(r"-o (\S+)", example):
        path = Path(name)
        yield from sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def are_said(expectation: str, said: str) -> bool:
    """Whether all words of an expectation are in a text, in this order."""
    pieces = (re.escape(piece) for piece in expectation.split(" … "))
    return re.search(".*?".join(pieces), " ".join(said.split())) is not None
