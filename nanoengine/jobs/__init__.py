"""Batch jobs: read files of rows, write a file of records, resume after interruptions.

    source      files to lines: JSON lines, text, CSV, Parquet; gzip, zstd, globs, stdin
    prefetch    rows that another thread supplies: from stdin, a parent process or Ray
    rows        a line to a task: prompt, sampling parameters, columns that its record repeats
    reorder     a fast order of tasks: common prefixes together, at the end the longest first
    work        the main loop: tasks to engines, outputs to records
    records     an output or an error to a line of JSON
    record_log  the output file: records are appended, and read back after a crash
    job         before a model loads: inputs, output files, which rows are done already
    manifest    what a job's answers depend on; an output of another job is refused
    journal     which rows were sent to the engine, and crashes per row
    paths       the paths of a job's files
    progress    a live line, log lines, the summary
    signals     graceful shutdown on Ctrl-C and SIGTERM
    datasets    answers for data frames, tables and iterables in Python
    pooled      rows that ask for embeddings and scores
    tables      writes a log of records as a Parquet or CSV file
    dry_run     checks rows before they run
    verify      checks answers after they ran

This package does not depend on the engine: it passes rows to a `stream`, which yields outputs.
"""
