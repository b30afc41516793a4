"""Refusals of options of the data axis on the command line: one line with the numbers, and exit code 2."""

from pathlib import Path

from tests.conftest import Command
from tests.helpers.command_line import refuse
from tests.helpers.every_row import every_row

TOY = "--model toy.toml --cluster box.toml"
FLUSHING = (
    "dp, gpipe, 1f1b, interleaved-1f1b, looped-bfs, zb-h1, zb-h2, interleaved-zero-bubble, zbv, dualpipe, dualpipev, "
    "chimera, gems"
)


@every_row(
    ("line", "problem"),
    [
        # k that does not divide where it must
        ("dp --shard 4 --reshard 3", "reshard: to 3 ranks, which is no part of the 4 that share parameters; give a"),
        ("dp --shard 4 --reshard 4", "give a smaller divisor of 4, or yes, no, root"),
        ("dp --shard 4 --reshard 1", "reshard=1 must be at least 2"),
        ("dp --shard 4 --reshard maybe", "unknown reshard 'maybe'; known are yes, no, root, step, a number of ranks"),
        ("1f1b --shard 2 --reshard root", "root keeps parameters for one micro-batch at a time, and a pipeline has"),
        ("dp --shard 0", "shard=0 must be at least 1"),
        ("dp --shard 2.5", "shard=2.5 must be a whole number of at least 1"),
        # stages of ZeRO, and schedules that do not take them
        ("dp --zero 4 --shard 2", "zero=4, and ZeRO's stages are 0 to 3; give one of these"),
        ("ddp --zero 3 --shard 2", "ddp is dp --zero 0, and --zero asks for 3; leave either out"),
        ("pp-cdp --zero 3 --replicas 2", "zero=3 splits gradients or parameters, and pp-cdp does not flush; take "),
        ("pp-cdp --zero 3 --replicas 2", f"take --zero 1, or a schedule that does: {FLUSHING}"),
        ("pipedream-2bw --shard 2", "shard=2 is --zero 3, which splits gradients or parameters, and pipedream-2bw"),
        (
            "zero-cdp --shard 2",
            "shard: zero-cdp does not take this option (it takes m, prefetch); pp-cdp, dp, gpipe, 1f1b,",
        ),
        (
            "zero-dp --shard 2",
            "shard: zero-dp does not take this option (it takes prefetch, compress); pp-cdp, dp,",
        ),
        ("multi-dp --zero 1", "zero: multi-dp does not take this option (it takes m, reduce, compress)"),
        # buckets
        ("dp --replicas 2 --buckets 0B", "buckets: '0B' has a bucket of no bytes; give at least 1 B"),
        ("dp --replicas 2 --buckets 1MiB,0B", "buckets: '1MiB,0B' has a bucket of no bytes; give at least 1 B"),
        ("dp --replicas 2 --buckets few", "'few' is neither one of none, torch, megatron, deepspeed nor sizes such"),
        # compression
        (
            "dp --replicas 2 --compress topk:0",
            "'topk:0' does not say which share of all numbers is sent; give more",
        ),
        ("dp --replicas 2 --compress topk:2", "give more than 0 and at most 1, such as topk:0.01"),
        ("dp --replicas 2 --compress topk:1e-99", "'topk:1e-99' does not say which share"),
        ("dp --replicas 2 --compress topk", "'topk' does not say which share of all numbers is sent"),
        ("dp --replicas 2 --compress int3", "compress: unknown compress 'int3'; did you mean 'int8'?"),
        (
            "dp --replicas 2 --compress signs",
            "none, bf16, fp16, int8, int4, int8:BLOCK, int4:BLOCK, topk:F, powersgd:R",
        ),
        ("dp --replicas 2 --compress powersgd", "'powersgd' does not say of which rank factors are; give at least 1"),
        ("dp --replicas 2 --compress powersgd:0", "'powersgd:0' does not say of which rank factors are"),
        ("dp --replicas 2 --compress powersgd:1.5", "give at least 1, such as powersgd:4"),
        ("dp --shard 2 --zero 1 --replicas 2 --compress powersgd:4", "shares are summed across groups; give int8 or"),
        ("dp --shard 2 --compress powersgd:4", "powersgd:4 lets all ranks sum whole matrices' factors, and each rank"),
        ("zero-dp --compress powersgd:4", "and zero-dp sums gradients at one device of each stage; give int8 or int4"),
        (
            "multi-dp --compress powersgd:4",
            "and here one message sums each stage, in no stream; give int8 or int4, or dp",
        ),
        ("acco --replicas 2 --compress powersgd:4", "and each worker of acco sums a share of all gradients; give int8"),
        ("dp --replicas 2 --compress int8:0", "'int8:0' does not say how many numbers have a common scale; give at"),
        ("dp --replicas 2 --compress int4:", "give at least 1, such as int4:512"),
        ("dp --replicas 2 --compress bf16:8", "'bf16:8': bf16 has no blocks; give bf16 alone"),
        (
            "dp --shard 2 --compress topk:0.1",
            "each rank keeps a share of all gradients; give int8 or int4, or --zero 1",
        ),
        (
            "dp --shard 2 --replicas 2 --zero 1 --compress topk:0.1",
            "shares are summed across groups; give int8 or int4, or --zero 0",
        ),
        (
            "multi-cdp --compress topk:0.1",
            "of all others, and multi-cdp sums gradients at one device of each stage;",
        ),
        ("zero-dp --compress topk:0.1", "and zero-dp sums gradients at one device of each stage; give int8 or int4"),
        ("acco --replicas 2 --compress topk:0.1", "and each worker of acco sums a share of all gradients; give int8"),
        ("local-sgd --replicas 2 --compress int8", "compress: local-sgd does not take this option"),
        ("zero-cdp --compress int8", "compress: zero-cdp does not take this option (it takes m, prefetch); multi-dp,"),
        # when
        ("dp --zero 1 --shard 2 --reduce each", "--zero 1 has whole gradients on all 2 ranks; give --zero 2, or last"),
        # devices and memory
        ("1f1b --stage-replicas 2,1,1 --reduce each", "in one piece, and --reduce asks for more; leave either out"),
        ("1f1b --stage-replicas 2,1,1 --shard 2", "all-reduce their gradients in one piece, and --shard asks for more"),
        ("1f1b --stage-replicas 2,1,1 --zero 0 --buckets none", "in one piece, and --buckets asks for more; leave"),
        ("dp --shard 2 --offload activations", "has something on its host, and nothing says how long that takes to"),
        ("dp --shard 2 --offload optimizer", "give a --cluster with a [host] link, or times in the model's file"),
        ("dp --shard 3 --replicas 3 --cluster h100-node", "has 8 devices, but dp needs 9"),
    ],
)
def test_what_is_wrong_is_named(line: str, problem: str, command: Command, here: Path) -> None:
    platform = TOY if "--cluster" not in line else "--model toy.toml"
    refuse(command, here, f"simulate {line} {platform} -o out", problem)


