"""What `--help` says beyond the options: what things mean, and examples."""

ABOUT = """Simulate training schedules: when every task runs, what devices hold, what links
carry. A schedule says in which order, on which devices and with which version of
the parameters the micro-batches of a training step pass through the stages of a
model. Without a model and a cluster a run is in slots: each forward and each
backward of a stage takes one, and messages are free.
"""
EXAMPLES = """examples:
  cdpsim schedules                         what there is to simulate
  cdpsim table1 -n 8                       the paper's Table 1, and what runs measure
  cdpsim simulate mp-cdp -n 4 -o traces    when every task runs, and all the rest
  cdpsim pyramid -n 4                      how few devices model parallelism needs
  cdpsim compare -n 8                      all schedules side by side
  cdpsim import-schedule mine.csv          a pipeline that torch, or somebody, wrote
  cdpsim figure 1 -o fig1.svg              the paper's Fig. 1: DP, CDP-v1, CDP-v2
  cdpsim breakeven -n 8 --model gpt2 --cluster a100-nodes
  cdpsim superpose vit-b16 -n 32           the paper's Fig. 4, in numbers
  cdpsim timeline pp-cdp -n 4 -o pp.html   a run to explore in a browser
  cdpsim plot memory multi-dp multi-cdp -n 8 -o memory.svg
  cdpsim simulate multi-cdp --model toy.toml --cluster box.toml -o traces

`cdpsim COMMAND --help` explains a command. Exit codes: 0 done, 1 the answer is no,
2 the request cannot be served (one line on stderr says why, and the remedy),
130 interrupted, 143 terminated (SIGTERM).
"""
SCHEDULES = """columns:
  order      simultaneous: all micro-batches are in the same stage at once;
             cyclic: one starts two slots after the other; streamed: the same on and on
             without a flush; a pipeline's own: what each of its devices does is listed
  placement  what a device is responsible for
  rule       which parameters are read: dp the newest, cdp-v1 those of the step
             before, cdp-v2 the newest wherever they exist in time; newest what is
             there when a forward comes, newest-each even in the backward
  state      replicated: on every device that uses it; sharded: in one place
  options    those of `cdpsim simulate` that not every schedule takes
"""
PYRAMID = """A device that serves one stage is occupied by a micro-batch from its forward to
its backward there. For each stage: the devices that an assignment uses, which is
the certificate; the bound, occupancy over a period; the largest overlap of
occupancies; and the smallest cover by paths of "ends before the other starts" (up
to 64 stages). --format json has the assignment as well.

examples:
  cdpsim pyramid -n 8
  cdpsim pyramid mp-dp -n 4
  cdpsim pyramid --model toy.toml --steps 8 --format json
"""
TABLE1 = """Nine rows, one for each implementation; N is the number of stages and of
micro-batches. Each cell shows what the paper prints, the exact value, and what a
run measures. A footnote says why an exact value is not the printed one.
Exits with 1 if a row's exact and measured values disagree. With --exact nothing is
run: each cell shows what the paper prints and the exact value, for any N.

examples:
  cdpsim table1 -n 8
  cdpsim table1 -n 1000000 --exact
  cdpsim table1 -n 8 --collective ring --format markdown
  cdpsim table1 -n 64 --format json > table.json
"""
SIMULATE = """DIR will hold these, all of them or none:
  tasks.csv     a row for each forward (F), backward (B) and update (U): device,
                start, end, the version of the parameters that it reads or makes,
                and whether a newer one existed (stale)
  messages.csv  a row for each message and collective: what, from where, to where,
                how large, start, end, rounds
  memory.csv    what a device holds of a category from a time on, a row per change
  summary.json  makespan; period, bubble and staleness of steps at rest (`period_is`
                certified or measured); idle_of_run; each device's peak memory and
                bytes sent, and the request itself; where backwards may read other
                versions than their forwards, how many do (mismatched)
  runs.csv      with --runs: the makespan and the period of each run
Times are slots and sizes stages' worth; with a model and a cluster, seconds and
bytes.

Clusters are not always orderly. A device may be slow, or stop; tasks and messages may
take a random time, of the same mean: --jitter lognormal:0.1 gives it a standard
deviation of 10 %. The seed and the number of the run decide what is drawn: of each
task the same for all schedules, and for run 7 the same with --run 7 as among --runs.
A device that is slow, or has stopped, holds up its tasks and updates, and nothing else:
a schedule lets micro-batches start when it would anyway, and messages are as fast as
ever. A run that a stop for good lets not end exits with 1, and says who waits for whom.

An experiment file (.toml, .json) is a request: `model` and `cluster` (a name, a file
beside it, or tables), and under [run] any option by its name:
  model = "gpt2"
  cluster = "a100-nodes"
  [run]
  schedule = "multi-cdp"
  n = 8
Other commands take one in place of a NAME, too. The request in summary.json is another:
--from summary.json asks for the same run again. Options that are given win.

examples:
  cdpsim simulate mp-cdp -n 4 -o traces
  cdpsim simulate experiment.toml -o traces
  cdpsim simulate --from traces/summary.json --prefetch 1 -o earlier
  cdpsim simulate pp-cdp -n 4 --rule cdp-v1 --steps 5 -o traces --force
  cdpsim simulate multi-cdp --model toy.toml --cluster box.toml -o traces
  cdpsim simulate multi-dp --model toy.toml --cluster box.toml -o dp --collective best
  cdpsim simulate zero-dp --model toy.toml --cluster box.toml -o zero --expand-collectives
  cdpsim simulate multi-dp --model toy.toml --cluster box.toml -o shared --contention fair
  cdpsim simulate pp-cdp -n 4 --model toy.toml --recompute sqrt -o less
  cdpsim simulate multi-dp -n 4 --slow 3:4 -o slow
  cdpsim simulate multi-dp --model toy.toml --jitter lognormal:0.1 --runs 1000 -o runs
  cdpsim simulate pp-cdp --model toy.toml --cluster h100-node --offload activations -o off

With --contention messages share links, each direction of one by itself; without a
topology every two devices have their own. A message waits out its route's latency,
then its bytes flow: at its fair (max-min) share of every link on the way, anew
whenever another one begins or ends; or, in a queue, at full bandwidth as soon as all
links on its way are free, first come, first served. `start` in messages.csv is when
it was ready to go. Collectives run as their messages.

A model with more stages than -n asks for is cut into N groups of its stages, of
which the largest has as few FLOP, or seconds, as can be. How it is trained may also
stand in its file: [training] with optimizer, mixed_precision = true, recompute,
offload; language models ship with Adam in mixed precision. A stage may say what its
update takes: update = "5 ms" on its device, which does nothing else meanwhile,
host_update = "30 ms" on the host. What is offloaded crosses the cluster's [host] link
(latency, bandwidth) beside computing: a forward or backward takes the longer of both,
an update its gradients' way, its own time, and its parameters' way; summary.json then
has host_memory. A stage's file may state a time itself: transfer = "20 ms".

Stages that share a tensor are tied in the file: [[tied]] with stages = [0, 13] and
parameters = "77.2 MB", which each of them has among its own. A device with both stages
counts it once. On several devices each has a copy where steps are flushed, and an
all-reduce a step sums its gradient; without a flush the stages are untied.

Where overlap = "none" (`cdpsim clusters --help`), a message takes its sender for its
time right after the task that made it, and its receiver for as long right before the
task that reads it; neither waits for the other. With --rendezvous both do, and a
receive stands next to its reader (megatron), or where a run in slots would begin its
message (torch), and what is behind it waits.

toy.toml                        box.toml
  [[stages]]                      [devices]
  repeat = 8                      memory = "80 GB"
  forward = "10 ms"               [link]
  backward = "20 ms"              latency = "5 us"
  activation = "1.5 GB"           bandwidth = "300 GB/s"
  boundary = "16 MB"
  parameters = "400 MB"
"""
TIMELINE = """The ending of FILE picks the form:
  .svg .png .pdf  a picture. --style paper shows stage over time step, coloured by
                  micro-batch: an arrow up for a forward, down for a backward, a
                  slash through what reads an older version than the newest, double
                  bars where training steps are synchronised, arrows for messages.
                  --style gantt shows a lane for each device and link, in real time,
                  and why devices are idle; --dependencies, who waits for whom.
  .html           one page without a network: zoom, search, colour by stage ...
  .json           for ui.perfetto.dev: tracks, flows, memory. A slot is 1 us there.
  .csv            a flushed pipeline's order of a step, for torch.distributed.pipelining
NAME may also be a folder that `cdpsim simulate` wrote.

examples:
  cdpsim timeline multi-cdp -n 3 -o cdp.svg
  cdpsim timeline multi-dp --model toy.toml --cluster box.toml -o dp.html
  cdpsim timeline pp-cdp -n 4 --style gantt --dependencies -o pp.pdf
  cdpsim timeline pp-cdp -n 4 --style gantt --stop 2:10:5 -o stopped.svg
  cdpsim timeline traces -o traces.json
"""
FIGURE = """Figure 1 shows data parallelism and the two versions of its cyclic form over time;
figure 2 the nine implementations at one slot: devices, the stages whose parameters
they hold, the activations that wait there, and the messages of that slot;
figure 4 the memory per worker over one forward and backward of ResNet-50 and
ViT-B/16: DP (full), CDP of N workers (dashed), half of DP's peak (black). What that
memory consists of, and over what: `cdpsim superpose --help`.

examples:
  cdpsim figure 1 -o fig1.pdf
  cdpsim figure 1 -n 6 --steps 2 -o fig1.svg
  cdpsim figure 2 -n 4 -o fig2.svg
  cdpsim figure 4 -n 4 8 32 --contents gradients -o fig4.svg
"""
SNAPSHOT = """A rectangle is a device; a disk a stage whose parameters it holds, in the colour of
the micro-batch that it computes now; the ring around it the activations that wait
for their backward; arrows are messages, thick between devices, thin inside one,
with two heads for collectives.

examples:
  cdpsim snapshot mp-cdp -n 4 --slot 12 -o pyramid.svg
  cdpsim snapshot multi-dp --model toy.toml --cluster box.toml --slot '40 ms' -o dp.png
"""
PLOT = """WHAT is drawn over time:
  memory    what devices hold: of one schedule by category, in all and per device; of
            several the sums, with the paper's lines where they apply
  traffic   what is sent, by content or by schedule
  versions  how many versions of the parameters devices keep, and how old they are
  steps     how long each training step takes; with --jitter and --runs the median of
            the runs, and bands from their 5 % to their 95 % quantile
NAME may also be a folder that `cdpsim simulate` wrote.

examples:
  cdpsim plot memory multi-dp multi-cdp -n 8 -o memory.svg
  cdpsim plot traffic mp-cdp -n 4 -o traffic.png
  cdpsim plot versions pp-cdp -n 4 --rule cdp-v1 -o versions.pdf
  cdpsim plot steps pp-cdp --model toy.toml --jitter lognormal:0.2 --runs 99 -o s.svg
"""
COMPARE = """columns (under unit costs in slots and stages' worth, else in seconds and bytes):
  devices        how many
  makespan       of the whole run, which has --steps training steps; all else is of steps
                 at rest, however many that takes
  step           from the end of one training step to that of the next; with --runs
                 its quantiles over the runs, too (--format json has more of them)
  micro-batches  how many a slot, or a second; or samples, where the model file says how
                 many a micro-batch has (`samples = 32` at its top, as `profile` writes)
  bubble         the share of time in which devices do nothing ...
  exposed        ... and the part of it in which what they need is on its way, or
                 messages block their stream
  memory         the most that one device holds; then, whether that fits into every
                 device, and by category the most of each
  versions       the most of one stage's parameters that a device holds at once
  staleness      how many steps old what forwards read is, on average
  messages       of one training step, and, in slots, how many of their rounds must
                 fit between two slots (`rounds`)
  sent           what all devices put on wires for one training step

An option is for the schedules that take it: one line says which run without it, and one
that none takes is refused. Without NAME these are all schedules that can be asked for
so many micro-batches and replicas: what cannot is left out with the reason. In slots
all backwards take two of them if some schedule splits backwards (--model unit-split).

examples:
  cdpsim compare -n 8
  cdpsim compare -n 8 -m 16 --chunks 2 --within 12 -o bubble.svg
  cdpsim compare pipedream pipedream-2bw pipemare pp-cdp -n 4
  cdpsim compare 1f1b mine.csv -n 4 -m 8
  cdpsim compare multi-dp multi-cdp mp-cdp -n 8 --sort memory -o compared.svg
  cdpsim compare --model toy.toml --cluster box.toml --format markdown
  cdpsim compare multi-dp pp-cdp --model toy.toml --jitter exponential:0.2 --runs 99
"""
IMPORT = """FILE.csv is what torch.distributed.pipelining writes (`_dump_csv`): row d is what
device d does, a cell is an action such as 0F1 (stage 0, forward, micro-batch 1), B for
a whole backward, I and W for its parts of the input and the weights, or several that
overlap: (0F1;1B0)OVERLAP_F_B. Empty cells mean nothing, and cells of communication are
left out, because who sends what to whom follows from who needs it. Where a device
should begin when it can is derived, too: an order has no times.

What is printed is what `cdpsim compare` has as columns. Such a file can be given in
place of a schedule's name everywhere, and `cdpsim timeline NAME -o FILE.csv` writes one.

examples:
  cdpsim timeline 1f1b -n 4 -m 8 -o mine.csv
  cdpsim import-schedule mine.csv
  cdpsim import-schedule mine.csv --model gpt2 --cluster a100-nodes --replicas 2
  cdpsim timeline mine.csv -o mine.svg
"""
BREAKEVEN = """For each schedule, the bandwidth from which on its messages are hidden: a training
step is then at most 1 % (--share) longer than if messages took no time at all. All
bandwidths between devices are scaled alike; latencies stay, and so does [host], over
which no message goes. What is found is the largest bandwidth below which a step gets
longer, to a millionth, by simulation.

columns:
  free        a training step if messages took no time
  step        a training step on the cluster as it is ...
  exposed     ... and the share of it by which it is longer
  latency     by how much it is longer, as a share of `free`, with no more than latency
  bandwidth   what messages reach (the data sheet's times `achieved`) on the narrowest
              way between two of the devices that the schedule takes
  break-even  what that has to be; `never` where latency alone is too long, `any` where
              nothing is sent
  factor      break-even by bandwidth: over 1, the cluster is too slow

What can hide: all-reduces begin when every device has done its last backward of the
step; that of stage j is hidden behind the next forwards of the stages before it (not
behind backwards, as DistributedDataParallel's buckets are). Point to point, a sum of
gradients has until the next device has done its backward there, and parameters may
arrive --prefetch tasks before their reader. The states of zero-cdp cannot hide: what a
device has just used is what the next one needs. Unless a cluster says overlap = "stream",
all stages' all-reduces go at once and take no longer than the longest of them; for
data parallelism with one all-reduce of everything take -n 1 -m DEVICES. With --share 4
a step may take five times as long: messages that nothing hides, four times the rest.

examples:
  cdpsim breakeven -n 8 --model gpt2 --cluster a100-nodes
  cdpsim breakeven multi-dp multi-cdp -n 4 8 --model toy.toml --cluster box.toml -o b.svg
  cdpsim breakeven multi-cdp --model toy.toml --cluster box.toml --over bandwidth
  cdpsim breakeven multi-dp -n 1 -m 32 --model llama2-7b --cluster a100-nodes --share 4
"""
SUPERPOSE = """One worker's memory over its forward and backward is simulated; MODEL is cut into its
layers. N workers that go simultaneously (DP) need the highest of it each; N that go
cyclically (CDP) are 1/N of a pass apart, and the most that they hold together at any
moment is shared out among them. The superposition is exact. MODEL is one that ships
with cdpsim, such as resnet50 or vit-b16, or a file that says what each layer holds.
What a model's input weighs is the `data` of its first stage.

How far a layer brings a micro-batch on its way through a pass:
  flops            its floating point operations
  roofline:DEVICE  the time that its operations, or the bytes that it moves, take at
                   least on a v100, a100, h100, h200; with -tf32 behind it (but for the
                   v100) products of matrices are in TensorFloat-32 instead of float32
  measured         the times of a model file that has some

examples:
  cdpsim superpose vit-b16 -n 32
  cdpsim superpose vit-b16 -n 32 --contents gradients --format json
  cdpsim superpose resnet50 -n 1000000 --axis roofline:a100-tf32
  cdpsim superpose toy.toml -n 4 --axis measured
"""
MODELS = """For one micro-batch, summed over stages: the work of its forward and backward, the
parameters, their bytes (`weights`), and the activations that it leaves from forward to
backward. A tensor that stages share ([[tied]]) counts once. `about` has the command
that made the file.

examples:
  cdpsim models
  cdpsim models gpt2 > my-gpt2.toml
"""
CLUSTERS = """A device's memory and its peak speed in each precision, dense, in TFLOPS; `achieved`
is the share of it that training reaches, which runs reckon with; `links` is what a
message between two devices meets: the smallest bandwidth on its way, and its latency.
Where `devices` is any, there are as many nodes as the schedule needs; `count` in a
copy of the file fixes them. Sources are at the top of each file, and in json.

In [devices], `overlap` says what of a device's messages runs beside what:
  full    (default) all of them beside each other and beside its tasks
  stream  beside its tasks, what it sends one after another, and so what it receives
  none    one after another with its tasks, beside nothing
What a device sends comes in the order of the tasks that made it, and so do its parts
in collectives; what it receives in the order of the tasks that read it. Messages that
take no time slow no run, whatever overlaps.

A cluster file has [link] for all pairs, or a topology. Its kinds are ring, mesh,
switch, nodes and fat-tree, with [topology.link] between neighbours or to switches;
nodes also have [topology.host], from device to card, and [topology.network]. Beside
these, or alone, [[edges]] join devices and switches one by one:

  [topology]                [topology.network]      [[edges]]
  kind = "nodes"            latency = "7 us"        between = [0, "switch"]
  per_node = 8              bandwidth = "12.5 GB/s" latency = "2 us"
  nics = 2                  bandwidth_back = "inf"  bandwidth = "64 GB/s"
  inside = "mesh"           [devices.speeds]        one_way = true
  across = "fat-tree"       bf16 = "312 TFLOPS"

What is out of order may stand there, too, as --slow, --stop and --jitter have it:

  [disorder]                [[disorder.slow]]       [[disorder.stop]]
  jitter = "lognormal:0.1"  device = 3              device = 1
  link_jitter = "..."       factor = 4              at = "2 s"
                                                    lasts = "500 ms"

examples:
  cdpsim clusters
  cdpsim clusters a100-nodes > mine.toml
  cdpsim clusters --format json
"""
