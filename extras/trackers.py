# nanoZeRO 1.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""--tensorboard, --wandb: functions that take the metrics of each step, on rank 0."""


def start(stack, config, progress, watchers):
    """Rank 0: add such functions to watchers. stack, an ExitStack, closes what they write to."""
    if config.tensorboard:
        watchers.append(start_tensorboard(stack, config, progress))
    if config.wandb:
        watchers.append(start_wandb(stack, config, progress))


def scalars(entry):
    """{name: number} of all that metrics.jsonl has of a step: trackers draw numbers, not lists.
    What is measured on each rank becomes step_ms_min, step_ms_mean, step_ms_max and so on."""
    numbers = dict(entry)
    of_ranks = numbers.pop("ranks", {})
    for name, value in of_ranks.items():
        if isinstance(value, list):
            for kind, number in zip(("min", "mean", "max"), value):
                numbers[f"{name}_{kind}"] = number
        else:
            numbers[f"{name}_rank"] = value
    return {name: value for name, value in numbers.items() if value is not None}


def start_tensorboard(stack, config, progress):
    """Without the number of a step, which is the axis."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(f"{config.out_dir}/tensorboard", purge_step=progress["step"] + 1)
    stack.callback(writer.close)

    def add_scalars(entry):
        for name, value in scalars(entry).items():
            if name != "step":
                writer.add_scalar(name, value, entry["step"])

    return add_scalars


def start_wandb(stack, config, progress):
    """A run that resumes goes on in the run of its checkpoint. Its steps are an axis as any other
    one: by its own count W&B drops what comes after a resume at an earlier step."""
    import wandb

    run = wandb.init(project="nanozero", id=progress["run_id"], resume="allow",
                     name=f"{config.model} {config.mode} {progress['run_id'][:6]}",
                     dir=config.out_dir, config=vars(config))
    run.define_metric("*", step_metric="step")
    stack.callback(run.finish)

    def log(entry):
        run.log(scalars(entry))

    return log
