"""The page of a run in a browser: a process of its own that reads the run's folder and answers HTTP.

    follow   what is new in run.db, folded by `obs`          ->  figures
    site     the fixed table of addresses; door: who may come ->  answers
    http     one connection, bytes in and bytes out (h11)
    server   sockets, TLS and every limit of time and number
    serve    puts it together for `tailrace page`
    report   the page as one file

It only ever reads, so it can be started, stopped and broken while the run goes on.
"""
