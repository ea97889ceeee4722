"""A table, printed as Markdown or as JSON, with what it is of."""

import datetime
import json
import math
import os
import pathlib
import platform
import re
import shlex
import subprocess

import torch

import train
from bench.launch import ROOT


def pivoted(rows, first, across, value):
    """-> rows that have a column for each value of the column `across`, and the columns."""
    lines = {}
    names = []
    for row in rows:
        name = f"{across}={row[across]}"
        if name not in names:
            names.append(name)
        lines.setdefault(row[first], {first: row[first]})[name] = row[value]
    return list(lines.values()), [first, *names]


def cell(value):
    if value is None or value == "":
        return "-"
    if isinstance(value, (str, int)):
        return str(value)
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def print_table(rows, columns):
    """As Markdown. Leaves out columns in which there is nothing."""
    texts = [[cell(row.get(name)) for name in columns] for row in rows]
    kept = []
    for place in range(len(columns)):
        if any(text[place] != "-" for text in texts):
            kept.append(place)
    for line in [columns, ["---"] * len(columns), *texts]:
        print("| " + " | ".join(line[place] for place in kept) + " |")
    print()


def machine(options):
    """What it runs on."""
    kind = platform.machine()
    cpus = pathlib.Path("/proc/cpuinfo")
    if cpus.exists():
        for name in re.findall(r"^model name\s*: (.*)$", cpus.read_text(), re.MULTILINE)[:1]:
            kind = name
    text = f"{os.cpu_count()} cores of {kind}"
    flags = shlex.join(getattr(options, "flags", []))
    device = re.search(r"--device[= ](\w+)", flags)
    if device is not None and device[1] != "cpu":
        name = torch.get_device_module().get_device_name()
        text = f"{torch.accelerator.device_count()} x {name}, {text}"
    return text


def commit():
    words = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def show(words, options, seconds, rows, columns, text, failed):
    """Print a table and what it is of."""
    facts = dict(command=shlex.join(["./bench.sh", *words]), machine=machine(options),
                 torch=torch.__version__, commit=commit(),
                 date=datetime.datetime.now().isoformat(" ", "minutes"), seconds=round(seconds))
    if options.json:
        kept = [{name: row.get(name) for name in columns} for row in rows]
        made = train.finite(dict(facts, rows=kept, text=text, failed=failed))
        print(json.dumps(made, indent=1))
        return
    minutes, seconds = divmod(facts["seconds"], 60)
    print(f"`{facts['command']}`: {facts['machine']}, torch {facts['torch']}, commit "
          f"{facts['commit']}, {facts['date']}, took {minutes} min {seconds} s\n")
    for line in failed:
        print(f"Failed: {line}\n")
    if rows:
        print_table(rows, columns)
    if text:
        print(f"{text}\n")
