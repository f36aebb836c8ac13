"""All commands share this file: `Command`, which prints and fails in the same way for all, and common options.

An expected error (`ValueError`, `OSError`, out of memory) is one line on standard error and exit code 2. Any other
exception is a bug, in this toolkit or in transformers; it ends in one line too, which says where, with exit code 70.
`--debug` shows the traceback of either. A warning of this package is one line. Ctrl-C and SIGTERM end a command in the
same way: unfinished output is removed, a line says whether --out was written and whether the same command goes on from
there, and the exit code is 128 plus the signal's number. A reader that closes the pipe, as in `quant … --json | head`,
loses the rest of the text, and nothing else changes.

Of several ranks, the first one prints. One that fails names itself and its error, and the others are ended.
"""

import atexit
import gc
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TextIO, cast

import click

from quant.__main__ import stop_early
from quant.base import old_names
from quant.base.errors import UserError, counted, did_you_mean, importing, in_command, near_file, printable
from quant.base.json_files import json_text
from quant.base.processor import cores, set_up_threads, short_turns
from quant.models.files import with_revision
from quant.recipes.plan import PLAN_FILE, Plan, RunTimeFormats

# `--devices N` starts a command as N ranks, which end all when one fails. `torchrun --nproc-per-node N -m quant …` does
# the same on any number of machines, but exit code and last line are torchrun's then; here they are those of the rank
# that failed first. The ranks start before this process has imported PyTorch, and meet in a file.


