"""The `tailrace` command: what a person types, turned into calls; what goes wrong, turned into one sentence.

Only parsing lives here. What a command does is in `launch`, imported when it runs, so that `--help` and mistakes answer
at once.
Exit codes: 0 done, 1 a replay found a difference, 2 bad input or a run that cannot go on, 3 a simulated fleet came to a
standstill, 4 a worker whose run is not heard of any more, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from tailrace.errors import TailraceError, UsageError
from tailrace.launch import arguments as values
from tailrace.launch.beginning import Beginning, Origin
from tailrace.launch.command_words import split_words
from tailrace.logs import LEVELS, drain_output, for_command, queue_output, set_level
from tailrace.release import __version__

if TYPE_CHECKING:
    from tailrace.launch.supervisor import Supervisor

log = logging.getLogger(__name__)

SETTINGS = "Any setting can be given too: --schedule.kind sync, --cluster.gpus 64. --dry-run prints them all."
OF_WORKER = "Settings of [rollout] can be given for this machine's own replicas: --rollout.engine vllm."
DESCRIPTION = "RL post-training without the synchronization barrier: train, simulate, plan and examine."


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return _guarded(lambda: _run(list(sys.argv[1:] if argv is None else argv)))
    finally:
        drain_output()


def _guarded(command: Callable[[], int]) -> int:
    """The command's exit code; what goes wrong is told."""
    for_command()
    try:
        status = command()
        sys.stdout.flush()
    except TailraceError as error:
        log.error("%s", error)
        return 2
    except RuntimeError as error:
        if type(error).__name__ != "StandstillError":
            raise
        log.error("the simulated fleet came to a standstill: %s; please report this config", error)
        return 3
    except KeyboardInterrupt:
        log.warning("interrupted")
        return 130
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _run(words: list[str]) -> int:
    parser, commands = _parser()
    if not words:
        parser.print_help()
        return 0
    own, settings = split_words(words, commands)
    arguments = parser.parse_args(own)
    command: Callable[[argparse.Namespace], int] = arguments.run
    if settings and not hasattr(arguments, "files") and command not in (_worker, _fork):
        raise UsageError(f"{arguments.command} has no option {settings[0]}; see tailrace {arguments.command} --help")
    arguments.settings = settings
    set_level(arguments.log_level)
    if getattr(arguments, "dry_run", False) and command is not _simulate:
        return _print_settings(arguments)
    return command(arguments)


# --------------------------------------------------------------------------------------------------------- commands


def _print_settings(arguments: argparse.Namespace) -> int:
    from tailrace.launch.settings import print_settings

    return print_settings(arguments.files, arguments.settings)


def _simulate(arguments: argparse.Namespace) -> int:
    from tailrace.launch.simulate import SimulateOptions, simulate

    return simulate(
        SimulateOptions(
            files=arguments.files,
            settings=arguments.settings,
            gpus=arguments.gpus,
            schedules=arguments.schedules,
            as_json=arguments.json,
            plot=arguments.plot,
            record=arguments.record,
            dry_run=arguments.dry_run,
        )
    )


def _plan(arguments: argparse.Namespace) -> int:
    from tailrace.launch.plan import PlanGoal, plan

    goal = PlanGoal(arguments.budget, arguments.throughput)
    return plan(arguments.files, arguments.settings, arguments.json, goal)


def _train(arguments: argparse.Namespace) -> int:
    from tailrace.launch.secret import read_secret
    from tailrace.launch.supervisor import Supervisor

    queue_output()
    beginning = Beginning(arguments.resume, arguments.auto_resume, arguments.accept_changed_inputs)
    return Supervisor(read_secret(arguments.secret)).keep(
        lambda supervisor: _guarded(lambda: _control(arguments.files, arguments.settings, beginning, supervisor))
    )


def _fork(arguments: argparse.Namespace) -> int:
    from tailrace.launch.supervisor import Supervisor

    queue_output()
    beginning = Beginning(origin=Origin(arguments.journal, arguments.version))
    return Supervisor().keep(
        lambda supervisor: _guarded(lambda: _control([], arguments.settings, beginning, supervisor))
    )


def _control(files: list[str], settings: list[str], beginning: Beginning, supervisor: Supervisor) -> int:
    """Imported by the controller's process alone: its supervisor stays small."""
    from tailrace.launch.controller import control

    return control(files, settings, beginning, supervisor)


