"""`nanoengine batch`: a file of rows in, a file of records out, resumable at any moment.

This module has the options and exit codes. Jobs are implemented in `nanoengine/jobs/`, and
docs/batch.md is the manual.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from nanoengine.cli.options import EngineArgs, SamplingArgs, engine_options, sampling_fields, subset
from nanoengine.errors import ConfigError
from nanoengine.jobs.job import InputChangedError, Job, JobOptions
from nanoengine.jobs.manifest import describe_engine, sampling_line
from nanoengine.jobs.progress import Progress, report
from nanoengine.jobs.record_log import OutputLostError
from nanoengine.jobs.records import Recorder
from nanoengine.jobs.rows import reader_args
from nanoengine.jobs.signals import Signals, Stopped
from nanoengine.jobs.work import Counts, TooManyErrorsError
from nanoengine.settings.checks import require_positive
from nanoengine.settings.config import EngineConfig
from nanoengine.text.load_tokenizer import find_chat_template

if TYPE_CHECKING:
    from nanoengine.llm import LLM
    from nanoengine.parallel.replicas import Replicas

ALL_ANSWERED, SOME_FAILED, REFUSED, TOO_MANY_ERRORS, SOME_DIFFER = 0, 1, 2, 3, 4
"""Exit codes; after a signal it is 128 + its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchArgs(JobOptions, EngineArgs):
    """Runs files of rows: finished records are never lost, and the same command resumes.

    examples:
      nanoengine batch demo requests.jsonl --output answers.jsonl
      nanoengine batch Qwen/Qwen3-0.6B 'data/*.csv.gz' --template 'Sum up: {{ text }}'
          --output sums.csv
      cat prompts.jsonl | nanoengine batch demo - --output - --max-tokens 64 | head

    Attributes:
        raw: Send prompts as they are; by default they are sent as chat messages if the model has a
            chat template.
        shutdown_timeout: Time that running rows have to finish after the first Ctrl-C or SIGTERM
            [s].
        replicas: Run this many engines, each in its own process, on its own GPU or its own share of
            the cores.
        threads_per_replica: Cores per replica on a CPU; by default an equal share of all cores.
        verify: When the job is complete, run this many answered rows again, one at a time in a new
            engine, and compare: exit code 4 if a record differs.
        dry_run: Check all rows, report which ones would fail and the number of tokens, and write no
            file.
    """

    inputs: Annotated[Positional[tuple[str, ...]], arg(metavar="INPUT...")]
    sampling: SamplingArgs = field(default_factory=SamplingArgs)  # type: ignore[valid-type]
    raw: bool = False
    shutdown_timeout: float = 10.0
    replicas: int | None = None
    threads_per_replica: int | None = None
    verify: int | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.shutdown_timeout <= 86_400:
            limit = "at least 0 and at most 86,400"
            raise ConfigError(f"--shutdown-timeout must be {limit}, got {self.shutdown_timeout}")
        require_positive(self, ConfigError, "replicas", "verify")
        if self.threads_per_replica is not None and self.replicas is None:
            raise ConfigError("--threads-per-replica needs --replicas")
        if self.verify is not None and self.dry_run:
            raise ConfigError("--dry-run runs no rows that --verify could run again: give only one")
        # Why not super(): a dataclass with slots replaces the class that super() refers to.
        EngineArgs.__post_init__(self)


