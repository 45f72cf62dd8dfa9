"""`nanoengine batch`: a file of rows in, a file of records out, resumable at any moment.

This module has the options, signals and exit codes. Jobs are implemented in `nanoengine/jobs/`, and
docs/batch.md is the manual.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from nanoengine.cli.options import EngineArgs, SamplingArgs, engine_options, sampling_fields, shared
from nanoengine.errors import ConfigError
from nanoengine.jobs.job import InputChangedError, Job, JobOptions
from nanoengine.jobs.manifest import describe_engine, sampling_line
from nanoengine.jobs.progress import Progress, summary, table
from nanoengine.jobs.record_log import OutputLostError, writing
from nanoengine.jobs.rows import read_by
from nanoengine.jobs.signals import Signals, Stopped
from nanoengine.jobs.work import TooManyErrorsError
from nanoengine.settings.checks import require_positive
from nanoengine.settings.config import EngineConfig

if TYPE_CHECKING:
    from nanoengine.llm import LLM
    from nanoengine.observe.watch import Watch
    from nanoengine.parallel.replicas import Replicas

ALL_ANSWERED, SOME_FAILED, REFUSED, TOO_MANY_ERRORS, SOME_DIFFER = 0, 1, 2, 3, 4
"""Exit codes; after a signal it is 128 + its number."""

MOST_GRACE_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchArgs(JobOptions, EngineArgs):
    """Answers files of rows: finished records are never lost, and the same command resumes.

    examples:
      nanoengine batch demo requests.jsonl --output answers.jsonl
      nanoengine batch Qwen/Qwen3-0.6B 'data/*.csv.gz' --template 'Sum up: {{ text }}' --chat
          --output sums.csv
      cat prompts.jsonl | nanoengine batch demo - --output - --max-tokens 64 | head

    Attributes:
        grace: Time that running rows get after the first Ctrl-C or SIGTERM [s].
        replicas: Run this many engines, each in its own process, on its own GPU or its own share of
            the cores.
        threads: Cores per replica on a CPU; by default all cores are shared evenly.
        replica_timeout: Kill a replica with rows that is silent for this time; the others run its
            rows [s].
        watch: Draw the KV pool and the running sequences on the terminal while they change.
        verify: When the job is complete, run this many answered rows again, each alone in a new
            engine, and compare: exit code 4 if a record differs.
        dry_run: Read and check all rows, report which ones would fail and the number of tokens, and
            write no file.
    """

    inputs: Annotated[Positional[tuple[str, ...]], arg(metavar="INPUT...")]
    sampling: SamplingArgs = field(default_factory=SamplingArgs)  # type: ignore[valid-type]
    grace: float = 10.0
    replicas: int | None = None
    threads: int | None = None
    replica_timeout: float = 1800.0
    watch: bool = False
    verify: int | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.grace <= MOST_GRACE_S:
            raise ConfigError(f"--grace must be from 0 to {MOST_GRACE_S:,}, got {self.grace}")
        require_positive(self, ConfigError, "replicas", "verify")
        if self.threads is not None and self.replicas is None:
            raise ConfigError("--threads are those of a replica: give --replicas too")
        if not 0 < self.replica_timeout <= MOST_GRACE_S:
            raise ConfigError(
                f"--replica-timeout must be above 0 and at most {MOST_GRACE_S:,}, got"
                f" {self.replica_timeout}"
            )
        if self.verify is not None and self.dry_run:
            raise ConfigError("--dry-run answers no row, so --verify has none: give one of them")
        if self.watch and self.replicas is not None:
            raise ConfigError("--watch draws one engine: leave it out, or --replicas")
        # Why not super(): a dataclass with slots replaces the class that super() refers to.
        EngineArgs.__post_init__(self)


def main(args: BatchArgs) -> int:
    """Runs the command; returns its exit code."""
    options, sampling = engine_options(args), sampling_fields(args.sampling)
    config = EngineConfig.from_kwargs(**options)
    of_job = JobOptions(**shared(JobOptions, args) | {"sampling": sampling})
    if args.dry_run:
        from nanoengine.jobs.dry_run import dry_run

        return dry_run(of_job, config, args.model)
    if args.watch:
        require_terminal()
    job = Job(of_job, lambda: describe_engine(config, args.model))
    try:
        with closing(job), Signals(args.grace) as signals:
            if args.verify is not None:
                from nanoengine.jobs.verify import readable_log

                readable_log(job)  # Why first: otherwise it would fail after all rows.
            with _engines(args, options) as llm:
                code = run(job, llm, args, signals)
            if args.verify is not None and job.is_complete:
                code = _verified(job, args, options) or code
            return code
    except Stopped as stopped:  # during loading or verifying; `run` handles rows
        what = "before answers were verified" if job.is_complete else "before any row ran"
        print(f"interrupted {what}", file=sys.stderr)
        return stopped.code
    except OutputLostError as error:
        print(f"error: {error.strerror}", file=sys.stderr)
        return SOME_FAILED


def _verified(job: Job, args: BatchArgs, options: dict[str, Any]) -> int:
    """Compares answers with answers of a new engine; returns 0 if they are equal."""
    from nanoengine.jobs.verify import verify
    from nanoengine.llm import LLM

    with LLM(**options) as llm:

        def alone(rows: Any) -> Any:
            llm.reset_prefix_cache()
            return llm.stream(rows, on_error="record")

        count, told = verify(job, alone, args.verify or 0, args.seed, *of_model(llm, args))
    same = (
        f"verified: of {count:,} answers, run again alone in a fresh engine, {count - len(told):,}"
        f" are the same to the last character"
    )
    print(*told, same, sep="\n", file=sys.stderr)
    return SOME_DIFFER if told else ALL_ANSWERED


def _engines(args: BatchArgs, options: dict[str, Any]) -> LLM | Replicas:
    """The engine, or the engines, that answer rows."""
    # Why also with ranks: if one dies, a replica restarts all of them.
    if args.replicas is not None or args.tensor_parallel_size > 1:
        from nanoengine.parallel.replicas import local_replicas

        engines = local_replicas(options, args.replicas or 1, args.threads)
    else:
        from nanoengine.llm import LLM

        return LLM(**options)
    engines.timeout_s = args.replica_timeout
    return engines


def run(job: Job, llm: LLM | Replicas, args: BatchArgs, signals: Signals) -> int:
    """Answers the remaining rows; returns the exit code."""
    used = sampling_line(llm.config, llm.info, job.options.sampling)
    print(f"sampling: {used}; what a row sets comes first", file=sys.stderr)
    work = job.work(*of_model(llm, args))
    signals.work = work
    progress = Progress(job, work.counts, llm.stats)
    from nanoengine.llm import LLM

    observers = llm.engine.observers if isinstance(llm, LLM) else llm.observers
    shown: Progress | Watch = progress
    if args.watch:
        from nanoengine.observe.watch import Watch

        shown = Watch(progress.line)
    observers.append(shown)
    started, code, ended = time.perf_counter(), SOME_FAILED, "complete"
    try:
        if isinstance(llm, LLM):
            work.run(lambda rows: llm.stream(rows, on_error="record"))
        else:
            llm.run(work, None if job.num_rows is None else job.num_rows - job.num_done)
        if signals.caught is not None:
            raise Stopped(signals.caught)
        job.complete()
        code = SOME_FAILED if work.counts.failed + job.num_failed else ALL_ANSWERED
    except TooManyErrorsError as error:
        code, ended = TOO_MANY_ERRORS, "too many errors"
        print(f"error: {error}", file=sys.stderr)
    except BrokenPipeError:
        raise
    except (OSError, InputChangedError) as error:
        ended = getattr(error, "strerror", None) or str(error)
        print(f"error: {ended}", file=sys.stderr)
    except Stopped as stopped:
        code, ended = stopped.code, "interrupted"
    finally:
        signals.work = None
        shown.close()
        observers.remove(shown)
    facts = summary(job, work.counts, time.perf_counter() - started, ended)
    print(table(facts), *progress.advice(), sep="\n", file=sys.stderr)
    if code >= TOO_MANY_ERRORS:
        print("the same command goes on from here", file=sys.stderr)
    if args.summary_json is not None:
        with writing(args.summary_json):
            args.summary_json.write_text(json.dumps(facts) + "\n", encoding="utf-8")
    return code


def of_model(llm: LLM | Replicas, args: EngineArgs) -> Any:
    """The arguments of a `RowReader` after its options, for a model."""
    return read_by(args.model, llm.config, llm.info, lambda: llm.tokenizer)


def require_terminal() -> None:
    """Raises ConfigError if --watch has no terminal to draw on."""
    if not sys.stderr.isatty():
        raise ConfigError("--watch draws on a terminal, and stderr is none: leave it out")