def _worker(arguments: argparse.Namespace) -> int:
    from tailrace.launch.machines import Patience, work

    queue_output()
    room = (arguments.replicas, arguments.ranks, arguments.store)
    patience = Patience(arguments.wait, arguments.stay)
    return work(arguments.join, arguments.key, *room, arguments.settings, patience, arguments.site or "")


def _price(arguments: argparse.Namespace) -> int:
    from tailrace.launch.price import price_replica

    return price_replica(arguments.journal, arguments.id, arguments.dollars)


def _workers(arguments: argparse.Namespace) -> int:
    from tailrace.launch.workers import workers

    return workers(arguments.journal, arguments.invite, arguments.revoke, arguments.reason)


def _launch(arguments: argparse.Namespace) -> int:
    raise AssertionError(f"a placer runs itself, and {arguments.command} is none")


def _eval(arguments: argparse.Namespace) -> int:
    from tailrace.launch.models import evaluate

    return evaluate(arguments.journal, arguments.version)


def _export(arguments: argparse.Namespace) -> int:
    from tailrace.launch.models import export, export_trajectories

    if (arguments.out is None) == (arguments.trajectories is None):
        raise UsageError("export writes a model (--out DIR) or samples (--trajectories FILE); name one of them")
    if arguments.trajectories is not None:
        return export_trajectories(arguments.journal, arguments.trajectories)
    return export(arguments.journal, arguments.version, arguments.out)


def _bench(arguments: argparse.Namespace) -> int:
    from tailrace.launch.bench import bench_schedules

    return bench_schedules(arguments.files, arguments.settings, arguments.rounds, arguments.json)


def _fit(arguments: argparse.Namespace) -> int:
    from tailrace.launch.fit import print_fit

    return print_fit(arguments.journal)


def _story(arguments: argparse.Namespace) -> int:
    from tailrace.launch.story import print_story

    return print_story(arguments.journal, arguments.id)


def _samples(arguments: argparse.Namespace) -> int:
    from tailrace.launch.samples import ListOptions, print_samples

    options = ListOptions(vars(arguments), arguments.json, arguments.prompts)
    return print_samples(arguments.journal, arguments.id, options)


def _page(arguments: argparse.Namespace) -> int:
    from tailrace.launch.page import serve_page

    return serve_page(arguments.journals, arguments.listen, arguments.token_file, arguments.save)


def _report(arguments: argparse.Namespace) -> int:
    from tailrace.launch.page import write_report

    return write_report(arguments.journals, arguments.out)


def _trace(arguments: argparse.Namespace) -> int:
    from tailrace.launch.trace import write_trace

    return write_trace(arguments.journal, arguments.out)


def _log(arguments: argparse.Namespace) -> int:
    from tailrace.launch.log import log_run

    return log_run(arguments.journal, arguments.to, arguments.follow, arguments.again)


def _replay(arguments: argparse.Namespace) -> int:
    from tailrace.launch.replay import replay_run

    return replay_run(arguments.journal)


def _doctor(arguments: argparse.Namespace) -> int:
    from tailrace.launch.doctor import print_report

    return print_report(arguments.files, arguments.settings, arguments.cards)


# ---------------------------------------------------------------------------------------------------------- parsing


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


Run = Callable[[argparse.Namespace], int]
Add = Callable[..., _Parser]  # name, what runs it, a line about it, what follows its options
RECORDED = "the directory of a run, or what --record wrote"


def _parser() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(prog="tailrace", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"tailrace {__version__}")
    group = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)

    def add(name: str, run: Run, text: str, epilog: str = "") -> _Parser:
        command = group.add_parser(name, help=text, description=text, epilog=epilog, allow_abbrev=False)
        return _of_anybody(command, run)

    _add_simulating(add)
    _add_training(add)
    _add_launching(add)
    _add_looking(add)
    return parser, dict(group.choices)