def launch(command: Sequence[str], count: int) -> int:
    """Runs a command of the toolbox, with its arguments, as `count` ranks of this machine; gives its exit code."""
    threads = int(os.environ.get("OMP_NUM_THREADS", cores()))  # of one rank; `cores` obeys a container's quota
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        common = {"OMP_NUM_THREADS": max(threads // count, 1), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        ranks: list[subprocess.Popen[bytes]] = []

        def start() -> None:
            for rank in range(count):
                own = {**common, "RANK": rank, "LOCAL_RANK": rank, "BLOCKSCALE_RANKS": Path(folder, "meeting").as_uri()}
                environment = os.environ | {name: str(value) for name, value in own.items()}
                # The same interpreter; a console script of another environment could be first on PATH.
                ranks.append(subprocess.Popen([sys.executable, "-m", "quant", *command], env=environment))

        try:
            # In a thread, which no signal interrupts between the start of a rank and its place in the list.
            with ThreadPoolExecutor(1) as starter:
                starter.submit(start).result()
            while True:
                codes = [process.poll() for process in ranks]
                if any(codes) or None not in codes:
                    break
                time.sleep(_POLL)
        except KeyboardInterrupt as signalled:
            if isinstance(signalled, Terminated):
                return 128 + signal.SIGTERM
            _end(ranks, _TERMINAL)
            return 128 + signal.SIGINT
        finally:
            _end(ranks, 0.0)
    # A rank that lost another may end in the same moment.
    failed = [(rank, code) for rank, code in enumerate(codes) if code]
    rank, code = min(failed, key=lambda each: each[1] == _FOLLOWED, default=(0, 0))
    if code < 0:
        sys.stderr.write(f"error: rank {rank} was killed by signal {-code}; run the same command again\n")
        return 128 - code  # as shells do
    return code


def _end(ranks: Sequence[subprocess.Popen[bytes]], patience: float) -> None:
    """Waits for ranks to end by themselves for so many seconds, then has them end, and waits until they cleaned up."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and None in [process.poll() for process in ranks]:
        time.sleep(_POLL)
    for process in ranks:
        process.terminate()
    for process in ranks:
        try:
            process.wait(_CLEANING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def local_device(option: str) -> str:
    """Returns the device of this rank, the GPU of its number; UserError for a GPU that all share, or too few."""
    import torch

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if option.startswith("cuda:"):
        raise UserError(f"--device {option} is one GPU, and there are several ranks; pass cuda, and each takes its own")
    if option not in ("auto", "cuda") or (option == "auto" and not gpus):
        return option
    if gpus < ranks:
        fewer = f"--devices {gpus}, or " if gpus > 1 else ""
        raise UserError(
            f"{ranks} ranks on a machine where PyTorch sees {counted(gpus, 'GPU')}: pass {fewer}--device cpu"
        )
    # Set as the current device too: NCCL and Triton work on the current one, and rank 3 would otherwise fill GPU 0.
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return f"cuda:{torch.cuda.current_device()}"


@atexit.register
def _end_without_collection() -> None:
    """Freezes all objects: otherwise Python looks for garbage among those of torch and transformers, for a second.

    Triton 3.9, whose classes are made by nanobind, would report each object that is not collected as a leak, in
    hundreds of lines: nothing else is printed from here on, the last function that Python calls.
    """
    gc.freeze()
    triton = sys.modules.get("triton._C.libtriton")
    if triton is not None and type(triton.ir.builder).__module__ == "nanobind":
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


class Terminated(KeyboardInterrupt):
    """The process got SIGTERM. It ends like Ctrl-C, so that code that cleans up after Ctrl-C runs."""


@contextmanager
def terminable() -> Iterator[None]:
    """Makes SIGTERM raise `Terminated`, SIGINT KeyboardInterrupt; later SIGTERMs do not disturb the cleaning up."""
    # Python delivers signals to the main thread and refuses handlers from any other.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stopped: type[KeyboardInterrupt] | None = None

    def stop(number: int, _: Any) -> None:
        nonlocal stopped
        stopped = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        if stopped is Terminated:  # a second one during the clean-up would leave half-deleted directories
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise stopped

    before = signal.signal(signal.SIGTERM, stop)
    if answers := signal.getsignal(signal.SIGINT) in (stop_early, signal.default_int_handler):
        signal.signal(signal.SIGINT, stop)
    try:
        yield
        # Python drops an exception that is raised in a destructor or in the callback of a weak reference.
        if stopped:
            raise stopped
    except Exception:
        if stopped is None:
            raise
        raise stopped from None  # imports of transformers answer an interruption by an error of their own
    finally:
        signal.signal(signal.SIGTERM, before)
        if answers:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def patient(name: Literal["stdout", "stderr"]) -> Iterator[None]:
    """Keeps writes to standard output or error from failing while open: text without a reader or stream is dropped."""
    own: TextIO | None = getattr(sys, name)
    # Python has no stream where the process was started without its descriptor (`>&-`). The null device takes that
    # number, which the next file would get.
    with open(os.devnull, "w") if own is None else nullcontext(own) as shown:
        stream = cast(TextIO, PatientStream(shown))
        with redirect_stdout(stream) if name == "stdout" else redirect_stderr(stream):
            try:
                yield
            finally:
                stream.flush()


class PatientStream:
    """A text stream whose reader may leave before the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._drop()
            return len(text)
        except UnicodeEncodeError as error:  # in a pipe Windows has its code page, without → and ≥
            return self._stream.write(text.encode(error.encoding, "replace").decode(error.encoding))

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._drop()

    def _drop(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # what its buffer still holds goes there at the end
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def warnings_in_one_line(*, quiet: bool) -> Iterator[None]:
    """Prints warnings of this package without file and line, which do not help users; leaves others to Python.

    They are lines of the command, so `python -W error` and PYTHONWARNINGS make no errors of them.
    """
    # The folder of the package: `filename` is the place that raised the warning, given its stacklevel.
    ours = str(Path(__file__).parents[1])
    with warnings.catch_warnings():
        if any(action.startswith("e") for action in sys.warnoptions):
            warnings.filterwarnings("default", category=UserWarning, module=r"quant(\.|$)")
        # pytest and notebooks replace this function; theirs is called for warnings of other packages.
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], filename: str, *line: Any, **options: Any) -> None:
            if not filename.startswith(ours):
                usual(printable(str(message)), category, filename, *line, **options)
            elif not quiet:
                click.echo(printable(f"warning: {message}"), err=True)

        warnings.showwarning = show
        yield


_REMOTE = "transformers_modules"  # where transformers puts the Python files of a model


def explained(error: Exception, message: str) -> str:
    """Returns one line about an exception that is not a mistake of the user: whose code it came from.

    The innermost frame of this package, of transformers or of a model's own files decides. Frames below it are of torch
    or of the standard library, which only report a bad call.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    packages = ("quant", "transformers", _REMOTE)
    frame, line = next(((f, n) for f, n in reversed(frames) if _package(f) in packages), frames[-1])
    where = f"{type(error).__name__} at {Path(frame.f_code.co_filename).name}:{line}: {message}"
    function = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
    if _package(frame) == "transformers":
        return (
            f"transformers {metadata.version('transformers')} fails in its own {function} ({where}); try another "
            "version of it, or other inputs. If transformers by itself runs the model on these, report what --debug "
            "prints"
        )
    if _package(frame) == _REMOTE:
        return (
            f"the model's own Python files fail in {function} ({where}); they may need another version of "
            "transformers. --debug shows the traceback"
        )
    innermost, line = frames[-1]
    where = f"{type(error).__name__} at {Path(innermost.f_code.co_filename).name}:{line}: {message}"
    return f"this is a bug in Blockscale: run with --debug, and report what that prints ({where})"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


PATH = click.Path(path_type=Path)
COUNT = click.IntRange(min=1)
HELP = {"help_option_names": ["-h", "--help"], "show_default": True}
"""Context settings of all commands."""
_BUG = 70  # what sysexits.h calls an internal software error
# Key in click's context, with the package's name as click asks of extensions.
_ARGUMENTS = "quant.arguments"
_FOLLOWED = 1  # exit code of a rank that lost another
_FIRST_RANK = 1.0  # seconds in which the first rank prints an error that all ranks have
# Seconds between looks at the ranks, for them to end after Ctrl-C, which a terminal sends to them too, and to clean up.
_POLL, _TERMINAL, _CLEANING = 0.05, 5.0, 60.0
QUIET = click.option("--quiet", is_flag=True, help="Print errors only.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")
DEVICE = click.option("--device", default="auto", help="Where to compute: cpu, cuda, cuda:N, or auto, a GPU if any.")
DEVICES = click.option(
    "--devices", type=COUNT, metavar="N", help="Share the work among N processes, each with a GPU of its own."
)
SEED = click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Seed of all random numbers.")
ATTENTION = click.option(
    "--attention", metavar="FORMAT", help="Format of attention's operands: fp8 or 16bit.  [default: the plan's]"
)
KV_CACHE = click.option("--kv-cache", metavar="FORMAT", help="Format of the KV cache: fp8, nvfp4 or 16bit, or one for "
                        "each layer with commas.  [default: the plan's]")  # fmt: skip
REVISION = click.option(
    "--revision", metavar="REV", help="Branch, tag or commit of a MODEL on the Hugging Face hub, such as org/name."
)


def _trust(context: click.Context, _: click.Parameter, trusted: bool) -> bool:
    # Trust ends with the command's context, so that a later command in the same process asks again.
    if trusted:
        from quant.models.huggingface import remote_code

        context.with_resource(remote_code(True))
    return trusted


TRUST = click.option("--trust-remote-code", is_flag=True, expose_value=False, callback=_trust,
                     help="Let transformers run the model's own Python files.")  # fmt: skip
FACTORY = click.option("--model-factory", metavar="FILE.py:FUNCTION", help="Function that builds the module, for a "
                       "state dict or a directory of weights.")  # fmt: skip
TRUST_CODE = click.option("--trust-remote-code", "unsafe_load", is_flag=True, callback=_trust, help="Run code that a "
                          "model brings: its own Python files, pickled modules and .pt2 files.")  # fmt: skip


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that say how to load MODEL where it is not a Hugging Face model."""
    return FACTORY(TRUST_CODE(REVISION(command)))


def attention_options(model: Path | None, attention: str | None, kv_cache: str | None) -> RunTimeFormats:
    """Returns the values of --attention and --kv-cache.

    One that was not given is taken from the plan of the checkpoint `model`, if any.
    """
    # Only our own checkpoints have a plan; a model of the hub attends in 16 bit unless an option says otherwise.
    file = Path(PLAN_FILE) if model is None else model / PLAN_FILE
    if model is not None and file.is_file() and None in (attention, kv_cache):
        planned = Plan.load(file).run_time
        attention, kv_cache = attention or planned["attention"], kv_cache or planned["kv_cache"]
    return {"attention": attention, "kv_cache": kv_cache}


def print_json(value: Any) -> None:
    """Prints the result of --json."""
    click.echo(json_text(value, indent=1).replace("\x7f", "\\u007f"))  # the one control character that JSON allows


def echo(text: str, *, err: bool = False, newline: bool = True) -> None:
    """Prints a line, or part of one, in which names from files are only shown, whatever they hold."""
    click.echo(printable(text), err=err, nl=newline)


class Command(click.Command):
    """A command with --debug, whose expected errors end in one line and exit code 2."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"context_settings": HELP, **options})
        self.params.append(click.Option(["--debug"], is_flag=True, help="Show the traceback of an error."))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        moved = old_names.OPTIONS | (old_names.OF_PLANS if self.name == "quantize" else {})
        for index, (name, equals, value) in enumerate(argument.partition("=") for argument in args):
            if name in own:
                continue
            if name in moved:
                place = moved[name]
                if name not in old_names.OPTIONS and any(os.path.isfile(f"{each}/model_index.json") for each in args):
                    place = "for other models; a pipeline of diffusers has --bits and --max-error"
                click.echo(f"error: {name} is {place}", err=True)
                ctx.exit(2)
            new = old_names.RENAMED.get(name)
            if new in own:
                click.echo(f"warning: {name} is {new} since 0.4", err=True)
                args[index] = f"{new}{equals}{value}"
        ctx.meta[_ARGUMENTS] = list(args)
        try:
            # click silently takes the last of several values.
            values, _, order = self.make_parser(ctx).parse_args(list(args))
            for option, count in Counter(order).items():
                if (value := values[str(option.name)]) == "" or (isinstance(value, list) and "" in value):
                    raise click.UsageError(f"{option.get_error_hint(ctx)} is empty, as a variable that is not set", ctx)
                if isinstance(option, click.Option) and not (option.multiple or option.is_flag) and count > 1:
                    raise click.UsageError(f"{option.opts[0]} takes one value, and {count} are given", ctx)
            rest = super().parse_args(ctx, args)
            # bash does not expand --out=~/DIR, and cmd no ~ at all: a directory named ~ would be written.
            ctx.params |= {name: path.expanduser() for name, path in ctx.params.items() if isinstance(path, Path)}
            for name in {"calib", "data", "eval_texts", "own_tasks", "texts"} & ctx.params.keys():
                ctx.params[name] = tuple(type(text)(os.path.expanduser(text)) for text in ctx.params[name])
            return rest
        except click.BadParameter as error:
            given = re.match("'(.*)' is not one of", error.message)
            if given and error.param is not None and isinstance(error.param.type, click.Choice):
                hint = did_you_mean(given[1], error.param.type.choices)
            elif error.param is not None and error.param.name == "bits":
                hint = "; the name of a format is for --format"
            else:
                raise
            raise click.BadParameter(error.message.removesuffix(".") + hint, ctx, error.param) from None
        except click.UsageError as error:
            if hint := _hint(ctx.meta[_ARGUMENTS], own):
                raise click.UsageError(error.format_message().removesuffix(".") + hint, ctx) from None
            raise

    def invoke(self, ctx: click.Context) -> Any:
        with patient("stdout"), patient("stderr"), in_command():
            return self._invoke(ctx)

    def _invoke(self, ctx: click.Context) -> Any:
        debug = ctx.params.pop("debug")
        try:
            os.getcwd()
        except FileNotFoundError:
            # No relative path and no library of torch is found there.
            lost = "the working directory was deleted; change to one that exists, and run the command again"
            echo(f"error: {lost}", err=True)
            ctx.exit(2)
        # Not passed on: the commands take the name of the model with its revision in one.
        revision = ctx.params.pop("revision", None)
        out = ctx.params.get("out")
        # Taken first, so that a signal at any later moment can be answered.
        before = _identity(out)
        rank = int(os.environ.get("RANK", "0")) if "devices" in ctx.params else 0
        quiet = bool(ctx.params.get("quiet")) or rank > 0
        # Before anything imports torch, which reads OMP_NUM_THREADS once. In tests and notebooks torch is there
        # already, and its pool of threads cannot be resized from outside.
        if "torch" not in sys.modules and (warning := set_up_threads(os.environ)) is not None and not quiet:
            echo(warning, err=True)
        try:
            with terminable(), warnings_in_one_line(quiet=quiet), short_turns():
                joined = "devices" in ctx.params and _joins_ranks(ctx)
                if revision is not None:
                    # Commands call their first argument one or the other.
                    argument = "model" if "model" in ctx.params else "directory"
                    if ctx.params[argument] is None:
                        raise UserError(f"--revision {revision} needs --model")
                    ctx.params[argument] = with_revision(str(ctx.params[argument]), revision)
                try:
                    result = super().invoke(ctx)
                finally:
                    ctx.close()  # releases the command's locks and files, while signals are handled
                if joined:
                    from quant.calibration.ranks import leave

                    leave()
                return result
        # SIGTERM arrives here too: `Terminated` is a KeyboardInterrupt.
        except KeyboardInterrupt as signalled:
            number = signal.SIGTERM if isinstance(signalled, Terminated) else signal.SIGINT
            # Code from text that Ctrl-C has cut off, such as a namedtuple's, makes Python end by a SIGINT of its own
            # instead of by our exit code, unless other code from text runs after it.
            exec("")
            # The inode or the time of change of --out shows whether the result was put there already.
            when = "before" if _identity(out) == before else "after"
            what = "" if out is None else f" {when} {out} was written"
            if rank == 0:
                echo(f"error: stopped by {number.name}{what}{_goes_on(ctx.params)}", err=True)
            ctx.exit(128 + number)
        # click prints these and sets the exit code itself.
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            message, exit_code = _as_line(error)
            if rank:
                # An error of all ranks alike is the first one's to print, after which torchrun ends the others.
                time.sleep(_FIRST_RANK)
                message = f"rank {rank} (process {os.getpid()} on {platform.node()}): {message}"
            if debug:
                raise
            if exit_code != _FOLLOWED or rank == 0:
                echo(f"error: {message}{_goes_on(ctx.params) if exit_code == _FOLLOWED else ''}", err=True)
            ctx.exit(exit_code)


def _hint(arguments: Sequence[str], options: Iterable[str]) -> str:
    """Returns the end of a message on arguments that a word processor or a pasted line break changed."""
    for argument in arguments:
        dashes = re.match("[-‐–—−]+", argument)
        name = f"--{argument[dashes.end() :].partition('=')[0]}" if dashes else ""
        if name in options and not argument.startswith("--"):
            return f"; did you mean {name}?"
        if argument and not argument.strip("\\ \t\r\n"):
            return "; in a pasted command the backslash has to be the last character of its line"
    return ""


def _as_line(error: Exception) -> tuple[str, int]:
    """Returns one line about an error, and the exit code: 2 for errors that users can cause, else `_BUG`."""
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None and error.filename2 is None:
        near = near_file(os.fsdecode(error.filename)) if isinstance(error, FileNotFoundError) else ""
        message = f"{os.fsdecode(error.filename)}: {error.strerror}{near}"  # without Python's number of it
    if "usable temporary directory" in message:  # Python looks for one by writing to it
        return f"{getattr(error, 'strerror', message)}; make room there, or name another by TMPDIR", 2
    # PyTorch's own import fails where its libraries are not found.
    calls = list(traceback.walk_tb(error.__traceback__))
    codes = [(frame.f_code.co_name, frame.f_globals.get("__name__")) for frame, _ in calls]
    if getattr(error, "name", None) == "torch" or ("<module>", "torch") in codes:
        return f"PyTorch cannot be imported ({message}); install it again as pytorch.org says: pip install torch", 2
    # Python, numpy or torch found no memory, on a CPU or a GPU.
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and (type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in message)
    ):
        return f"out of memory: {message}; no output was written. It takes a machine with more, or fewer rows", 2
    # Everything that users can cause is a ValueError or an OSError here; any other class is a bug.
    if isinstance(error, ValueError | OSError) or message.startswith("Symlink loop"):  # Path.resolve's, to Python 3.12
        return message, 2
    if isinstance(error, Warning):
        frame, line = calls[-1]
        where = f"{type(error).__name__} at {Path(frame.f_code.co_filename).name}:{line}"
        return f"-W or PYTHONWARNINGS makes an error of a warning: {message} ({where})", 2
    # A rank that died breaks the collective calls of all others.
    signs = ("gloo", "NCCL", "onnection closed", "onnection reset", "Broken pipe")
    if os.environ.get("WORLD_SIZE", "1") != "1" and any(sign in message for sign in signs):
        return "another rank ended", _FOLLOWED
    return explained(error, message), _BUG


def command_line(ctx: click.Context) -> str:
    """Returns the command as it was given."""
    names = _names(ctx)
    return shlex.join([*(["quant"] if len(names) > 1 else []), *names, *ctx.meta[_ARGUMENTS]])


def _names(ctx: click.Context) -> list[str]:
    """Returns the names by which the toolbox finds a command, such as `plan make`."""
    is_inside = ctx.parent is not None and ctx.parent.parent is not None
    return [*(_names(ctx.parent) if is_inside and ctx.parent is not None else []), str(ctx.command.name)]


def _joins_ranks(ctx: click.Context) -> bool:
    """Makes this process one of the ranks that were started, or starts them and ends with them."""
    devices = ctx.params.pop("devices")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        if devices not in (None, 1):
            ctx.exit(launch([*_names(ctx), *ctx.meta[_ARGUMENTS]], devices))
        return False
    with importing():
        from quant.calibration.ranks import join, rank_and_world

        join()
    if rank_and_world()[0]:
        ctx.params |= {"quiet": True, "as_json": False}
    ctx.params["device"] = local_device(ctx.params["device"])
    return True


class Toolbox(click.Group):
    """A group of such commands."""

    command_class = Command

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"context_settings": HELP, **options})


def _identity(out: Any) -> tuple[int, int] | None:
    """Identifies the file or directory `out`, and changes when a command puts its result there; None without one."""
    try:
        status = Path(out).stat()
    except (OSError, TypeError):
        return None
    # A directory that is renamed into place has another inode; a file that is rewritten, another time.
    return status.st_ino, status.st_mtime_ns


def _goes_on(params: Mapping[str, Any]) -> str:
    """Returns the end of a stopped command's message where its next run continues after the finished steps."""
    # A run that keeps something has loaded it.
    store, out = sys.modules.get("quant.calibration.walk.step_store"), params.get("out")
    if store is None or out is None or not store.partial_path(Path(out)).is_dir():
        return ""
    how = " without --restart" if params.get("restart") else ""
    return f"; finished layers are kept, and the same command continues after them{how}"