@every_row(
    ("line", "option"),
    [
        ("dp --shard 2", "--buckets 1MiB"),
        ("dp --shard 2", "--whole-first-step"),
        ("dp --shard 2", "--gather step"),
        ("dp --replicas 2 --buckets none", "--whole-first-step"),
        ("dp --zero 1 --shard 2", "--reshard no"),
        ("dp --zero 1 --shard 2", "--reshard 4"),
        ("dp --zero 1 --shard 2", "--update-in stream"),
        ("dp --replicas 2", "--padding megatron"),
        ("dp --replicas 2", "--clip"),
        ("ddp", "--reduce each"),
        ("pp-cdp", "--padding rows"),
        ("pp-cdp", "--zero 1"),
        ("gpipe", "--by-layer"),
        ("gpipe --replicas 2", "--prefetch 2"),
        ("1f1b -n 3 --zero 1 --shard 2", "--by-layer"),
        ("1f1b", "--stage-replicas 1,1,1"),
        ("1f1b", "--reduce last"),
        ("1f1b", "--seed 3"),
    ],
)
def test_what_changes_nothing_here_is_accepted(line: str, option: str, command: Command, here: Path) -> None:
    """All tables are those without the option; only the request in the summary may differ."""
    for folder, more in (("without", ""), ("with", f" {option}")):
        words = f"simulate {line} {TOY}{more} -o {folder} --force"
        assert command(*words.split()).code == 0
    for table in ("tasks.csv", "messages.csv", "memory.csv"):
        assert (here / "with" / table).read_bytes() == (here / "without" / table).read_bytes(), table


@every_row(
    ("line", "problem"),
    [
        ("dp --zero 1 --shard 2 --reshard nothing", "reshard: unknown reshard 'nothing'"),
        ("dp --shard 2 --buckets few", "'few' is neither one of none, torch, megatron, deepspeed nor sizes such"),
        ("ddp --gather later", "gather: unknown gather 'later'"),
        ("1f1b --update-in streams", "update-in: unknown update-in 'streams'; did you mean 'stream'?"),
    ],
)
def test_what_is_unknown_is_refused_where_it_would_change_nothing(
    line: str, problem: str, command: Command, here: Path
) -> None:
    refuse(command, here, f"simulate {line} {TOY} -o out", problem)


def test_a_slot_model_has_no_shares(command: Command, here: Path) -> None:
    problem = "a stage's parameters are one piece in slots, and cannot be split among 2 ranks; give a --model"
    refuse(command, here, "simulate dp -n 4 --shard 2", problem)
    done = command("compare", "single-dp", "1f1b", "-n", 4, "--shard", 2)
    assert done.err.splitlines() == [
        "cdpsim: --shard: not taken by single-dp",
        "cdpsim: left out because of shard: 1f1b (by its name each says why)",
    ]
    refuse(command, here, "simulate dp --zero 5", "zero=5, and ZeRO's stages are 0 to 3; give one of these")
    refuse(command, here, "simulate dp -n 4 --replicas 2 --buckets 1MiB", "have sizes in bytes, and slots have none")


def test_a_tied_tensor_without_a_shape_cannot_be_padded(command: Command, here: Path) -> None:
    """The stages have shapes in all, of which none weighs what they share."""
    stage = "[[stages]]\nrepeat = 2\nforward = '1 s'\nbackward = '2 s'\nparameters = '80 B'\ntensors = [[3, 4], [8]]\n"
    (here / "tied.toml").write_text(f"{stage}[[tied]]\nstages = [0, 1]\nparameters = '40 B'\n", encoding="utf-8")
    line = "simulate dp --shard 2 --model tied.toml --cluster box.toml --padding"
    for rule in ("rows", "megatron"):
        refuse(command, here, f"{line} {rule} -o out", "a tied tensor is none of the `tensors`")