def _add_simulating(add: Add) -> None:
    simulate = _of_files(add("simulate", _simulate, "simulate the schedules side by side", SETTINGS))
    simulate.add_argument(
        "--gpus", type=values.counts, metavar="N,N,...", help="numbers of GPUs to simulate instead of one"
    )
    simulate.add_argument("--schedules", type=values.names, metavar="A,B,...", help="only these schedules")
    simulate.add_argument("--json", action="store_true", help="one JSON object for programs instead of a table")
    simulate.add_argument(
        "--plot", type=values.path, metavar="FILE", help="draw throughput and timeline (.png or .html)"
    )
    simulate.add_argument(
        "--record", type=values.path, metavar="DIR", help="keep the journal of a single simulation there"
    )

    plan = _of_files(add("plan", _plan, "find the best split, schedule and settings for a fleet", SETTINGS))
    plan.add_argument("--json", action="store_true", help="one JSON object for programs")
    budget = "the fastest fleet for so much an hour, of the cards in the settings"
    plan.add_argument("--budget", type=values.amount, metavar="DOLLARS", help=budget)
    throughput = "the cheapest fleet that trains so many tokens per second"
    plan.add_argument("--throughput", type=values.amount, metavar="TOKENS_PER_S", help=throughput)


def _add_training(add: Add) -> None:
    train = _of_files(add("train", _train, "train a model with real processes on this machine", SETTINGS))
    for option, text in values.RESUMING.items():
        train.add_argument(option, action="store_true", help=text)
    secret = "what the keys of the run are made from, 64 hex digits; unset: TAILRACE_RUN_SECRET, or a new one"
    train.add_argument("--secret", type=values.path, metavar="FILE", help=secret)
    accept = "with --resume: go on though data, reward or model are not what the run was begun with"
    train.add_argument("--accept-changed-inputs", action="store_true", help=accept)

    does = "begin another run with the weights and moments of a version of a run, and train it"
    fork = _of_a_run(add("fork", _fork, does, f"Its settings are those of RUN. {SETTINGS} --run.name is needed."))
    fork.add_argument(
        "--version", type=values.version, metavar="N", help="0: the start; best: of those evaluated; unset: the newest"
    )

    does = "let this machine generate or train for a run elsewhere, until Ctrl-C or its end"
    worker = add("worker", _worker, does, OF_WORKER)
    worker.add_argument("--join", required=True, metavar="HOST:PORT", help="where the run listens (local.listen)")
    replicas = "how many to start here (1; with --ranks: 0); auto: one for each GPU"
    worker.add_argument("--replicas", type=values.replicas, metavar="N", help=replicas)
    worker.add_argument(
        "--ranks", type=values.ranks, default=0, metavar="M", help="ranks of its trainer to start here (0)"
    )
    key = "join.key of the run's folder; unset: TAILRACE_JOIN_KEY has its content"
    worker.add_argument("--key", type=values.path, metavar="FILE", help=key)
    store = "keep the tokens that are generated here in this directory; unset: they go to the run's machine"
    worker.add_argument("--store", type=values.path, metavar="DIR", help=store)

    site = "where this machine is, if far away: weights cross the link to a site once, and are handed on there"
    worker.add_argument("--site", type=values.site, metavar="NAME", help=site)
    wait = "for so long the run need not be there yet (0)"
    worker.add_argument("--wait", type=values.seconds, default=0.0, metavar="SECONDS", help=wait)
    stay = "when the run stops without being complete, wait for it again: it may be resumed"
    worker.add_argument("--stay", action="store_true", help=stay)

    strangers = _of_a_run(add("workers", _workers, "the keys of strangers that work for a run: make or withdraw one"))
    either = strangers.add_mutually_exclusive_group()
    either.add_argument("--invite", metavar="NAME", help="make a key for a worker that is not trusted")
    either.add_argument("--revoke", metavar="NAME", help="withdraw it; a run that goes on drops what it made")
    strangers.add_argument("--reason", default="", metavar="TEXT", help="why it is withdrawn, for the journal")

    price = _of_a_run(add("price", _price, "set what an hour of a replica costs, while the run goes on"))
    price.add_argument("id", metavar="ID", help="replica r3, or host h2 for all replicas there")
    price.add_argument("dollars", type=values.dollars, metavar="DOLLARS", help="0: it costs nothing")

    evaluate = _of_a_run(add("eval", _eval, "held-out accuracy of a version of a run"))
    which = "0: the start; best: of those evaluated while training; unset: the newest"
    evaluate.add_argument("--version", type=values.version, metavar="N", help=which)

    export = _of_a_run(add("export", _export, "a version of a run as a Hugging Face model directory"))
    export.add_argument("--out", type=values.path, metavar="DIR", help="a directory that does not exist yet")
    export.add_argument("--version", type=values.version, metavar="N", help=which)
    rows = "write all samples, with text, tokens and log-probs, into a parquet file instead"
    export.add_argument("--trajectories", type=values.path, metavar="FILE", help=rows)

    bench = add("bench", _bench, "run all schedules for real, side by side", SETTINGS)
    bench.add_argument("what", choices=["schedules"], help="what to compare")
    _of_files(bench)
    bench.add_argument(
        "--rounds", type=values.rounds, default=1, metavar="N", help="run each so often and take the median"
    )
    bench.add_argument("--json", action="store_true", help="one JSON object for programs")