def main(args: BatchArgs, make_recorder: type[Recorder] = Recorder) -> int:
    """Runs the command; returns its exit code.

    Args:
        make_recorder: the class of the maker of records.
    """
    started = time.perf_counter()
    options = engine_options(args)
    config = EngineConfig.from_kwargs(**options)
    job_options = row_options(JobOptions, args, config)
    if args.dry_run:
        from nanoengine.jobs.dry_run import dry_run

        return dry_run(job_options, config, args.model)
    job = Job(job_options, lambda: describe_engine(config, args.model))
    job.make_recorder = make_recorder
    try:
        with closing(job), Signals(args.shutdown_timeout) as signals:
            if args.verify is not None:
                from nanoengine.jobs.verify import readable_log

                readable_log(job)  # Why here: otherwise it would raise after all rows.
            if job.num_done == job.num_rows:  # No row is left, so no model is loaded.
                job.complete()
                report(job, Counts(), "complete", time.perf_counter() - started)
                code = SOME_FAILED if job.num_failed else ALL_ANSWERED
            else:
                with _engines(args, options) as llm:
                    code = run(job, llm, args, signals, time.perf_counter() - started)
            if args.verify is not None and job.is_complete:
                code = _verify(job, args, options) or code
            return code
    except Stopped as stopped:  # while the model loads, or while --verify runs; see also `run`
        when = "before answers were verified" if job.is_complete else "before any new row ran"
        print(f"interrupted {when}", file=sys.stderr)
        return stopped.code
    except OutputLostError as error:
        print(f"error: {error.strerror}", file=sys.stderr)
        return SOME_FAILED


def row_options(options_class: type, args: Any, config: EngineConfig) -> Any:
    """The options of rows or of a job. Prompts are sent as chat messages unless --raw is given or
    the model has no chat template."""
    sampling = sampling_fields(args.sampling)
    chat = not args.raw and bool(find_chat_template(config))
    return options_class(**subset(options_class, args) | {"sampling": sampling, "chat": chat})


def _verify(job: Job, args: BatchArgs, options: dict[str, Any]) -> int:
    """Compares answers with answers of a new engine; returns the exit code."""
    from nanoengine.jobs.verify import verify
    from nanoengine.llm import LLM

    with LLM(**options) as llm:

        def stream(rows: Any) -> Any:
            llm.reset_prefix_cache()
            return llm.stream(rows, on_error="record")

        reader_args = model_reader_args(llm, args)
        count, differences = verify(job, stream, args.verify or 0, args.seed, *reader_args)
    equal = f"{count - len(differences):,} of {count:,} answers are identical when run alone"
    print(*differences, f"verified: {equal}", sep="\n", file=sys.stderr)
    return SOME_DIFFER if differences else ALL_ANSWERED


def _engines(args: BatchArgs, options: dict[str, Any]) -> LLM | Replicas:
    """The LLM, or the replicas, that run rows."""
    # Why also with tensor parallelism: if a rank dies, the replica restarts all ranks.
    if args.replicas is not None or args.tensor_parallel_size > 1:
        from nanoengine.parallel.replicas import local_replicas

        return local_replicas(options, args.replicas or 1, args.threads_per_replica)
    from nanoengine.llm import LLM

    return LLM(**options)


def run(job: Job, llm: LLM | Replicas, args: BatchArgs, signals: Signals, loading_s: float) -> int:
    """Runs the remaining rows; returns the exit code."""
    sampling = sampling_line(llm.config, llm.info, job.options.sampling)
    print(f"sampling: {sampling}; fields of a row take precedence", file=sys.stderr)
    work = job.work(*model_reader_args(llm, args))
    signals.work = work
    progress = Progress(job, work.counts, llm.stats)
    from nanoengine.llm import LLM

    observers = llm.engine.observers if isinstance(llm, LLM) else llm.observers
    observers.append(progress)
    started, code, ended = time.perf_counter(), SOME_FAILED, "complete"
    try:
        if isinstance(llm, LLM):
            work.run(lambda rows: llm.stream(rows, on_error="record"))
        else:
            llm.run(work, None if job.num_rows is None else job.num_rows - job.num_done)
        if signals.signal_number is not None:
            raise Stopped(signals.signal_number)
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
        progress.close()
        observers.remove(progress)
    work.counts.output_tokens = progress.num_tokens  # Why: it includes unfinished rows.
    report(job, work.counts, ended, loading_s, time.perf_counter() - started)
    if code >= TOO_MANY_ERRORS and job.journal is not None and job.num_rows is not None:
        print("the same command resumes the job", file=sys.stderr)
    return code


def model_reader_args(llm: LLM | Replicas, args: EngineArgs) -> Any:
    """The arguments of a `RowReader` after its options, for a model."""
    return reader_args(args.model, llm.config, llm.info, lambda: llm.tokenizer)
