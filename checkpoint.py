"""Checkpoints: folders out_dir/step_00000100, each complete or not there at all.

Replaces torch.save on rank 0, and writes with torch.distributed.checkpoint.

    __0_0.distcp ...  slices of parameters and of optimizer state, by name, a file per rank
    .metadata         where each slice is: torch.distributed.checkpoint's pickle
    checkpoint.json   what the loop knows beside tensors, and what must be the same in a resume
    SHA256SUMS        of the other files, in the form of `sha256sum`

No rank holds more than it trains with. Any mode at any world size reads what another wrote, since
a slice is saved with its place in the flat parameter, not with its rank. A folder is written
inside the run's mark and renamed when everything in it is on disk, so a crash leaves the
checkpoints before as they are.

Which run may write there is the subject of the last section, marks.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import pathlib
import shutil
import signal
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from extras.ranks import (Stop, count, from_rank_0, gather, local, named_shards, on_rank_0, say,
                           together)

RECORD, SUMS = "checkpoint.json", "SHA256SUMS"
HASHED = (".distcp", ".metadata", RECORD)  # ends of the names of the files that SUMS has


class Slice(torch.Tensor):
    """The elements [first, first + n) that this rank has of a flat tensor of `whole` elements.

    torch.distributed.checkpoint asks a tensor that is divided among ranks by the methods with
    underscores, which are those of torch's DTensor: which elements are here, how to write them, and
    where to read them to. A DTensor itself would not do: ZeRO's shards begin in the middle of a
    row.
    """

    def size(self):
        return torch.Size([self.whole])

    def __create_chunk_list__(self):
        """Where the elements are that are here: dcp's for one dimension."""
        if self.numel() == 0:
            return []
        first, n = torch.Size([self.first]), torch.Size([self.numel()])
        return [dcp.metadata.ChunkStorageMetadata(first, n)]

    def __create_write_items__(self, key, _):
        """What dcp has to write of them."""
        properties = dcp.metadata.TensorProperties.create_from_tensor(self)
        items = []
        for chunk in self.__create_chunk_list__():
            index = dcp.metadata.MetadataIndex(key, chunk.offsets)
            data = dcp.planner.TensorWriteData(chunk, properties, self.size())
            items.append(dcp.planner.WriteItem(index, dcp.planner.WriteItemType.SHARD,
                                               tensor_data=data))
        return items

    def __get_tensor_shard__(self, index):
        """The memory that dcp reads from, and writes to."""
        return self.as_subclass(torch.Tensor)


def flags_to_save(config):
    """config for a checkpoint, from which a run may resume in another working folder."""
    saved = dict(vars(config))
    if config.dataset != "stdlib":
        saved["dataset"] = os.path.abspath(config.dataset)
    if config.init_from:
        saved["init_from"] = os.path.abspath(config.init_from)
    return saved


def checkpoint_tensors(model, optimizer, gpt, residual=None):
    """{key: what this rank has of it}, sharing memory with what is trained: loading a checkpoint
    writes into these tensors. Keys are names, so any mode finds what it needs. An empty shard is
    left out, and so is its state: Adam's step counter stays 0 on a rank that owns nothing.

    residual: {parameter: what this rank has not sent of its gradients}, of top-k; else None.
    """
    tensors = {}
    starts = model.shard_starts()
    sizes = {name: p.numel() for name, p in gpt.named_parameters()}
    for name, p in named_shards(model):
        n = local(p).numel()
        if n == 0:
            continue
        for kind, t in dict(optimizer.state[p], model=p).items():
            if kind != "step":
                t = local(t).detach()
                # In order of memory, in which shards are cut.
                t = t.as_strided((t.numel(),), (1,)).as_subclass(Slice)
                t.first = starts[name]
                t.whole = sizes[name]
                if n == sizes[name]:  # then state may have another shape, as Adafactor's has
                    t.whole = t.numel()
            tensors[f"{kind}.{name}"] = t
        if residual is not None:
            unsent = residual.setdefault(p, torch.zeros_like(p))
            tensors[f"residual.{dist.get_rank()}.{name}"] = unsent
    return tensors


def name_of(step):
    return f"step_{step:08d}"


def newest_first(out_dir):
    """The checkpoints in out_dir: the number of the step has eight digits."""
    return sorted(out_dir.glob("step_" + 8 * "[0-9]"), reverse=True)