def _add_launching(add: Add) -> None:
    from tailrace.launch.placers.options import add_placers

    launch = add("launch", _launch, "run on many machines that a cluster manager hands out")
    group = launch.add_subparsers(dest="placer", metavar="PLACER", required=True, parser_class=_Parser)

    def placer(name: str, run: Run, text: str) -> _Parser:
        command = group.add_parser(name, help=text, description=text, epilog=SETTINGS, allow_abbrev=False)
        return _of_anybody(_of_files(command), run)

    add_placers(placer)


def _add_looking(add: Add) -> None:
    costs = "costs measured in a real run, as settings for simulate and for an emulated engine"
    _of_a_run(add("fit", _fit, costs))

    story = _of_a_run(
        add("story", _story, "tell the life of one component or sample of a recorded run, event by event"), RECORDED
    )
    ids = "trajectory t17, group g3, replica r0, relay h0, version v5 or prompt p3"
    story.add_argument("id", metavar="ID", help=ids)

    values.add_samples(_of_a_run(add("samples", _samples, "read the samples of a run: all, by filter, or one in full")))

    shown = "show a run in the browser, while it goes on or afterwards, until Ctrl-C"
    page = add("page", _page, shown)
    page.add_argument(
        "journals", nargs="+", type=values.path, metavar="RUN", help=f"{RECORDED}; or a directory with runs"
    )
    page.add_argument("--listen", metavar="ADDRESS:PORT", help="127.0.0.1:0, a free port for this machine only")
    token = "its content is asked for; needed where others can come; unset: TAILRACE_PAGE_TOKEN"
    page.add_argument("--token-file", type=values.path, metavar="FILE", help=token)
    page.add_argument(
        "--save", type=values.path, metavar="FILE.html", help="write the page as one file that needs no server"
    )

    told = "tell a tracker of a run: jsonl, tensorboard, wandb or trackio"
    logged = _of_a_run(add("log", _log, told))
    logged.add_argument("--to", type=values.names, required=True, metavar="A,B,...", help="which of them")
    logged.add_argument("--follow", action="store_true", help="until the run is over, rather than up to now")
    logged.add_argument("--again", action="store_true", help="from its beginning, as a new run of the tracker")

    report = add("report", _report, "a run as one HTML file to send: figures, curves, timeline, samples, settings")
    report.add_argument(
        "journals", nargs="+", type=values.path, metavar="RUN", help=f"{RECORDED}; several are compared"
    )
    report.add_argument(
        "-o", "--out", type=values.path, default="report.html", metavar="FILE.html", help="(report.html)"
    )

    trace = _of_a_run(add("trace", _trace, "what every process did, for Perfetto or chrome://tracing"), RECORDED)
    trace.add_argument("-o", "--out", type=values.path, default="trace.json", metavar="FILE.json", help="(trace.json)")

    compared = "run a journal through a fresh control plane and compare the commands"
    _of_a_run(add("replay", _replay, compared), RECORDED)

    doctor = add("doctor", _doctor, "what this machine, and these settings, can and cannot do", SETTINGS)
    _of_files(doctor, "*")
    cards = "deal GPUs that are not here: how many, and the GB of each (8x80)"
    doctor.add_argument("--cards", metavar="NxGB", help=cards)


def _of_anybody(command: _Parser, run: Run) -> _Parser:
    command.set_defaults(run=run)
    command.add_argument("--log-level", metavar="LEVEL", help=f"{', '.join(LEVELS)} (info)")
    return command


def _of_files(command: _Parser, count: str = "+") -> _Parser:
    text = "settings in TOML; later files override earlier ones"
    command.add_argument("files", nargs=count, metavar="FILE", help=text)
    command.add_argument("--dry-run", action="store_true", help="check and print all settings, do nothing else")
    return command


def _of_a_run(command: _Parser, which: str = "the directory of a run") -> _Parser:
    command.add_argument("journal", type=values.path, metavar="RUN", help=which)
    return command


if __name__ == "__main__":
    sys.exit(main())
