"""DeepSpeed's ZeRO in train.py's place: the same model, data, optimizer and rates, in a short loop.

    torchrun --nproc_per_node=2 bench/deepspeed_rows.py --mode deepspeed2 --max_steps 8

`./bench.sh modes` runs it for the rows deepspeed1, deepspeed2 and deepspeed3. Flags are train.py's.
The last line of stdout is RESULT {json}, with the names that train.py uses. The losses are those of
train.py, up to rounding.

    pip install deepspeed     # tried: 0.19.8; it brings ninja

On a CPU DeepSpeed compiles C++ in its first run, which needs a compiler and minutes: so
run it once before you compare times. It sends a part of its messages on one host through shared
memory, where train.py's modes take gloo. If that first run is killed, it leaves a lock in
~/.cache/torch_extensions: remove that folder.
"""

import importlib
import itertools
import json
import os
import pathlib
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
STAGES = {"deepspeed1": 1, "deepspeed2": 2, "deepspeed3": 3}


def refuse(why):
    print(f"deepspeed_rows.py: {why}", file=sys.stderr)
    sys.exit(2)


def take_mode(flags):
    """Flags without --mode NAME -> NAME, the others. train.py knows no such mode."""
    if "--mode" not in flags[:-1]:
        refuse("--mode deepspeed1, deepspeed2 or deepspeed3 is missing")
    place = flags.index("--mode")
    mode = flags[place + 1]
    others = flags[:place] + flags[place + 2:]
    if mode not in STAGES:
        refuse(f"--mode {mode}: choose deepspeed1, deepspeed2 or deepspeed3")
    return mode, others


def main():
    mode, flags = take_mode(sys.argv[1:])
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist

    import data
    import runs

    train = importlib.import_module("train")

    # Of what is used below nothing depends on train.py's mode.
    given = runs.read_flags(train.Config, "", [*flags, "--mode", "ddp"])
    if given.get("dtype", "fp32") != "fp32":
        refuse(f"--dtype {given['dtype']}: these rows are in fp32")
    if given.get("micro_batch_size") == "auto":
        refuse("--micro_batch_size auto is train.py's alone")
    start = train.Config(**given)
    device = runs.choose_device(start.device)
    runs.start_process_group(device, start.timeout_s)
    # DeepSpeed looks for its accelerator where it is imported.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    import deepspeed

    config = train.config_of(given, None, device)
    torch.set_num_threads(config.threads)
    tokenizer, vocab_size = data.choose_tokenizer(config)
    plain = train.build_gpt(config, vocab_size, None)
    config.block_size = plain.config.block_size
    os.makedirs(config.out_dir, exist_ok=True)
    ids = runs.on_rank_0(data.tokenize, config, tokenizer)
    tokens, _ = data.load_tokens(config, ids, plain.config.vocab_size)
    W = dist.get_world_size()
    m = config.micro_batch_size
    n = config.global_batch_size // (m * W)  # micro-steps

    # Made before DeepSpeed cuts parameters, so that matrices decay, and others do not.
    [optimizer] = train.make_optimizers(plain, config)
    options = dict(
        train_batch_size=config.global_batch_size,
        train_micro_batch_size_per_gpu=m,
        gradient_accumulation_steps=n,
        gradient_clipping=config.grad_clip,
        zero_optimization=dict(stage=STAGES[mode]),
        steps_per_print=10**9,
    )
    engine, *_ = deepspeed.initialize(
        model=plain,
        optimizer=optimizer,
        config=options,
        dist_init_required=False,
    )

    batches = data.micro_batches(tokens, 1, config, device)
    times_s = []
    for step in range(1, config.max_steps + 1):
        start_s = time.perf_counter()
        train.set_lr([engine.optimizer], step, config)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for x, y in itertools.islice(batches, n):
            _, loss = engine(x, y)
            engine.backward(loss)
            engine.step()  # it steps with the last micro-step alone
            total += loss.detach()
        # Reading the loss waits for the device, as train.py does in each step.
        dist.all_reduce(total)
        train_loss = total.item() / (n * W)
        times_s.append(time.perf_counter() - start_s)
        if dist.get_rank() == 0:
            print(f"step {step} | loss {train_loss:.4f}", flush=True)

    held = torch.tensor(runs.peak_mem_bytes(device), device=device)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    step_s = statistics.median(times_s)
    tokens_per_step = config.global_batch_size * config.block_size
    result = dict(
        mode=mode,
        world_size=W,
        steps=config.max_steps,
        train_loss=train_loss,
        step_ms=1e3 * step_s,
        tokens_per_sec=tokens_per_step / step_s,
        peak_mem_bytes=held.item(),
        threads=config.threads,
    )
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