def sha256_line(path):
    with open(path, "rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}"


def names_of_files(folder):
    """What SHA256SUMS has to have. What others have put there, such as .DS_Store, is left out."""
    return sorted(path.name for path in folder.glob("*") if path.name.endswith(HASHED))


def checksums(folder):
    """The lines that SHA256SUMS has to have for what is in folder now. A collective: each rank
    reads its share of the files. Raises Stop where one cannot be read."""
    names = from_rank_0(on_rank_0(names_of_files, folder))
    mine = names[dist.get_rank()::dist.get_world_size()]
    lines = together(lambda: [sha256_line(folder / name) for name in mine])
    return sorted(line for lines_of_rank in gather(lines) for line in lines_of_rank)


def expected_checksums(folder):
    """The lines of SHA256SUMS, none if there is no such file."""
    path = folder / SUMS
    return path.read_text("utf-8", "replace").splitlines() if path.is_file() else []


def read_record(folder):
    """checkpoint.json of a checkpoint, None where it is damaged, unreadable or not there."""
    try:
        if sha256_line(folder / RECORD) in expected_checksums(folder):
            return json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        pass
    return None


def fsync(path):
    """Of a file or a folder; of a folder, so that a new name in it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save_checkpoint(mark, tensors, record, metrics):
    """Write out_dir/step_... -> whether that succeeded. If not, as on a full disk, it is said, and
    the run continues: the next checkpoint may succeed. Raises Stop if the mark is gone. A
    collective."""
    on_rank_0(still_ours, mark)
    folder = mark.parent / name_of(record["step"])
    unfinished = mark / folder.name
    try:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(unfinished))
        on_rank_0((unfinished / RECORD).write_text, json.dumps(record, indent=1))
        on_rank_0((unfinished / SUMS).write_text, "\n".join(checksums(unfinished)))
        on_rank_0(while_ours, publish, mark, unfinished, folder, metrics)
    except (dcp.CheckpointException, Stop) as error:
        # The last line, since dcp's error has the tracebacks of all ranks.
        why = str(error).strip().splitlines()[-1]
        if is_ours(mark):
            why += " (is the disk full, or gone?)"
        say(f"train.py: step {record['step']}: the checkpoint failed, earlier ones are as they "
            f"were: {why}", sys.stderr)
        # dcp may have made the folder of a mark anew that is gone.
        on_rank_0(shutil.rmtree, unfinished if is_ours(mark) else mark, True)
        return False
    try:
        on_rank_0(while_ours, tidy, mark, record["best_step"], record["config"]["keep_last"])
    except Stop as error:
        say(f"train.py: step {record['step']}: the checkpoint is there, but older ones are not "
            f"tidied up: {error}", sys.stderr)
    return True


def publish(mark, unfinished, folder, metrics):
    """Rank 0: dcp has put its files on disk. Do so with the rest, and with the metrics up to here,
    which a run that resumes keeps; then the rename makes it count."""
    metrics.sync()
    for path in (unfinished / RECORD, unfinished / SUMS, unfinished):
        fsync(path)
    still_ours(mark)
    unfinished.rename(folder)
    fsync(folder.parent)


def tidy(mark, best_step, keep_last):
    """Rank 0: point `best` to the best checkpoint, if it is there. Remove those that are neither it
    nor among the keep_last newest ones."""
    still_ours(mark)
    out_dir = mark.parent
    best = out_dir / name_of(best_step)
    link = out_dir / "best"
    if link.is_dir() and not link.is_symlink():  # as in a copy that has followed the link
        link.rename(out_dir / time.strftime("earlier_best_%Y%m%d_%H%M%S"))
    if best.exists():  # there is no step 0, which means none
        new = mark / "best"
        new.unlink(missing_ok=True)
        new.symlink_to(best.name)
        new.replace(link)  # at once, so that there always is one
    else:
        link.unlink(missing_ok=True)
    for old in newest_first(out_dir)[keep_last:]:
        if old != best:
            removed = old.rename(mark / f"{old.name}.removed")  # at once, whatever happens
            shutil.rmtree(removed, ignore_errors=True)


def newest_sound(folders):
    """The first of folders whose files are as they were written, None if there are no folders.
    Raises Stop, naming the files, if there is none such. A collective.

    This comes before anything else is read: .metadata is a pickle.
    """
    folders = from_rank_0(folders)  # a network disk may show other ranks an older view
    for folder in folders:
        try:
            found = checksums(folder)
            expected = from_rank_0(on_rank_0(expected_checksums, folder))
            if expected and found == expected:
                return folder
            wrong = sorted({line.partition("  ")[2] for line in {*found} ^ {*expected}})
            problem = f"does not match its {SUMS}: {', '.join(wrong)}"
            if not expected:
                problem = f"is no checkpoint, as it has no {SUMS}"
        except Stop as error:
            problem = f"cannot be read: {error}"
        if folder == folders[-1]:
            raise Stop(f"{folder} {problem}")
        say(f"train.py: {folder} {problem}; falling back to the checkpoint before", sys.stderr)


def resume(config, mark, tensors, facts, torchrun_store):
    """Load the checkpoint that --resume names into tensors -> its record, None to start over. A
    collective. After a restart by torchrun it is the newest one in out_dir, whatever --resume says.
    The line that it prints is a restart's first one, and has the numbers of ranks.

    facts: {name: value} of what must be as it was. Raises Stop where it is not, or where the
    checkpoint is damaged. At the end out_dir has the past of this run, and nothing else; an
    evaluation leaves it as it is.
    """
    out_dir = pathlib.Path(config.out_dir).resolve()
    is_restart = torchrun_store.check(["begun"])
    folders = []
    if config.resume == "auto" or is_restart:
        folders += newest_first(out_dir)
    if config.resume not in (None, "auto"):
        folders.append(pathlib.Path(config.resume))
    folder = newest_sound(folders)
    record = None
    if folder is not None:
        record = together(read_record, folder)
        load(folder, record, tensors, facts)
        ranks = count(dist.get_world_size(), "rank")
        say(f"resumed from {folder}, after step {record['step']}, on {ranks} "
            f"({record.get('world_size', 'unknown')} before)")
    if config.eval_only:
        if record is None and config.init_from is None:
            raise Stop(f"--eval_only: there is no checkpoint in {out_dir}")
        return record
    if record is not None and record["step"] > config.max_steps:
        raise Stop(f"--max_steps {config.max_steps} is less than the steps of {folder}")
    past = dict(step=0, best_step=0)
    is_in_out_dir = folder is not None and folder.resolve().parent == out_dir
    if is_in_out_dir:
        past = record
    elif record is None and config.resume == "auto":
        say(f"no checkpoint in {out_dir}: a new run begins")
    on_rank_0(while_ours, rewind, mark, past, is_in_out_dir or is_restart)
    if record is not None and not from_rank_0((out_dir / name_of(record["best_step"])).exists()):
        record |= dict(best_step=0, best_val_loss=math.inf)  # it is in another folder, or removed
    on_rank_0(touch, mark, 0 if record is None else record["step"])
    # Not earlier: if a rank dies before this line, what is in out_dir may be of another run.
    on_rank_0(torchrun_store.set, "begun", "")
    return record


def load(folder, record, tensors, facts):
    """Read a sound checkpoint into tensors. Raises Stop, naming the first fact of its record that
    is not as this run has it, or a tensor that it lacks. A collective."""
    facts_before = {"optimizer": "adamw"} | record["facts"]  # which older ones do not say
    for name, value in facts.items():
        if name in facts_before and facts_before[name] != value:
            raise Stop(f"{folder} has {name} {facts_before[name]}, and this run {value}")
    reader = dcp.FileSystemReader(folder)
    together(check_keys, folder, reader, tensors)
    dcp.load(tensors, storage_reader=reader,
             planner=dcp.DefaultLoadPlanner(allow_partial_load=True))


def check_keys(folder, reader, tensors):
    """Raise ValueError if a tensor is not in a checkpoint. A residual of top-k may be missing: a
    rank that was not there before has none."""
    known = reader.read_metadata().state_dict_metadata
    for key in tensors:
        if key not in known and not key.startswith("residual."):
            raise ValueError(f"{folder} has no {key}")


def rewind(mark, past, keeps_metrics):
    """Rank 0: bring out_dir to where it was after past["step"]. Whatever is newer, damaged or of an
    earlier run is moved aside, which is said, and is not looked at again."""
    out_dir = mark.parent
    remove_other_marks(mark)  # from here on nobody else adds to what is moved
    aside = out_dir / time.strftime(f"earlier_%Y%m%d_%H%M%S_{os.getpid()}")
    moved = [path for path in newest_first(out_dir) if int(path.name[5:]) > past["step"]]
    if not keeps_metrics:
        for pattern in ("best", "metrics.jsonl", "tensorboard", "trace_rank*.json"):
            moved += out_dir.glob(pattern)
    if moved:
        still_ours(mark)
        aside.mkdir()
        say(f"{', '.join(path.name for path in moved)} of an earlier run: moved to {aside}")
    for path in moved:
        still_ours(mark)
        path.rename(aside / path.name)
    for unfinished in out_dir.glob(".tokens-*"):  # of one that was killed while it tokenized
        with contextlib.suppress(OSError):  # it is finished now
            if now_s(mark) - unfinished.stat().st_mtime > 3600:
                unfinished.unlink()
    tidy(mark, past["best_step"], sys.maxsize)
    # Another file in its place, even if nothing changes: a run that is still there has it open.
    metrics = out_dir / "metrics.jsonl"
    if metrics.exists():
        kept = mark / metrics.name
        kept.write_text("".join(lines_until(past["step"], metrics)))
        fsync(kept)
        kept.replace(metrics)
        fsync(out_dir)


def lines_until(step, path):
    """The lines of metrics.jsonl up to a step. A crash may have torn the last one."""
    lines = []
    for line in path.read_text("utf-8", "replace").splitlines(keepends=True):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if json.loads(line)["step"] <= step and line.endswith("\n"):
                lines.append(line)
    return lines


def say_contents(out_dir):
    """Print on rank 0 what lies in out_dir, and how large it is."""
    if dist.get_rank() > 0:
        return
    best = (out_dir / "best").resolve().name
    names = []
    for path in sorted(out_dir.glob("*")):
        if path.name == "best":
            continue
        n_bytes = 0
        with contextlib.suppress(OSError):  # another run may move it
            for file in (path, *path.rglob("*")):
                if file.is_file():
                    n_bytes += file.stat().st_size
        size = f"{n_bytes / 1e6:,.2f} MB"
        if path.name == best:
            size += ", the best"
        names.append(f"{path.name} ({size})")
    say(f"in {out_dir}: {', '.join(names)}")


# -------------------------------------------------------------------------------------------------
# marks: one run at a time in an out_dir
#
# A mark is a hidden folder of out_dir, with a file in it that says whose it is. A run is alive if
# it has touched that file, which rank 0 does in every step, less than its own --timeout_s ago. Two
# promises:
# - A run that begins anew where another one is alive is refused. It moves nothing.
# - A run that goes on with what is in out_dir takes over: when it has loaded its checkpoint, it
#   removes all other marks. A run that has lost its mark stops, such as one that was frozen, or
#   whose torchrun is gone. What it was writing went with its mark, and the metrics.jsonl that it
#   has open is no longer the one of that name. If torchrun starts it again, it is refused.
#
# All times are the file system's own, which stamps what is written. So clocks of hosts do not
# matter, unless each host stamps for itself. Then a run whose host is ahead by an hour seems alive
# for an hour after its end, and others are refused; one whose host is behind seems dead to a run
# that begins anew, and is stopped by it, and its files are moved aside.


@contextlib.contextmanager
def claim(config, torchrun_store):
    """Give this run a mark, as long as it lasts -> its path; an evaluation has none. Raises Stop
    where another run has the right to out_dir. A collective."""
    if config.eval_only:
        yield None
        return
    out_dir = pathlib.Path(config.out_dir).resolve()
    takes_over = config.resume is not None
    if config.resume not in (None, "auto"):
        takes_over = pathlib.Path(config.resume).resolve().parent == out_dir
    is_restart = torchrun_store.check(["begun"])
    if torchrun_store.check(["lost"]):
        raise Stop(f"a later run has taken over {out_dir}")
    drawn = from_rank_0(os.urandom(8).hex())
    mark = out_dir / f".run_{drawn}"
    # The same in all starts by one torchrun, which may leave marks of ranks that were killed.
    torchrun = torchrun_store.compare_set("run", "", drawn).decode()
    facts = dict(timeout_s=config.timeout_s, torchrun=torchrun, begun=False,
                 takes_over=takes_over and not is_restart)
    try:
        on_rank_0(while_ours, make_mark, mark, facts, is_restart)
        yield mark
    except Stop:
        with contextlib.suppress(RuntimeError):  # torchrun is gone, too
            if dist.get_rank() == 0 and torchrun_store.check(["begun"]) and not is_ours(mark):
                torchrun_store.set("lost", "")
        raise
    finally:
        if dist.get_rank() == 0:
            remove(mark)


def make_mark(mark, facts, is_restart):
    """Rank 0: make the mark, and look at those of others. Raises ValueError if one of them is alive
    and this run does not take over.

    First make, then look: so of two runs that begin at once at least one sees the other, and the
    one that has made its mark later stands back. A restart has been here before, so only a run that
    has begun since can have the right.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # until the loop has handlers of its own
        signal.signal(number, functools.partial(leave, mark))
    path = mark / "mark"
    path.parent.mkdir()
    path.touch()
    # A file in the folder, and this is what counts: the folder alone dcp would make anew as it
    # writes a checkpoint there, when a later run has removed it.
    facts |= dict(host=socket.gethostname(), pid=os.getpid(), step=0,
                  made_ns=path.stat().st_mtime_ns)
    path.write_text(json.dumps(facts))
    # Longer than a tick of the file system's clock: then marks with equal times see each other, and
    # their names decide.
    time.sleep(0.05)
    for other in others_alive(mark):
        came_first = (other["made_ns"], other["name"]) < (facts["made_ns"], mark.name)
        is_first = other["begun"] or (came_first and not is_restart)
        is_foreign = other["torchrun"] != facts["torchrun"]
        if is_first and is_foreign and not facts["takes_over"]:
            when = f"{other['age_s']:.0f} s ago"
            if other["age_s"] < -1:
                when = "in the future, by the clock of its host"
            raise ValueError(f"in {mark.parent} a run is alive: host {other['host']}, pid "
                             f"{other['pid']}, step {other['step']}, which it touched "
                             f"{when}. Wait for its end, choose another "
                             "--out_dir, or take over with --resume auto. (A run that was killed "
                             f"counts as alive for its --timeout_s {other['timeout_s']:g})")


def leave(mark, number, frame):
    """Handle a signal: remove the mark, and end as without a handler."""
    remove(mark)
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def now_s(mark):
    """The file system's own clock."""
    os.utime(mark / "mark")
    return (mark / "mark").stat().st_mtime


def others_alive(mark):
    """The facts of all other marks in out_dir that are alive, with their "name" and "age_s"."""
    now = now_s(mark)
    found = []
    for path in mark.parent.glob(".run_*"):
        if path != mark:
            facts = read_mark(path)
            facts["age_s"] = now - facts["touched_s"]
            if facts["age_s"] < facts["timeout_s"]:
                found.append(facts)
    return found


def read_mark(mark):
    """What a mark says. It says nothing if it is gone, if it was made a moment ago, if an older
    version has made it, or if it is no file of ours."""
    facts = dict(name=mark.name, host="unknown", pid="unknown", step="unknown", torchrun=None,
                 begun=False, takes_over=False, timeout_s=120.0, made_ns=0, touched_s=-math.inf)
    path = mark / "mark"
    with contextlib.suppress(OSError, ValueError):
        found = path.stat()
        facts |= dict(made_ns=found.st_mtime_ns, touched_s=found.st_mtime)
        said = json.loads(path.read_text()) if path.is_file() else None
        if isinstance(said, dict) and isinstance(said.get("made_ns"), int):
            facts |= said
    return facts


def touch(mark, step):
    """Rank 0, once it has loaded its checkpoint and after every step: show that this run is alive
    -> whether the mark is still there."""
    # A full disk, a file that others have spoiled, or no mark: "r+" does not make it anew.
    with contextlib.suppress(OSError, ValueError, TypeError):
        with open(mark / "mark", "r+") as file:
            facts = json.load(file)
            file.seek(0)
            file.write(json.dumps(facts | dict(step=step, begun=True)))
            file.truncate()
    with contextlib.suppress(OSError):
        os.utime(mark / "mark")
    return is_ours(mark)


def while_ours(function, mark, *arguments):
    """function(mark, *arguments). Where that fails since a later run has removed the mark, so that
    a file in it is not there, the error says so."""
    try:
        return function(mark, *arguments)
    except FileNotFoundError:
        still_ours(mark)
        raise


def is_ours(mark):
    return (mark / "mark").exists()


def still_ours(mark):
    """Raise OSError if a later run has removed the mark."""
    if not is_ours(mark):
        raise OSError(f"a later run has begun in {mark.parent}, or {mark.name} was removed")


def release(mark):
    """Rank 0: this run will write no more."""
    still_ours(mark)
    remove(mark)


def remove(mark):
    """The file that counts goes first: then its run writes no more, while the rest goes."""
    with contextlib.suppress(OSError):
        (mark / "mark").unlink()
    shutil.rmtree(mark, ignore_errors=True)


def remove_other_marks(mark):
    """Rank 0: no other run may write here any more. But one may that is about to take over, or has
    begun meanwhile: raises OSError then. One that begins anew after this one stands back by itself.
    """
    still_ours(mark)
    mine = read_mark(mark)
    stay = [mark.name]
    for other in others_alive(mark):
        came_later = (other["made_ns"], other["name"]) > (mine["made_ns"], mark.name)
        will_take_over = came_later and not other["begun"] and other["takes_over"]
        has_begun = other["begun"] and not mine["takes_over"]
        if other["torchrun"] != mine["torchrun"] and (will_take_over or has_begun):
            raise OSError(f"a later run has begun in {mark.parent}: host {other['host']}, pid "
                          f"{other['pid']}")
        if came_later and not other["begun"]:
            stay.append(other["name"])
    for path in mark.parent.glob(".run_*"):
        if path.name not in stay:
            remove(path)
