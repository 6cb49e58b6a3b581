"""``specdec batch``: a file of requests in, a file of answers out, with the engine in this process.

``lines.py`` reads the input, which may be untrusted, ``formats.py`` turns lines into requests to the server's
application and answers into records, ``output.py`` keeps the records of earlier runs, and ``run.py`` does the
work. The extra ``serve`` installs the packages that it needs.
"""

from specdec_ext.batch.run import BatchFiles, BatchReport, run_batch

__all__ = ["BatchFiles", "BatchReport", "run_batch"]
