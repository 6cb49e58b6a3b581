"""``specdec watch``: what a running server drafts, judged from the metrics that it exports.

``snapshot.py`` reads a page of metrics, ``history.py`` subtracts them, ``judge.py`` judges the difference by
the ``limits.py``, which the rules for Prometheus in ``deploy/`` share, and ``report.py`` shows it all.
"""
