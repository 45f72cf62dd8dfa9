"""Batch jobs: files of rows in, a file of records out, resumable at any moment.

    source     files to lines: JSON lines, text, CSV, Parquet; gzip, zstd, globs, stdin
    feed       rows that another thread supplies: from stdin or from a parent process
    rows       a line to a task: prompt, sampling parameters, what the record repeats of the row
    order      the order of tasks: common prefixes together, the longest first at the end
    work       tasks to engines, outputs to records: the main loop
    records    an output or an error to a line of JSON
    log        the output file: complete records are appended, and read back after a crash
    job        all decisions before a model loads: the manifest, which rows are done already
    journal    which rows were sent to the engine, and crashes per row
    progress   a live line, log lines, the summary
    datasets   the same for data frames, tables and iterables in Python
    pooled     rows that ask for embeddings and scores
    tables     writes a log as a Parquet or CSV file
    dry_run    checks rows before they run
    verify     checks answers after they ran

This package does not know the engine: rows go to a `stream`, outputs come back.
"""
