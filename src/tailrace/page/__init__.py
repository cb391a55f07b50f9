"""The page of a run in a browser: a process of its own that reads the run's folder and answers HTTP.

    follow   what is new in run.db, folded by `obs`          ->  figures
    app      the fixed table of addresses; access: who may come ->  responses
    http     the ASGI application: requests and responses, and what a request may contain
    server   uvicorn, with every limit of time and number
    serve    puts it together for `tailrace page`
    report   the page as one file

It only ever reads, so it can be started, stopped and broken while the run goes on.
"""
