"""``specdec serve``: an HTTP server with OpenAI's API on an :class:`~specdec_ext.engine.Engine`.

``app.py`` lists the endpoints. ``chat.py`` and ``completions.py`` build prompts and answers, ``sampling.py``
turns fields of a request into arguments of the engine, ``text/`` follows the text of each choice, and
``http/`` holds what crosses the wire. The extra ``serve`` installs the packages that it needs.
"""
