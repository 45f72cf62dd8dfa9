"""Jobs: files of rows in, a file of records out, resumable at any moment.

    source     files to lines: JSON lines, text, CSV, Parquet; gzip, zstd, globs, stdin
    feed       rows that another thread brings: of stdin, of a parent
    rows       a line to a task: prompt, sampling parameters, what the record repeats of the row
    order      which task is next: common prefixes together, the longest first at the end
    work       tasks to engines, outputs to records: the loop
    records    an output or an error to a line of JSON
    log        the output file: appended whole records, read back after a death
    job        all that is decided before a model loads: the manifest, what is done already
    journal    which rows went to the engine, and crashes per row
    progress   a live line, log lines, the summary
    datasets   the same for frames, tables and iterables in Python
    pooled     rows that ask for vectors and scores
    tables     a log as a Parquet file
    dry_run, verify    rows that are checked before they run, and answers behind

Nothing here knows the engine: rows go to a `stream`, outputs come back.
"""
